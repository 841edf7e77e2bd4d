# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What eager takes beside tensors of the device."""

from collections.abc import Callable

import torch
from steps import require_device
from torch import Tensor

import retrograd
from retrograd.runtime.programs.tensors import give_up


def setup_module() -> None:
    require_device()


def test_numbers_and_indices_of_the_cpu() -> None:
    """As eager takes them beside tensors on the device; a gradient goes back to where its tensor is."""
    x, value = torch.randn(5, 6, device="cuda", requires_grad=True), torch.tensor(2.0, requires_grad=True)
    rows = torch.tensor([3, 0, 3])
    mask = torch.arange(30, device="cuda").reshape(5, 6) % 3 == 0

    def function(x: Tensor, value: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        filled: Tensor = (x * value).masked_fill(mask, value)[rows]
        return filled

    def run(call: Callable[..., Tensor], value: Tensor) -> list[Tensor]:
        out = call(x, value, rows, mask)
        return [out.detach(), *torch.autograd.grad(out.sum(), [x, value] if value.requires_grad else [x])]

    step = retrograd.compile_backward(function, (x, value, rows, mask))
    for found, wanted in zip(run(step, value), run(function, value), strict=True):
        torch.testing.assert_close(found, wanted)
    compiled = torch.compile(function, backend="retrograd")
    for found, wanted in zip(run(compiled, value.detach()), run(function, value.detach()), strict=True):
        torch.testing.assert_close(found, wanted)


def test_memory_that_nobody_else_has_is_worked_in() -> None:
    """And what somebody else refers to, or sees a part of, is copied."""
    values = [torch.ones(64, device="cuda") for _ in range(3)]
    held, part = values[1], values[2][:8]
    before = [value.data_ptr() for value in values]
    give_up(values, range(3))
    assert [value.data_ptr() == address for value, address in zip(values, before, strict=True)] == [True, False, False]
    assert held.data_ptr() == before[1] and part.data_ptr() == before[2]
