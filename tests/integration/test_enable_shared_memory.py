# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tensors of a backward that are one piece of memory at one step, and otherwise at the next."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import retrograd
from retrograd.frontend.autograd.steps import compilation
from retrograd.frontend.autograd.steps.layouts import Expanded
from retrograd.frontend.autograd.tracing.trace import TracedBackward, trace_backward

Pair = tuple[torch.Tensor, torch.Tensor]


def halves() -> Pair:
    first, second = torch.randn(3, 8).chunk(2, 1)
    return first, second


def swapped() -> Pair:
    first, second = halves()
    return second, first


def of_two() -> Pair:
    return halves()[0], halves()[1]


def one_twice() -> Pair:
    whole = torch.randn(3, 8)
    return whole[:, :4], whole[:, :4]


def part_of_more() -> Pair:
    memory = torch.randn(48)
    return memory.as_strided((3, 4), (8, 1), 8), memory.as_strided((3, 4), (8, 1), 12)


def of_other_strides() -> Pair:
    whole = torch.randn(4, 6)
    return whole.t()[:3], whole.t()[3:]


def each_its_own() -> Pair:
    return torch.randn(3, 4), torch.randn(3, 4)


def transposed() -> Pair:
    whole = torch.randn(4, 3)
    return whole.t(), whole.t()


def one_transposed() -> Pair:
    whole = torch.randn(12)
    return whole.view(3, 4), whole.view(4, 3).t()


PAIRS = [halves, swapped, of_two, one_twice, part_of_more, of_other_strides, each_its_own, transposed, one_transposed]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[TracedBackward]:
    """What is traced meanwhile."""
    found: list[TracedBackward] = []

    def keep(*args: Any, **kwargs: Any) -> TracedBackward:
        found.append(trace_backward(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(compilation, "trace_backward", keep)
    return found


def run(
    pairs: list[Callable[[], Pair]], enabled: bool, function: Callable[[torch.Tensor], torch.Tensor] = torch.sin
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    w: Any = torch.randn(3, 4, requires_grad=True)
    found = []
    for make in pairs:
        first, second = make()
        w.grad = None
        with retrograd.enable() if enabled else nullcontext():
            (function(w * first) * second + (w * second).cos() * first).sum().backward()
        found.append(w.grad)
    return found


@pytest.mark.parametrize("first", [halves, one_twice, of_two, transposed])
def test_memory_that_is_shared_otherwise_at_the_next_step(first: Callable[[], Pair]) -> None:
    pairs = [first] * 3 + [make for make in PAIRS for _ in range(2)] + [first] * 2
    torch.testing.assert_close(run(pairs, True), run(pairs, False))


def test_parts_of_one_piece_of_memory_are_taken_once(traced: list[TracedBackward]) -> None:
    # Of no other test's backward.
    found, expected = (run([halves] * 3, enabled, torch.tanh) for enabled in (True, False))
    torch.testing.assert_close(found, expected)
    (backward,) = traced
    ((number, other),) = backward.merged.items()
    assert other in backward.inputs and number not in backward.inputs


def test_a_cell_that_runs_often_takes_its_weights_once(traced: list[TracedBackward]) -> None:
    """Where an optimizer changes them while gradients are computed as well."""

    def steps(enabled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        cell, read = torch.nn.GRUCell(3, 4), torch.nn.Linear(4, 2)
        parameters = [*cell.parameters(), *read.parameters()]
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in parameters}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
        for _ in range(4):
            h = torch.zeros(2, 4)
            for _ in range(3):
                h = cell(torch.randn(2, 3), h)
                h = h + read(h).sum()
            for parameter in parameters:
                parameter.grad = None
            with retrograd.enable() if enabled else nullcontext():
                h.square().sum().backward()
        return [p.detach() for p in parameters]

    torch.testing.assert_close(steps(True), steps(False))
    assert len(traced[0].merged) > 4


def test_an_index_that_is_expanded_at_some_steps(traced: list[TracedBackward]) -> None:
    """As that of a network on a graph, which names whole rows; at the fourth step it names single elements."""
    rows = [torch.randint(64, (512, 1)).expand(512, 32) for _ in range(4)]
    indices = [*rows[:3], torch.randint(64, (512, 32)), rows[3]]
    table = torch.randn(64, 32, requires_grad=True)

    def gradient(index: torch.Tensor, *, compiled: bool) -> torch.Tensor:
        loss = (table.gather(0, index) ** 2).sum()
        with retrograd.enable(cache=False) if compiled else nullcontext():
            return torch.autograd.grad(loss, table)[0]

    for index in indices:
        torch.testing.assert_close(gradient(index, compiled=True), gradient(index, compiled=False))
    taken = [[layout for layout in trace.layouts.values() if isinstance(layout, Expanded)] for trace in traced]
    assert len(taken) == 2 and taken[0] and not taken[1]
