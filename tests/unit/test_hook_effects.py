# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which hooks are seen to compute alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrograd
from retrograd.frontend.hooks.hook_effects import only_computes, tensors_behind

SCALE, LOGGER = 2.0, logging.getLogger(__name__)
FOUND: list[Any] = []
SEEN: set[int] = set()


class Owner(nn.Module):
    """Has hooks that read what it has, write to it, or call it."""

    def __init__(self) -> None:
        super().__init__()
        self.bound, self.count, self.last, self.tags = 1.0, 0, torch.zeros(0), SEEN

    def clips(self, gradient: Tensor) -> Tensor:
        return gradient.clamp(-self.bound, self.bound)

    def counts(self, gradient: Tensor) -> None:
        self.count += 1

    def keeps(self, gradient: Tensor) -> None:
        self.last = gradient

    def tags_it(self, gradient: Tensor) -> None:
        self.tags.add(1)

    def log(self, gradient: Tensor) -> None:
        FOUND.append(gradient)

    def logs(self, gradient: Tensor) -> None:
        self.log(gradient)


OWNER = Owner()


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


def counting() -> Callable[[Tensor], None]:
    count = 0

    def count_up(gradient: Tensor) -> None:
        nonlocal count
        count += 1

    return count_up


@pytest.mark.parametrize(
    "hook",
    [
        lambda g: g * 2,
        lambda g: torch.clamp(g, -1, 1),
        lambda g: F.relu(g).mul_(2),
        lambda g: g * math.sqrt(2),
        lambda g: g.where(g.abs() < SCALE, torch.zeros_like(g)),
        lambda g: g / (g.norm() + 1e-6),
        lambda g: [g * i for i in range(3)][1],
        lambda g: g.log(),
        lambda g: doubled(g).mul(2),
        doubled,
        OWNER.clips,
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
        OWNER.counts,
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
