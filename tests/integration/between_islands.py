# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A network with an op that runs in torch in the middle of both halves: stages give one another values across it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from retrograd.contract.roles import INTO
from retrograd.runtime.steps.compiled import CompiledBackward


@torch.library.custom_op("retrograd_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2.0


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(_ctx: Any, gradient: Tensor) -> Tensor:
    result: Tensor = doubled(gradient)
    return result


doubled.register_autograd(_backward)


class Between(nn.Module):
    """The backward's first stage gives the second one a tensor of 512 x 96 that this reads once, at its begin."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 96)
        self.mixed = nn.Parameter(torch.eye(96) * 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        mixed = doubled(self.mixed * h.mean(0))
        return torch.softmax(torch.tanh(self.second(torch.sin(h))) @ mixed, 1)


def find_donated(step: CompiledBackward) -> dict[str, set[str]]:
    """The arguments that the functions of a step's plans work in, by name."""
    found = {}
    for half in step._parts.cut.values():
        for function in half.stages:
            numbers, _ = step._parts.program.donated(function.name + INTO)
            found[function.name] = {function.arguments[number].name for number in numbers}
    return found
