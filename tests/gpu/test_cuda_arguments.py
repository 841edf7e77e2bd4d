# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What eager takes beside tensors of the device."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from steps import require_device
from torch import Tensor, nn

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


def test_what_is_made_lies_where_eager_makes_it() -> None:
    """Of a graph that takes no tensor too, and on the host beside results on the device."""

    def mask(rows: int) -> Tensor:
        return torch.arange(rows, device="cuda")[:, None] >= torch.arange(rows, device="cuda")

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin() * 2, torch.arange(3) + 1

    found = torch.compile(mask, backend="retrograd")(5)
    assert found.device == mask(5).device and torch.equal(found, mask(5))
    x = torch.randn(4, device="cuda", requires_grad=True)
    for found, wanted in zip(torch.compile(both, backend="retrograd")(x), both(x), strict=True):
        assert found.device == wanted.device
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("door", ["compile_backward", "torch.compile", "enable"])
def test_the_device_is_the_default(door: str) -> None:
    """Indices are looked at, seeds drawn and first calls checked on the host all the same."""
    with torch.device("cuda"):
        torch.manual_seed(0)
        table, last = nn.Embedding(11, 64), nn.Linear(64, 3)
        model = nn.Sequential(table, nn.Dropout(0.1), last)
        places = torch.randint(11, (8,))
        call: Callable[..., Tensor] = model
        if door == "compile_backward":
            call = retrograd.compile_backward(model, (places,))
        elif door == "torch.compile":
            call = torch.compile(model, backend="retrograd")
        with retrograd.enable() if door == "enable" else contextlib.nullcontext():
            for _ in range(3):
                model.zero_grad()
                out = call(places)
                out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert last.bias.grad is not None
    torch.testing.assert_close(last.bias.grad, (2 * out).sum(0), rtol=1e-4, atol=1e-4)
    rows = table.weight.grad
    assert rows is not None and rows.any()
    assert not rows[[n for n in range(11) if n not in places.tolist()]].any()
