# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Arguments in one storage: as they lie where nobody else refers to them, copies where somebody does."""

from typing import Any

import pytest
import torch
from torch import Tensor

from retrograd.contract.tensors import FunctionSpec, TensorSpec
from retrograd.runtime.programs.arenas import Arena, Member, ResultArena, read_arenas, take_joined

SIZE = 1024
ARENA = Arena(3 * SIZE, (Member(2, 0), Member(0, SIZE), Member(3, 2 * SIZE)))
SPECS = tuple(
    TensorSpec(name, "saved", shape, dtype)
    for name, shape, dtype in (
        ("a", (16, 16), "float32"),
        ("b", (4,), "float32"),
        ("c", (256,), "int32"),
        ("d", (512,), "bfloat16"),
    )
)


def allocate() -> list[Any]:
    """Results of a forward, in the order in which its backward takes them."""
    function = FunctionSpec("f", SPECS, SPECS, 0)
    results: list[Any] = [torch.empty(0) for _ in SPECS]
    ResultArena(ARENA, function, function).allocate(results)
    results[1] = torch.empty(4)
    for number, tensor in enumerate(results):
        tensor.fill_(number + 1)
    return results


def test_results_are_tensors_of_their_own_one_behind_another() -> None:
    results = allocate()
    addresses = [t.data_ptr() for t in results]
    assert [addresses[member.number] - addresses[2] for member in ARENA.members] == [0, SIZE, 2 * SIZE]
    assert [(tuple(t.shape), str(t.dtype)[6:]) for t in results] == [(s.shape, s.dtype) for s in SPECS]
    assert all(t._base is None and t.is_contiguous() for t in results)
    assert [bool(t.eq(n + 1).all()) for n, t in enumerate(results)] == [True] * 4
    before = results[0]._version
    results[2].add_(1)
    assert results[0]._version == before


def test_what_nobody_else_has_is_taken_as_it_lies() -> None:
    results = allocate()
    address, others = results[2].data_ptr(), [t.data_ptr() for t in results]
    take_joined(results, [ARENA])
    assert [t.data_ptr() for t in results] == others
    assert (results[2].data_ptr(), results[2].dtype, results[2].numel()) == (address, torch.uint8, 3 * SIZE)


def _hold(results: list[Any]) -> Any:
    return results[3]


def _hold_view(results: list[Any]) -> Any:
    return results[3][:1]


def _hold_storage(results: list[Any]) -> Any:
    return results[2].untyped_storage()


def _hold_array(results: list[Any]) -> Any:
    return results[0].numpy()


def _exchange(results: list[Any]) -> Any:
    results[0] = results[0].clone()


def _requires_grad(results: list[Any]) -> Any:
    results[0] = torch.full((16, 16), 1.0).requires_grad_()


def _transpose(results: list[Any]) -> Any:
    results[0] = results[0].t()


@pytest.mark.parametrize(
    "change", [_hold, _hold_view, _hold_storage, _hold_array, _exchange, _requires_grad, _transpose]
)
def test_what_others_may_know_is_copied(change: Any) -> None:
    results = allocate()
    held = change(results)
    before: list[Tensor] = [t.detach().clone() for t in results]
    address = results[2].data_ptr()
    take_joined(results, [ARENA])
    assert results[2].data_ptr() != address
    members = [results[2][m.offset : m.offset + SIZE] for m in ARENA.members]
    found = [part.view(before[m.number].dtype) for m, part in zip(ARENA.members, members, strict=True)]
    assert all(torch.equal(f, before[m.number].flatten()) for f, m in zip(found, ARENA.members, strict=True))
    for number in (0, 3):
        assert torch.equal(results[number], before[number])
        assert results[number].is_contiguous()
    results[2].zero_()
    assert held is None or any(torch.as_tensor(held).ravel().tolist())


def test_a_storage_of_which_a_part_is_another_argument_is_copied() -> None:
    results = allocate()
    results.append(results[3].view(2, 256))
    address = results[2].data_ptr()
    take_joined(results, [ARENA])
    assert results[2].data_ptr() != address


def test_what_a_program_says() -> None:
    said = ["2:3072:2:0", "2:3072:0:1024", "7:64:7:0", "2:3072:3:2048"]
    assert read_arenas(said) == (ARENA, Arena(64, (Member(7, 0),)))
    assert read_arenas([]) == ()
