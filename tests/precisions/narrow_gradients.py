# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How close gradients computed in bfloat16 have to be, and models trained by that rule.

All gradients of a step together, as one vector, are within 2e-2 of eager's in float32, relative to its norm; or else no
farther from it than one and a half times as far as eager's own in bfloat16, which batch norms over few elements and
long recurrences take further than that. Together, because rounding elsewhere than eager does moves a single small
gradient by more than either bound without anything being wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from models import MODELS, Case
from models.precision import Precision, convert
from torch import Tensor

import retrograd

TOLERANCE = 2e-2
# How much farther from float32 than eager's own bfloat16, where that is beyond the tolerance.
FACTOR = 1.5

Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class Distance:
    """How far a step's gradients are from eager's in float32: ours, and eager's in the same narrow precision."""

    ours: float
    eager: float

    @property
    def allowed(self) -> float:
        return max(TOLERANCE, FACTOR * self.eager)

    def check(self, what: str) -> None:
        """Fail, saying both numbers, where ours are too far; also where they are no numbers."""
        assert self.ours <= self.allowed, f"{what}: {self.ours:.4f} from float32, where eager is {self.eager:.4f}"


def gradients(case: Case, call: Callable[..., Any]) -> dict[str, Tensor]:
    """The gradient of each leaf in a step through ``call``, by the name that it has without autocast."""
    leaves = case.leaves()
    for leaf in leaves.values():
        leaf.grad = None
    case.loss(call(*case.args)).backward()
    return {name.removeprefix("inner."): leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def measure(found: Gradients, eager: Gradients, exact: Gradients) -> Distance:
    """The distances of two steps' gradients from ``exact``; all three have the same names."""
    assert found.keys() == eager.keys() == exact.keys()

    def together(parts: Gradients) -> Tensor:
        return torch.cat([parts[name].double().flatten() for name in exact])

    expected = together(exact)
    ours, theirs = (float((together(g) - expected).norm() / expected.norm()) for g in (found, eager))
    return Distance(ours, theirs)


def train(name: str, precision: Precision, steps: int, device: str = "cpu") -> list[Distance]:
    """Train a model of the registry compiled in a narrow precision, eager following it in that and in float32 from the
    same parameters at each step; the distances of all steps."""
    ours, eager, exact = (convert(MODELS[name].make("test"), device, p) for p in (precision, precision, "f32"))
    step = retrograd.compile_backward(ours.model, ours.args)
    optimizer = torch.optim.SGD(list(ours.leaves().values()), lr=0.01)
    distances = []
    for _ in range(steps):
        found = gradients(ours, step)
        distances.append(measure(found, gradients(eager, eager.model), gradients(exact, exact.model)))
        optimizer.step()
        with torch.no_grad():
            for leaf, *followers in zip(*(c.leaves().values() for c in (ours, eager, exact)), strict=True):
                for follower in followers:
                    follower.copy_(leaf)
    return distances
