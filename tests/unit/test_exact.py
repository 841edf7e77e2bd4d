# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What counts as near to float64, and what a backward is in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.contract.roles import BACKWARD
from retrograd.frontend.autograd.engine.python_calls import PythonCalls
from retrograd.frontend.autograd.steps.float64_reference import (
    ExactRun,
    NoExactValues,
    OtherRoundings,
    is_as_near_as_eager,
    is_of_the_same,
)
from retrograd.frontend.autograd.tracing.trace import TracedBackward
from retrograd.frontend.doors.captured_graph import Captured
from retrograd.frontend.hooks import hook_ops


def traced(function: Any, *arguments: torch.Tensor) -> TracedBackward:
    graph = make_fx(function, tracing_mode="fake")(*arguments)
    captured = Captured(graph, BACKWARD, as_it_ran=True)
    inputs = tuple(range(len(arguments)))
    return TracedBackward(captured=captured, inputs=inputs, params=(0,), calls=PythonCalls(), results=(0,))


def test_noise_as_large_as_eagers_is_near_and_what_is_off_is_not() -> None:
    exact = torch.zeros(4, dtype=torch.float64)
    assert is_as_near_as_eager(torch.full((4,), 3e-6), torch.full((4,), -1e-6), exact, 1e-3)
    assert not is_as_near_as_eager(torch.full((4,), 3e-4), torch.full((4,), -1e-6), exact, 1e-3)
    ones = torch.ones(4, dtype=torch.float64)
    assert is_as_near_as_eager(ones.float() * 1.0001, ones.float(), ones, 1e-3)
    assert not is_as_near_as_eager(ones.float() * 1.01, ones.float(), ones, 1e-3)
    assert not is_as_near_as_eager(torch.full((4,), float("nan")), ones.float(), ones, 1e-3)


def test_a_trace_that_computes_something_else_is_no_reference() -> None:
    zero, half = torch.zeros(4, dtype=torch.float64), torch.full((4,), 0.5, dtype=torch.float64)
    assert is_of_the_same(torch.full((4,), 1e-5), zero, 1e-3, largest=10.0)
    assert not is_of_the_same(torch.full((4,), 1e-2), zero, 1e-3, largest=10.0)
    assert not is_of_the_same(torch.ones(4), half, 1e-3, largest=10.0)
    assert is_of_the_same(torch.full((4,), 0.5002), half, 1e-3, largest=1.0)
    assert is_of_the_same(torch.tensor([0.5, torch.inf, 0.5, 0.5]), half, 1e-3, largest=1.0)


def test_the_largest_value_of_a_run_is_known() -> None:
    run = ExactRun(traced(lambda x: [(x * 100).exp().log() - x * 100 + x.log()], torch.ones(4)), {})
    run.compute([torch.tensor([1.0, 2.0, 0.0, 0.0])])
    assert run.largest == pytest.approx(float(torch.tensor([1e2, 2e2]).double().exp().norm()))


def test_all_numbers_are_wide() -> None:
    def backward(x: torch.Tensor) -> list[torch.Tensor]:
        token = hook_ops.create_token()
        with hook_ops.declared_results({("pre", 0): [torch.empty(3, device="meta")]}):
            (given,), token = hook_ops.call_hook([x.to(torch.bfloat16).float()], token, "pre", 0)
        token = hook_ops.accumulate_grad(x.to(torch.bfloat16).float() + 1e-9, token, 0)
        hook_ops.final_callbacks(token)
        return [given * 2 + torch.zeros(3, dtype=torch.float16)]

    x = torch.tensor([1.0, 2.0, 1 / 3])
    run = ExactRun(traced(backward, x), {("pre", 0): [torch.full((3,), 5.0)]})
    run.compute([x])
    torch.testing.assert_close(run.gradients, {0: [x.double() + 1e-9]}, rtol=0, atol=1e-15)
    torch.testing.assert_close(run.results, [torch.full((3,), 10.0, dtype=torch.float64)])


def test_a_value_that_a_nearly_singular_matrix_leaves_open_is_rounding_and_what_is_off_more_is_not() -> None:
    def backward(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.linalg.inv(x @ x.mT)]

    x = torch.tensor([[1.0, 2.0], [1.0, 2.01]])
    trace = traced(backward, x)
    exact = ExactRun(trace, {})
    exact.compute([x])
    (eager,), wanted = backward(x), exact.find(None, 0)
    # Eager itself is off by more than its largest value explains.
    assert not is_of_the_same(eager, wanted, 1e-3, exact.largest)
    others = OtherRoundings(trace, {}, [x])
    assert others.explain([eager, backward(x * (1 + 2e-7))[0]], wanted, None, 0)
    assert not others.explain([eager, eager * 1000], wanted, None, 0)
    assert not others.explain([eager * torch.inf, eager], wanted, None, 0)


@pytest.mark.parametrize("function", [lambda x: [x.view(torch.int32)], lambda x: [torch.rand_like(x)]])
def test_what_looks_at_bits_or_draws_numbers_is_refused(function: Any) -> None:
    x = torch.ones(2)
    with pytest.raises(NoExactValues):
        ExactRun(traced(function, x), {}).compute([x])
