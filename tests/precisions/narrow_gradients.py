# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How close gradients computed in bfloat16 have to be, and models trained by that rule.

All gradients of some steps together, as one vector, are within 2e-2 of eager's in float32, relative to its norm; or
else no farther from it than one and a half times as far as eager's own in bfloat16, which batch norms over few elements
and long recurrences take further than that. Together, because rounding elsewhere than eager does moves a single small
gradient by more than either bound without anything being wrong; and with batch norms over few elements those of a whole
step, by two times either way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    """How far gradients are from eager's in float32: ours, and eager's in the same narrow precision."""

    ours: float
    eager: float

    @property
    def allowed(self) -> float:
        return max(TOLERANCE, FACTOR * self.eager)

    def check(self) -> None:
        """Fail, saying both numbers, where ours are too far; also where they are no numbers."""
        assert self.ours <= self.allowed, f"{self.ours:.4f} from float32, where eager is {self.eager:.4f}"


def gradients(case: Case, call: Callable[..., Any]) -> dict[str, Tensor]:
    """The gradient of each leaf in a step through ``call``, by the name that it has without autocast."""
    leaves = case.leaves()
    for leaf in leaves.values():
        leaf.grad = None
    case.loss(call(*case.args)).backward()
    return {name.removeprefix("inner."): leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def measure(steps: Sequence[tuple[Gradients, Gradients, Gradients]]) -> Distance:
    """The distance over some steps, each with ours, eager's, and eager's in float32, of the same names."""
    squares = torch.zeros(3, dtype=torch.float64)
    for found, eager, exact in steps:
        assert found.keys() == eager.keys() == exact.keys()
        for name, expected in exact.items():
            parts = (found[name] - expected, eager[name] - expected, expected)
            squares += torch.stack([part.double().cpu().square().sum() for part in parts])
    ours, theirs = (squares[:2] / squares[2]).sqrt().tolist()
    return Distance(ours, theirs)


def train(name: str, precision: Precision, steps: int, device: str = "cpu") -> Distance:
    """Train a model of the registry compiled in a narrow precision, eager following it in that and in float32 from the
    same parameters at each step; the distance over all steps."""
    ours, eager, exact = (convert(MODELS[name].make("test"), device, p) for p in (precision, precision, "f32"))
    step = retrograd.compile_backward(ours.model, ours.args)
    optimizer = torch.optim.SGD(list(ours.leaves().values()), lr=0.01)
    taken = []
    for _ in range(steps):
        found = gradients(ours, step)
        taken.append((found, gradients(eager, eager.model), gradients(exact, exact.model)))
        optimizer.step()
        with torch.no_grad():
            for leaf, *followers in zip(*(c.leaves().values() for c in (ours, eager, exact)), strict=True):
                for follower in followers:
                    follower.copy_(leaf)
    return measure(taken)
