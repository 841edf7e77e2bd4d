# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Gradients of every model of the registry, for every partition and for memory budgets from a fifth to twice
of what a step takes in eager.

`make test-budgets` runs them: each model is compiled once for each plan that a budget leads to.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from models import MODELS, Case

import retrograd

TOLERANCE = 2e-5
FRACTIONS = [share / 10 for share in range(20, 0, -2)]


def gradients(case: Case, call: Any) -> dict[str, torch.Tensor]:
    for leaf in case.leaves().values():
        leaf.grad = None
    case.loss(call(*case.args)).backward()
    return {name: leaf.grad for name, leaf in case.leaves().items() if leaf.grad is not None}


def check_gradients(name: str, expected: dict[str, torch.Tensor], **options: Any) -> dict[str, Any]:
    """Compile the model with ``options``, compare its gradients, and return its report."""
    # A step updates running statistics: each begins with the same.
    case = MODELS[name].make("test")
    step = retrograd.compile_backward(case.model, case.args, **options)
    found = gradients(case, step)
    assert found.keys() == expected.keys()
    zero = 1e-6 * max(float(g.norm()) for g in expected.values())
    for leaf, gradient in expected.items():
        # A gradient that is zero but for rounding is zero here as well.
        if max(float(gradient.norm()), float(found[leaf].norm())) > zero:
            error = float((found[leaf] - gradient).norm() / gradient.norm())
            assert error <= TOLERANCE, f"{options}, gradient of {leaf}: {error:.2e}"
    return step.explain().to_dict()


@pytest.mark.parametrize("name", MODELS)
def test_gradients_within_budgets(name: str) -> None:
    case = MODELS[name].make("test")
    expected = gradients(case, case.model)
    reports = [check_gradients(name, expected, partition=p) for p in ("default", "min-cut")]
    for fraction in FRACTIONS:
        try:
            report = check_gradients(name, expected, partition="budget", memory_budget=fraction)
        except retrograd.InfeasibleBudget as error:
            assert error.eager is not None and error.budget == int(fraction * error.eager)
            assert error.least > error.budget
            # What it names is feasible, and is what it takes.
            report = check_gradients(name, expected, partition="budget", memory_budget=error.least)
            assert report["peak_bytes_measured"] == error.least
            with pytest.raises(retrograd.InfeasibleBudget, match=f"the least feasible one is {error.least} bytes"):
                retrograd.compile_backward(
                    case.model, case.args, partition="budget", memory_budget=FRACTIONS[-1] if fraction > 0.2 else 0.01
                )
            break
        assert report["peak_bytes_measured"] <= report["memory_budget"]
        reports.append(report)
    for before, after in itertools.pairwise(reports[2:]):
        assert after["peak_bytes_measured"] <= before["peak_bytes_measured"]
        assert after["recompute_seconds"] >= before["recompute_seconds"]
