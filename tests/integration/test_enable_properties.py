# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Random programs with random hooks under ``retrograd.enable()``, beside eager: the same calls, the same gradients.

Most are not compiled but interpreted from the captured graph, which is what hooks depend on, a few go all the way under
each policy. ``RETROGRAD_EXAMPLES=50`` draws so many times as many.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hook_programs import Outcome, Program, programs, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import retrograd
from retrograd.frontend.autograd.steps.python_side import Compiled
from retrograd.frontend.autograd.steps.python_side import interpret as run_graph
from retrograd.frontend.autograd.tracing.trace import TracedBackward

POLICIES = ("eager-order", "asap", "overlap", "fewest-stages")
_TIMES = int(os.environ.get("RETROGRAD_EXAMPLES", "1"))
_CAREFUL: Any = {"deadline": None, "derandomize": _TIMES == 1, "suppress_health_check": [HealthCheck.too_slow]}


class Interpreted:
    """A captured backward whose graph is run op by op: what a compiled one computes, without the compiler."""

    notes: tuple[str, ...] = ()
    # Not under every policy.
    is_in_order = is_rearranged = False
    may_be_short = False

    def __init__(self, traced: TracedBackward) -> None:
        self._graph = traced.graph_module

    def find_disagreement(self, problem: str | None) -> str | None:
        """No other process takes part."""
        return problem

    def find_short_plan(self) -> None:
        """There is none."""

    def run(self, arguments: Sequence[torch.Tensor | int], python: Any) -> list[torch.Tensor]:
        return run_graph(self._graph, arguments, python)


def interpret(traced: TracedBackward, _options: Any) -> tuple[Compiled, bool]:
    """In the place of the compiler."""
    return Interpreted(traced), False


def check(program: Program, found: Sequence[Outcome], *, ordered: bool) -> None:
    """Compare each step with eager's: the calls, in order or not, what they were given, and the gradients."""
    for number, (ours, eager) in enumerate(zip(found, run(program, nullcontext), strict=True)):
        for outcome in () if ordered else (ours, eager):
            outcome.calls.sort(key=lambda call: call[0])
        assert [name for name, _ in ours.calls] == [name for name, _ in eager.calls], (number, program)
        assert ours.raised == eager.raised, (number, program)
        for mine, theirs in zip(ours.calls, eager.calls, strict=True):
            close(mine[1], theirs[1])
        close(ours.gradients, eager.gradients)


close = partial(torch.testing.assert_close, rtol=2e-5, atol=1e-6)


@settings(max_examples=12 * _TIMES, **_CAREFUL)
@given(programs())
def test_hooks_are_called_as_eager_calls_them(program: Program) -> None:
    """Hooks of every kind, which give nothing, a new value or raise, come and go."""
    before = len(retrograd.explain_recompiles())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("retrograd.scope.build_backward", interpret)
        found = run(program, retrograd.enable)
    check(program, found, ordered=True)
    entries = [str(entry) for entry in retrograd.explain_recompiles()[before:]]
    assert not any("runs eagerly" in entry for entry in entries), entries


@settings(max_examples=2 * _TIMES, **_CAREFUL)
@given(programs(steady=True), st.sampled_from(POLICIES))
def test_gradients_are_eagers_under_every_policy(program: Program, policy: Any) -> None:
    def around() -> AbstractContextManager[None]:
        return retrograd.enable(hook_schedule=policy)

    check(program, run(program, around), ordered=policy == "eager-order")
