# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Addresses of kernels in this process, for the table of a step's time by kernel."""

import platform

import pytest
import torch
from dispatches import Row, show
from kernel_symbols import Kernels, count_steps, find_joined, find_kernels, plain_name

import retrograd


def test_a_kernel_is_found_by_the_addresses_in_it() -> None:
    kernels = Kernels([100, 160], [("f", "g"), ("h",)], 200)
    assert [kernels.find(address) for address in (99, 100, 159, 160, 199, 200)] == [
        *((), ("f", "g"), ("f", "g")),
        *(("h",), ("h",), ()),
    ]


def test_names_of_one_kernel_stand_for_each_other() -> None:
    names = [
        ("forward_dispatch_0_a_2", "backward_dispatch_3_a_2"),
        ("backward_dispatch_4_a_2",),
        ("forward_dispatch_1_b_2",),
    ]
    a, b = ({("forward", name), ("backward", name)} for name in ("a_2", "b_2"))
    called = [("backward", "b_2"), ("backward", "c_2")]
    assert find_joined([Kernels([1, 2, 3], names, 4)], called) == dict.fromkeys(a, a) | dict.fromkeys(b, b)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("backward_into_dispatch_2_matmul_8x4x2_f32", ("backward", "matmul_8x4x2_f32")),
        ("forward_21_into_dispatch_0_elementwise_9_f32", ("forward", "elementwise_9_f32")),
        ("_encoding_4_encode_8x4xf32_to_8x4xf32", ("", "encode_8x4xf32_to_8x4xf32")),
    ],
)
def test_numbers_are_left_out_of_names(name: str, expected: tuple[str, str]) -> None:
    assert plain_name(name) == expected


def test_calls_of_a_step() -> None:
    steps = [["a_2, copy", "x.py:1", 0], ["a_2", "x.py:2", 0]]
    assert count_steps({"forward": [{"steps": steps}], "backward": [{"steps": steps[1:]}]}) == {
        ("forward", "a_2"): (2, "x.py:1"),
        ("forward", "copy"): (1, "x.py:1"),
        ("backward", "a_2"): (1, "x.py:2"),
    }


@pytest.mark.skipif(platform.machine() != "x86_64", reason="relocations are those of x86-64")
def test_kernels_of_a_program_that_is_loaded() -> None:
    model, x = torch.nn.Linear(40, 30), torch.randn(20, 40)
    step = retrograd.compile_backward(model, (x,))
    step(x).sum().backward()
    # What is short is loaded for the calling thread too.
    kernels, *again = find_kernels(step._parts.program._vmfb)
    assert all(other.names == kernels.names for other in again)
    names = {name for both in kernels.names for name in both}
    assert {plain_name(name)[0] for name in names} >= {"forward", "backward"}
    assert kernels.find(kernels.starts[-1]) == kernels.names[-1]
    timed = {key for key in count_steps(step.explain().to_dict()["timeline"]) if key[1] != "copy"}
    assert timed & {plain_name(name) for name in names}


def test_what_is_no_executable_of_a_cpu_has_none() -> None:
    assert find_kernels(b"nothing") == []
    with pytest.raises(ValueError, match="0 kernels"):
        find_kernels(b"\x7fELF\x02\x01" + bytes(64))


def test_the_table_has_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    show([Row("forward matmul_2x2x2", 3.0, 2, 0.5, None, "x.py:1"), Row("libm.so", 1.0)], 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [
        "| 3.00 | 75.0% | 2 | 0.50 | - | forward matmul_2x2x2 | x.py:1 |",
        "",
        "4 ms a step, of all threads together",
    ]
