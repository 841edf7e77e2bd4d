# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Two processes of which one fails, or takes longer: `main` is what each of them runs.

A process that sees an error prints it with its notes, and ends with status 3.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rank_collectives import BUCKETS, ShardedLayers, averaged_twins
from rank_programs import COMPILED, compare, ddp, describe, joined, make_model, ran
from torch import Tensor

import retrograd
from retrograd import scope
from retrograd.build import build_backward
from retrograd.frontend.autograd.steps.captured import CapturedBackward
from retrograd.runtime.steps import stage_executor

FAILED = 3
FAILING_STEP = 3
SECONDS_LATE = 3


def train(model: Any, step: int, scope: Any = retrograd.enable, rows: int = 5) -> None:
    torch.manual_seed(10 * step + dist.get_rank())
    model.zero_grad()
    ran.clear()
    with scope():
        model(torch.randn(rows, 4)).square().mean().backward()


def fail_in_a_hook() -> None:
    """The second process raises in the middle of a compiled backward."""
    failing: list[int] = []

    def hook(_gradient: Tensor) -> None:
        if failing:
            raise ValueError("this hook fails")

    model = ddp(make_model())
    model.module[2].up.bias.register_hook(hook)
    for step in range(FAILING_STEP + 1):
        if step == FAILING_STEP and dist.get_rank():
            assert describe(0) == COMPILED
            failing.append(step)
        train(model, step)


def fail_in_a_forward() -> None:
    """The second process raises before a backward that the first one is in."""
    model = ddp(make_model())
    for step in range(FAILING_STEP + 1):
        if step == FAILING_STEP and dist.get_rank():
            raise ValueError("this forward fails")
        train(model, step)


def compile_late() -> None:
    """The second process takes some seconds to find that it cannot compile what the first one can: it goes on in eager,
    beside one whose backward is compiled."""

    def build(*_arguments: Any) -> Any:
        time.sleep(SECONDS_LATE)
        raise RuntimeError("this process cannot compile it")

    if dist.get_rank():
        build_with(build)
    torch.manual_seed(0)
    plain = make_model()
    train_beside(ddp(copy.deepcopy(plain)), ddp(plain), retrograd.enable)


def disagree() -> None:
    """The second process cannot compile a backward whose reductions the first one has joined."""

    def build(*_arguments: Any) -> Any:
        raise RuntimeError("this process cannot compile it")

    stage_executor.SECONDS_TO_AGREE = SECONDS_LATE
    if dist.get_rank():
        build_with(build)
    train_beside(*averaged_twins(), partial(retrograd.enable, collectives=BUCKETS))


def compile_later_than_the_other() -> None:
    """The second process takes seconds to compile what both then run, with reductions joined."""

    def build(*arguments: Any) -> Any:
        time.sleep(SECONDS_LATE)
        return build_backward(*arguments)

    if dist.get_rank():
        build_with(build)
    train_beside(*averaged_twins(), partial(retrograd.enable, collectives=BUCKETS))


def other_sizes() -> None:
    """The second process has other rows, which are new to it alone at each other step: hooks' collectives keep eager's
    order in what is compiled, and so in eager beside it."""

    def rows(step: int) -> int:
        return step + 3 if dist.get_rank() and step % 2 else 5

    train_beside(*averaged_twins(), partial(retrograd.enable, hook_schedule="overlap"), rows, steps=7)


def fail_ahead_of_time() -> None:
    """The second process raises before its forward; the first one gathers, in what was compiled ahead of time."""
    torch.manual_seed(dist.get_rank())
    model, x = ShardedLayers(), torch.randn(5, 6)
    compiled = retrograd.compile_backward(model, (x,))
    for step in range(FAILING_STEP):
        if step == FAILING_STEP - 1 and dist.get_rank():
            raise ValueError("this data cannot be read")
        compiled(x).square().mean().backward()


def build_with(build: Callable[..., Any]) -> None:
    """Have this process compile otherwise."""
    client: Any = scope._CLIENT
    client.receive = lambda capture: CapturedBackward(capture, client.history, scope._active_options, build).run


def train_beside(
    eager: Any, ours: Any, within: Callable[[], Any], rows: Callable[[int], int] = lambda _step: 5, steps: int = 4
) -> None:
    """Train one model in eager and one within a scope, compare, and print how the second one ran."""
    for step in range(steps):
        train(eager, step, contextlib.nullcontext, rows(step))
        train(ours, step, within, rows(step))
        compare(eager, ours, 2e-5)
    print(describe(0), flush=True)


PROGRAMS: Mapping[str, Callable[[], None]] = {
    "hook": fail_in_a_hook,
    "forward": fail_in_a_forward,
    "late": compile_late,
    "later, buckets": compile_later_than_the_other,
    "disagree": disagree,
    "sizes": other_sizes,
    "ahead of time": fail_ahead_of_time,
}


def main(name: str, kind: str, store: str, rank: str) -> None:
    """Be process ``rank`` of those that meet at ``store``."""
    with joined(kind, store, int(rank)):
        try:
            PROGRAMS[name]()
        except Exception:  # noqa: BLE001 (whatever it is, the test reads it)
            traceback.print_exc(file=sys.stdout)
            sys.stdout.flush()
            # Not by way of the group's end, which waits for the other.
            os._exit(FAILED)
    sys.stdout.flush()
    os._exit(0)
