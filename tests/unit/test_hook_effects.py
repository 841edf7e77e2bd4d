# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which hooks are seen to compute alone."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.nn.init import zeros_

import retrograd
from retrograd.frontend.hooks.hook_effects import only_computes, tensors_behind

SCALE, LOGGER, BUFFER = 2.0, logging.getLogger(__name__), torch.zeros(1)
FOUND: list[Any] = []
CALLED = [FOUND.append]
SEEN: set[int] = set()
SCALES = iter([1.0, 2.0])


class Tracker:
    """Has a method that is named as one of tensors, and is a context."""

    count = 0

    def norm(self, gradient: Tensor) -> None:
        self.count += 1

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(self, *_: object) -> None:
        self.count += 1


class Counts:
    """Counts how often it is read, by whatever way."""

    __slots__ = ("found", "tracker")

    def __init__(self) -> None:
        self.found: list[int] = []
        self.tracker = Tracker()

    @property
    def scale(self) -> float:
        self.found.append(1)
        return 2.0

    @property
    def half(self) -> float:
        return len(self.found) / 2

    def __getitem__(self, place: int) -> float:
        self.found.append(place)
        return 2.0


class Asked:
    """Counts what it is asked for that it has not."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def __getattr__(self, name: str) -> float:
        self.found.append(name)
        return 2.0


class Bounds:
    """Computes what it gives."""

    tracker = Tracker()

    def __init__(self) -> None:
        self.bound = 1.0

    @property
    def twice(self) -> float:
        return 2 * self.bound

    def __getitem__(self, place: int) -> float:
        return self.bound + place


class Owner(nn.Module):
    """Has hooks that read what it has, write to it, or call it."""

    def __init__(self) -> None:
        super().__init__()
        self.bound, self.count, self.last, self.tags = 1.0, 0, torch.zeros(0), SEEN
        self.tracker, self.found, self.called = Tracker(), FOUND, CALLED
        self.counting, self.asked, self.bounds = Counts(), Asked(), Bounds()

    def clips(self, gradient: Tensor) -> Tensor:
        return gradient.clamp(-self.bound, self.bound)

    def clips_by_bounds(self, gradient: Tensor) -> Tensor:
        return gradient.clamp(-self.bounds.twice, self.bounds[1])

    def reads_a_property(self, gradient: Tensor) -> Tensor:
        return gradient * self.counting.scale

    def reads_an_item(self, gradient: Tensor) -> Tensor:
        return gradient * self.counting[0]

    def asks(self, gradient: Tensor) -> Tensor:
        return gradient * self.asked.scale

    def tracks_in_a_slot(self, gradient: Tensor) -> None:
        self.counting.tracker.norm(gradient)

    def tracks_in_a_class(self, gradient: Tensor) -> None:
        self.bounds.tracker.norm(gradient)

    def counts(self, gradient: Tensor) -> None:
        self.count += 1

    def keeps(self, gradient: Tensor) -> None:
        self.last = gradient

    def tags_it(self, gradient: Tensor) -> None:
        self.tags.add(1)

    def tracks(self, gradient: Tensor) -> None:
        self.tracker.norm(gradient)

    def calls_each(self, gradient: Tensor) -> None:
        for call in self.called:
            call(gradient)

    def lengthens(self, gradient: Tensor) -> None:
        found = self.found
        found += [gradient]

    def adds_up(self, gradient: Tensor) -> None:
        self.last.add_(gradient)

    def within(self, gradient: Tensor) -> Tensor:
        with self.tracker:
            return gradient * 2

    def log(self, gradient: Tensor) -> None:
        FOUND.append(gradient)

    def logs(self, gradient: Tensor) -> None:
        self.log(gradient)


OWNER = Owner()
COUNTS, NAME = Counts(), "scale"


def doubled(gradient: Tensor) -> Tensor:
    return gradient * SCALE


def prints(gradient: Tensor) -> None:
    print(gradient)


def calls_one_that_prints(gradient: Tensor) -> Tensor:
    prints(gradient)
    return gradient


def writes_to_a_row(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient[0] = 0
    return gradient


def by_another_name(gradient: Tensor) -> None:
    append = FOUND.append
    append(gradient)


def calling(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda gradient: function(gradient)


def counting() -> Callable[[Tensor], None]:
    count = 0

    def count_up(gradient: Tensor) -> None:
        nonlocal count
        count += 1

    return count_up


@torch.no_grad()
def counts_without_gradients(gradient: Tensor) -> Tensor:
    FOUND.append(1)
    return gradient * 2


@torch.no_grad()
def doubles_without_gradients(gradient: Tensor) -> Tensor:
    return gradient * 2


@contextlib.contextmanager
def noted() -> Iterator[None]:
    FOUND.append(1)
    yield


def notes(gradient: Tensor) -> Tensor:
    with noted():
        return gradient * 2


def takes_the_next(gradient: Tensor) -> Tensor:
    for scale in SCALES:
        return gradient * scale
    return gradient


def has_another_name(gradient: Tensor) -> None:
    buffer = BUFFER
    buffer += gradient


def writes_to_a_slice(gradient: Tensor) -> None:
    FOUND[0:0] = [gradient]


@pytest.mark.parametrize(
    "hook",
    [
        lambda g: g * 2,
        lambda g: torch.clamp(g, -1, 1),
        lambda g: F.relu(g).mul_(2),
        lambda g: torch.clamp(g, *(-1, 1)) + BUFFER,
        lambda g: g * math.sqrt(2),
        lambda g: g.where(g.abs() < SCALE, torch.zeros_like(g)),
        lambda g: g / (g.norm() + 1e-6),
        lambda g: [g * i for i in range(3)][1],
        lambda g: g.log(),
        lambda g: doubled(g).mul(2),
        doubled,
        OWNER.clips,
        OWNER.clips_by_bounds,
        calling(doubled),
        calling(calling(doubled)),
        doubles_without_gradients,
        partial(torch.mul, other=2),
        torch.relu,
        retrograd.inlineable(lambda g: print(g)),
    ],
)
def test_hooks_that_compute(hook: Any) -> None:
    assert only_computes(hook)


@pytest.mark.parametrize(
    "hook",
    [
        FOUND.append,
        lambda g: FOUND.append(g),
        lambda g: LOGGER.log(10, "a gradient"),
        lambda g: SEEN.add(1),
        lambda g: g.norm().item(),
        lambda g: print("a gradient"),
        lambda g: OWNER.log(g),
        lambda g: logging.info("a gradient"),
        lambda g: dist.all_reduce(g),
        lambda g: all_reduce(g),
        lambda g: torch.manual_seed(0),
        lambda g: torch.set_num_threads(1),
        lambda g: BUFFER.add_(g),
        lambda g: torch.add(g, 1, out=BUFFER),
        lambda g: torch.add(g, 1, **{"out": BUFFER}),  # noqa: PIE804
        lambda g: torch.add(g, 1, **{NAME: BUFFER}),
        lambda g: F.relu(BUFFER, True),
        lambda g: F.batch_norm(g, BUFFER, BUFFER, None, None, True),
        lambda g: max([g], key=BUFFER.add_),
        lambda g: CALLED[0](g),
        lambda g: getattr(FOUND, "append")(g),  # noqa: B009
        by_another_name,
        calling(FOUND.append),
        calling(prints),
        calling(calling(calling(prints))),
        counts_without_gradients,
        notes,
        takes_the_next,
        has_another_name,
        writes_to_a_slice,
        lambda g: BUFFER[0].add_(g),
        lambda g: zeros_(BUFFER),
        lambda g: F.relu(BUFFER, inplace=True),
        lambda g: g * getattr(COUNTS, "scale"),  # noqa: B009
        lambda g: g * getattr(COUNTS, NAME),
        lambda g: f"{COUNTS}",
        lambda g: OWNER(g),
        OWNER.tracks,
        OWNER.calls_each,
        OWNER.lengthens,
        OWNER.adds_up,
        OWNER.within,
        OWNER.counts,
        OWNER.reads_a_property,
        OWNER.reads_an_item,
        OWNER.asks,
        OWNER.tracks_in_a_slot,
        OWNER.tracks_in_a_class,
        OWNER.keeps,
        OWNER.tags_it,
        OWNER.logs,
        OWNER,
        calls_one_that_prints,
        writes_to_a_row,
        counting(),
        partial(lambda found, g: found.append(g), FOUND),
    ],
)
def test_hooks_that_may_do_more(hook: Any) -> None:
    assert not only_computes(hook)


def test_tensors_that_a_hook_has() -> None:
    a, b, c, d = (torch.zeros(size) for size in (1, 2, 3, 4))
    within = {"c": [c]}

    def hook(g: Tensor, b: Tensor, other: Tensor = d) -> Tensor:
        return g * a * b * within["c"][0] * other

    assert {id(t) for t in tensors_behind(partial(hook, b=b))} == {id(t) for t in (a, b, c, d)}
    assert not [*tensors_behind(OWNER.keeps)]
