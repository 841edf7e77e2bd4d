# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How arguments become the tensors of a program; torch's meta device stands for a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from retrograd.contract.signature import TENSOR, InputSpec, OutputSpec, Signature, TensorType
from retrograd.runtime.arguments.calling import ArgumentError, CallingConvention
from retrograd.runtime.programs.errors import ExecutionError
from retrograd.runtime.programs.tensors import as_argument

GPU = torch.device("meta")


def expected(name: str, device: str, shape: tuple[int, ...] = ()) -> InputSpec:
    return InputSpec(name, TensorType(shape, "float32", (), device, requires_grad=True))


def make_convention(*inputs: InputSpec, mutated: tuple[int, ...] = (), given: Any = None) -> CallingConvention:
    _, tree = pytree.tree_flatten(given or (tuple(range(len(inputs))), {}))
    outputs = (OutputSpec("out", TENSOR, expected("out", "cpu").type),)
    _, out_tree = pytree.tree_flatten(0)
    signature = Signature(params=(), buffers=(), inputs=inputs, outputs=outputs, mutated=mutated)
    return CallingConvention(signature, in_spec=tree, out_spec=out_tree, device=GPU)


def test_numbers_of_the_cpu_beside_tensors_of_a_gpu_are_copied_there() -> None:
    convention = make_convention(expected("args[0]", "meta", (2,)), expected("args[1]", "cpu"))
    number = torch.tensor(2.0, requires_grad=True)
    x, copied = convention.flatten((torch.empty(2, device=GPU), number), {})
    assert x.device == copied.device == GPU
    # The gradient comes back by way of the copy.
    history: Any = copied.grad_fn
    assert history.next_functions[0][0].variable is number
    assert convention.unflatten([torch.ones(())])[0].device.type == "cpu"
    with pytest.raises(
        ArgumentError, match=r"args\[1\]: expected torch.float32 of shape \(\) on cpu, found .* on meta"
    ):
        convention.flatten((x, copied), {})
    with pytest.raises(ArgumentError, match=r"args\[0\]: expected .* on meta, found .* on cpu"):
        convention.flatten((torch.empty(2), number), {})


def test_another_size_is_refused_with_the_way_to_leave_it_open() -> None:
    convention = make_convention(expected("args[0]", "meta", (8, 4)))
    with pytest.raises(ArgumentError, match=r"found .* \(3, 4\).*; compile with dynamic_shapes that leave axis 0 open"):
        convention.flatten((torch.empty(3, 4, device=GPU),), {})
    with pytest.raises(ArgumentError, match=r"\(0, 4\).*; where nothing is to be computed, call the model itself"):
        convention.flatten((torch.empty(0, 4, device=GPU),), {})
    with pytest.raises(ArgumentError, match=r"\(8,\).*; compile again for other shapes, dtypes or devices"):
        convention.flatten((torch.empty(8, device=GPU),), {})


def test_what_is_written_to_does_not_stay_on_the_cpu() -> None:
    with pytest.raises(ArgumentError, match=r"args\[1\] is written to, and is on the CPU beside tensors on meta; move"):
        make_convention(expected("args[0]", "meta"), expected("args[1]", "cpu"), mutated=(1,))


def test_programs_compiled_elsewhere_take_all_tensors_where_they_run() -> None:
    convention = make_convention(expected("args[0]", "cpu"), expected("args[1]", "cpu"))
    assert [t.device for t in convention.flatten((torch.empty((), device=GPU),) * 2, {})] == [GPU, GPU]
    with pytest.raises(ArgumentError, match=r"args\[0\]: expected .* on meta, found .* on cpu"):
        convention.flatten((torch.ones(()),) * 2, {})


def test_functions_take_numbers_of_the_cpu() -> None:
    """As of code by torch.compile, whose guards look at devices."""
    device: Any = SimpleNamespace(torch_device=GPU, is_staged=False, uri="gpu")
    argument = as_argument("f", 0, torch.ones(3, requires_grad=True), device, set())
    assert argument.device == GPU and not argument.requires_grad
    there: Any = SimpleNamespace(torch_device=torch.device("cpu"), is_staged=False, uri="local")
    with pytest.raises(ExecutionError, match="argument 0 is on meta, and the program runs on 'local'"):
        as_argument("f", 0, argument, there, set())


def test_tensors_by_name_are_taken_in_the_order_of_the_program() -> None:
    shapes = {"args[0]": (1,), "kwargs['x']": (2,), "kwargs['y']": (3,)}
    inputs = [expected(name, "meta", shape) for name, shape in shapes.items()]
    convention = make_convention(*inputs, given=((0,), {"x": 1, "y": 2}))
    first, x, y = (torch.empty(shape, device=GPU) for shape in shapes.values())
    for given in ({"x": x, "y": y}, {"y": y, "x": x}):
        assert [*map(id, convention.flatten((first,), given))] == [id(first), id(x), id(y)]
    others: list[tuple[Any, Any]] = [
        ((first, x), {"y": y}),
        ((first,), {"x": x, "z": y}),
        ((first,), {"x": x, "y": [y]}),
    ]
    for args, kwargs in others:
        with pytest.raises(ArgumentError, match="arguments differ in structure"):
            convention.flatten(args, kwargs)
