# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which tensors of a backward are one piece of memory, and whether they still are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from retrograd.frontend.autograd.steps.guards import StepGuard
from retrograd.frontend.autograd.steps.layouts import find_layout
from retrograd.frontend.autograd.steps.shared_memory import MergedGuard, find_merged, find_shared


def merge(tensors: list[torch.Tensor]) -> dict[int, int]:
    """What is merged of tensors that are laid out as a graph takes them."""
    shared = find_shared(tensors, range(len(tensors)))
    layouts = [find_layout(tensor) for tensor in tensors]
    bases = [t if layout is None else layout.base(t) for t, layout in zip(tensors, layouts, strict=True)]
    return find_merged([part[0] for part in shared], tensors, bases)


def test_what_has_its_storage_alone_is_not_shared() -> None:
    whole = torch.randn(4, 6)
    tensors = [torch.randn(2), whole[:2], torch.randn(3), whole.t(), torch.empty(0), torch.randn(2).to_sparse()]
    assert find_shared(tensors, range(6)) == ((1, 1, 0, (6, 1), 96), (3, 1, 0, (1, 6), 96))
    assert find_shared(tensors, [0, 1, 2, 4, 5]) == ()


def test_parts_and_transposes_of_one_piece_are_merged() -> None:
    whole = torch.randn(4, 6)
    assert merge([whole, whole.t(), whole[:, :3], whole[:, 3:], whole.view(24)]) == {1: 0, 2: 0, 3: 0, 4: 0}


@pytest.mark.parametrize(
    "make",
    [
        lambda whole: [whole[:2], whole[2:]],
        lambda whole: [whole[:2], whole],
        lambda whole: [whole, whole.view(torch.int32)],
        lambda whole: [whole, whole.expand(2, 4, 6)],
        lambda whole: [whole, torch._neg_view(whole)],
    ],
    ids=["rows", "some rows", "other type", "repeated", "negative"],
)
def test_what_is_other_elements_is_not_merged(make: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
    assert merge(make(torch.randn(4, 6))) == {}


@pytest.mark.parametrize("view", [lambda t: t.conj(), torch._neg_view, lambda t: torch._neg_view(t.conj())])
def test_what_is_read_otherwise_is_taken_by_itself(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The same memory, and other numbers: a guard that held for one step would take the others' for them."""
    whole = torch.randn(4, 6, dtype=torch.complex64)
    plain, other = [whole, whole.detach()], [whole, view(whole)]
    merged = merge(plain)
    assert merged == {1: 0} and merge(other) == {}
    assert find_shared(plain, [0, 1]) != find_shared(other, [0, 1])
    step = StepGuard("options", (), plain, (), (), MergedGuard(merged, {}, plain))
    with torch.no_grad():
        held = [step.holds("options", (), tensors, (), ()) for tensors in (plain, other, other[::-1], [other[1]] * 2)]
    assert held == [True, False, False, False]


def parts(memory: torch.Tensor) -> list[torch.Tensor]:
    return [*memory.view(4, 6).split(3, 1)]


def test_a_guard_holds_for_other_memory_that_lies_alike() -> None:
    first, second = parts(torch.randn(24)), parts(torch.randn(24))
    layouts = {number: layout for number, t in enumerate(first) if (layout := find_layout(t)) is not None}
    merged = merge(first)
    assert merged == {1: 0}
    guard = MergedGuard(merged, layouts, first)
    assert guard.numbers == {0, 1}
    assert guard.holds(second)
    assert not guard.holds([first[0], second[1]])
    assert not guard.holds(second[::-1])
    # Memory with more before it, or behind it.
    assert not guard.holds([part[1:] for part in parts(torch.randn(24))])
    longer = torch.randn(30)
    assert not guard.holds([part.as_strided((4, 3), (6, 1), n * 3) for n, part in enumerate([longer, longer])])


def test_what_repeats_memory_is_known_by_how_it_lies() -> None:
    """Without what it repeats, a tensor that holds other numbers there would be lost."""

    def wide(rows: int) -> list[torch.Tensor]:
        return [torch.randn(rows, 1).expand(rows, 32)]

    given, dense = wide(512), [torch.randn(512, 32)]
    assert find_shared(given, [0]) == ((0, 0, 0, (1, 0), 2048),)
    assert find_shared(dense, [0]) == () == find_shared(wide(4), [0])
    layout = find_layout(given[0])
    assert layout is not None
    guard = MergedGuard({}, {0: layout}, given)
    assert guard.numbers == {0} and guard.holds(dense)
    step = StepGuard("options", (), given, (), (), guard)
    with torch.no_grad():
        held = [step.holds("options", (), tensors, (), ()) for tensors in (given, wide(512), dense)]
    assert held == [True, True, False]
