# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Programs run while PyTorch's default device is another than that of their tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import retrograd


class Program(nn.Module):
    """Looks rows up, pools and counts places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.end = nn.Linear(4, 3)

    def forward(self, places: Tensor) -> Tensor:
        x = self.embed(places) + torch.arange(8, device=places.device)
        x = nn.functional.max_pool1d(x.transpose(1, 2), 2)
        kept = torch.where(x > x.mean(), x, torch.zeros((), device=x.device))
        scores: Tensor = self.end(kept)
        return scores.logsumexp(-1)


def run(door: Callable[[nn.Module, Tensor], Tensor], scope: contextlib.AbstractContextManager[object]) -> list[Tensor]:
    torch.manual_seed(0)
    model, places = Program(), torch.randint(11, (2, 8))
    found = []
    with torch.device("meta"), scope:
        for _ in range(3):
            model.zero_grad()
            door(model, places).square().sum().backward()
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return [g for gradients in found for g in gradients]


def compiled_once(
    make: Callable[[nn.Module, Tensor], Callable[[Tensor], Tensor]],
) -> Callable[[nn.Module, Tensor], Tensor]:
    made: list[Callable[[Tensor], Tensor]] = []

    def call(model: nn.Module, places: Tensor) -> Tensor:
        if not made:
            made.append(make(model, places))
        return made[0](places)

    return call


@pytest.mark.parametrize("door", ["compile_backward", "torch.compile", "enable"])
def test_gradients_are_eagers(door: str) -> None:
    expected = run(lambda model, places: model(places), contextlib.nullcontext())
    doors: dict[str, Callable[[nn.Module, Tensor], Callable[[Tensor], Tensor]]] = {
        "compile_backward": lambda model, places: retrograd.compile_backward(model, (places,)),
        "torch.compile": lambda model, places: torch.compile(model, backend="retrograd"),
        "enable": lambda model, places: model,
    }
    scope = retrograd.enable(fallback="error") if door == "enable" else contextlib.nullcontext()
    found = run(compiled_once(doors[door]), scope)
    assert len(found) == len(expected)
    for ours, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
