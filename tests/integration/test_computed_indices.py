# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Indices that the model computes: out of range they lead to no memory but the tensor's, and are seen in the result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import retrograd

# Far enough beyond the tensors that to read or write there would end the process.
FAR = 200_000_000
MODELS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index": lambda table, at, _: table[at * 2],
    "index of two axes": lambda table, at, _: table[at * 2, at + 1],
    "gather": lambda table, at, _: table.gather(0, (at * 2).unsqueeze(1).expand(-1, 6)),
    "embedding": lambda table, at, _: F.embedding(at * 2, table),
    "cross entropy": lambda table, at, _: F.cross_entropy(table[:3], at + 1),
    "index_put": lambda table, at, x: table.index_put((at * 2,), x),
    "index_put of two axes": lambda table, at, x: table.index_put((at * 2, at + 1), x[:, 0], accumulate=True),
    "scatter_add": lambda table, at, x: table.scatter_add(0, (at * 2).unsqueeze(1).expand(-1, 6), x),
    "index_add of bf16": lambda table, at, x: table.bfloat16().index_add(0, at * 2, x.bfloat16()).float(),
}


def all_models(table: Tensor, at: Tensor, x: Tensor) -> list[Tensor]:
    """What each of ``MODELS`` gives."""
    return [model(table, at, x) for model in MODELS.values()]


def test_out_of_range() -> None:
    """In range, gradients are eager's; out of range, what the index chooses or writes is NaN, and nothing else. In one
    program, which compiles once."""
    torch.manual_seed(0)
    table, x = torch.randn(9, 6, requires_grad=True), torch.randn(3, 6, requires_grad=True)
    step = retrograd.compile_backward(all_models, (table, torch.tensor([0, 1, 3]), x), fallback="error")
    places = torch.tensor([4, 0, 2])
    found, expected = step(table, places, x), all_models(table, places, x)
    torch.testing.assert_close(found, expected)
    # Together: for each set of outputs that is differentiated there would be another backward.
    weights = [torch.randn_like(result) for result in expected]
    torch.testing.assert_close(*(torch.autograd.grad(results, (table, x), weights) for results in (found, expected)))
    for places in (torch.tensor([0, FAR, 1]), torch.tensor([0, 1, -FAR])):
        results = step(table, places, x)
        for (name, model), values in zip(MODELS.items(), results, strict=True):
            with pytest.raises((IndexError, RuntimeError), match=r"out of|index"):
                model(table, places, x)
            assert values.isnan().any() and (values.dim() == 0 or not values.isnan().all()), name
        torch.autograd.grad(results, (table, x), weights)


def test_integers_chosen_out_of_range_are_out_of_range() -> None:
    """An index that is looked up by one out of range leads nowhere either."""

    def model(table: Tensor, steps: Tensor, at: Tensor) -> Tensor:
        return table[steps[at + 1]]

    table, steps = torch.randn(9, 4, requires_grad=True), torch.tensor([3, 1, 2])
    step = retrograd.compile_backward(model, (table, steps, torch.tensor([0, 1])), fallback="error")
    torch.testing.assert_close(step(table, steps, torch.tensor([1, 0])), table[[2, 1]])
    found = step(table, steps, torch.tensor([FAR, 0]))
    assert found[0].isnan().all()
    torch.testing.assert_close(found[1], table[1])


@pytest.mark.parametrize(
    "gather",
    [
        lambda x, at: x[..., 1].gather(1, at),
        lambda x, at: (x[..., 0] * x[..., 2]).index_select(1, at[0]),
        lambda x, at: x[:, :, ::2].gather(2, at[:, :2].unsqueeze(1) % 2),
    ],
    ids=["one of each row", "products of columns", "every other one"],
)
def test_columns_are_gathered_from(gather: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Elements with gaps between them in memory, as a coordinate of each box."""
    x, at = torch.randn(3, 6, 4, requires_grad=True), torch.tensor([[5, 0], [2, 2], [1, 4]])
    step = retrograd.compile_backward(gather, (x, at), fallback="error", cache=False)
    found, expected = (call(x, at) for call in (step, gather))
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(y, x, weights)[0] for y in (found, expected))
    torch.testing.assert_close(ours, theirs)
