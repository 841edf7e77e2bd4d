# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Every model of the registry, trained: the gradients of each step against eager's from the same parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from models import MODELS, Case
from models.precision import Precision
from narrow_gradients import train
from suite import SUITE
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import retrograd

STEPS = 5
TOLERANCE = 2e-5

# Those of the suite are trained in test_training.py.
TRAINED = [name for name in MODELS if name not in SUITE]


def relative_error(found: Tensor, expected: Tensor) -> float:
    difference = (found.float() - expected.float()).norm()
    return float(difference / expected.float().norm().clamp_min(1e-12))


def gradient_errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """The error of each gradient, relative to its norm; none for a gradient that is zero but for rounding in both, as
    that of a bias is which a batch norm takes away again."""
    zero = 1e-6 * max(float(gradient.float().norm()) for gradient in expected.values())
    return {
        name: relative_error(found[name], gradient)
        for name, gradient in expected.items()
        if max(float(t.float().norm()) for t in (found[name], gradient)) > zero
    }


def backpropagate(case: Case, call: Callable[..., Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a step and its gradients, by leaf."""
    leaves = case.leaves()
    for leaf in leaves.values():
        leaf.grad = None
    loss = case.loss(call(*case.args))
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def check_training(ours: Case, theirs: Case, tolerance: float) -> None:
    """Train ``ours`` compiled, with ``theirs`` following in eager: all gradients, losses and buffers agree."""
    step = retrograd.compile_backward(ours.model, ours.args)
    before = [t.detach().clone() for t in pytree.tree_leaves(ours.args) if isinstance(t, Tensor)]
    optimizer = torch.optim.SGD(list(ours.leaves().values()), lr=0.05, momentum=0.5)
    losses = []
    for i in range(STEPS):
        loss, found = backpropagate(ours, step)
        expected_loss, expected = backpropagate(theirs, theirs.model)
        assert relative_error(loss, expected_loss) <= tolerance, f"step {i}: loss {loss}, in eager {expected_loss}"
        assert found.keys() == expected.keys()
        errors = gradient_errors(found, expected)
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] <= tolerance, f"step {i}, gradient of {worst}: {errors[worst]:.2e}"
        losses.append(float(loss))
        if i == 0:
            after = [t for t in pytree.tree_leaves(ours.args) if isinstance(t, Tensor)]
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True)), "an argument changed"
        optimizer.step()
        with torch.no_grad():
            for name, leaf in theirs.leaves().items():
                leaf.copy_(ours.leaves()[name])
    assert losses[-1] < losses[0], f"training does not lower the loss: {losses}"
    if isinstance(ours.model, nn.Module) and isinstance(theirs.model, nn.Module):
        buffers = dict(theirs.model.named_buffers())
        for name, buffer in ours.model.named_buffers():
            assert torch.allclose(buffer, buffers[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.long
@pytest.mark.parametrize(("name", "precision"), [("transformer", "autocast"), ("mlp", "bf16")])
def test_trains_in_a_narrow_precision(name: str, precision: Precision) -> None:
    """By the rule of narrow_gradients; `make test-precisions` tries all models."""
    train(name, precision, STEPS).check()


@pytest.mark.short_cases("llama", "wavenet")
@pytest.mark.parametrize("name", TRAINED)
def test_trains_as_eager(name: str) -> None:
    check_training(MODELS[name].make("test"), MODELS[name].make("test"), TOLERANCE)
