# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""LSTMs that oneDNN computes between compiled functions, against eager in float64, through the doors they come by."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd
from retrograd.frontend.libraries.ops import WORTH_ON_CPU


class Weighed(nn.Module):
    """A number of all that a layer gives, or of its last states alone."""

    def __init__(self, layer: nn.LSTM, *, last: bool = False) -> None:
        super().__init__()
        self.layer, self.last = layer, last

    def forward(self, x: Tensor, *states: Tensor) -> Tensor:
        y, (h, c) = self.layer(x * 1.5, states or None)
        loss: Tensor = 0.1 * h.square().sum() + 0.3 * c.sin().sum()
        return loss if self.last else loss + (y * y.sin()).mean()


def _gradients(step: Callable[..., Tensor], model: nn.Module, given: Sequence[Tensor]) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in given]
    model.zero_grad()
    step(*leaves).backward()
    return [g for g in (t.grad for t in (*leaves, *model.parameters())) if g is not None]


def _check(model: nn.Module, given: Sequence[Tensor], step: Callable[..., Tensor]) -> None:
    exact = copy.deepcopy(model).double()
    for turn in range(2):
        inputs = [t + 0.1 * turn for t in given]
        found, expected = _gradients(step, model, inputs), _gradients(exact, exact, [t.double() for t in inputs])
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.double() - theirs).norm() <= 2e-6 * theirs.norm()


CASES: dict[str, tuple[Weighed, list[tuple[int, ...]]]] = {
    "two layers": (Weighed(nn.LSTM(5, 7, 2)), [(6, 3, 5)]),
    "both directions, states": (Weighed(nn.LSTM(5, 7, 2, bidirectional=True)), [(6, 3, 5), (4, 3, 7), (4, 3, 7)]),
    "last states alone, both directions": (Weighed(nn.LSTM(5, 7, bidirectional=True), last=True), [(6, 3, 5)]),
    "no bias, batch first": (Weighed(nn.LSTM(5, 7, 2, bias=False, batch_first=True)), [(2, 20, 5)]),
    "unbatched": (Weighed(nn.LSTM(3, 4)), [(6, 3), (1, 4), (1, 4)]),
    "one step": (Weighed(nn.LSTM(3, 4)), [(1, 2, 3)]),
}


@pytest.mark.short_cases("both directions, states", "no bias, batch first")
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_exact(name: str) -> None:
    model, shapes = CASES[name]
    given = [torch.randn(shape) for shape in shapes]
    leaves = tuple(t.clone().requires_grad_() for t in given)
    step = retrograd.compile_backward(model, leaves, kernels="library", fallback="error")
    islands = [island["what"] for island in step.explain().to_dict()["islands"]]
    # All layers of a half are one, with what lies between them; the directions of one layer have nothing in common.
    ops = ["retrograd.lstm_layer", "retrograd.lstm_layer_backward"]
    directions = 2 if model.layer.bidirectional and model.layer.num_layers == 1 else 1
    assert sorted(what.partition(" ")[0] for what in islands) == sorted(ops * directions)
    _check(model, given, step)
    assert step.explain().to_dict()["verification"] == [
        "@forward: verified by its first call",
        "@backward: verified by its first call",
    ]


def test_large_layers_alone() -> None:
    """By default a library computes what repays its call."""
    small, large = nn.LSTM(4, 8), nn.LSTM(64, 128)
    assert 32 * 32 * 4 * 128 * (64 + 128) >= WORTH_ON_CPU // 4 > 8 * 2 * 4 * 8 * (4 + 8)
    for layer, x, is_large in ((small, torch.randn(8, 2, 4), False), (large, torch.randn(32, 32, 64), True)):
        model = Weighed(layer)
        step = retrograd.compile_backward(model, (x.clone().requires_grad_(),))
        assert any("lstm_layer" in island["what"] for island in step.explain().to_dict().get("islands", ())) == is_large
        _check(model, [x], step)


@pytest.mark.long
@pytest.mark.parametrize("steps", [3, 6])
def test_saved_programs(steps: int, tmp_path: Path) -> None:
    """A file has them as loops, or written out."""
    model, given = Weighed(nn.LSTM(5, 7, 2, bidirectional=True)), [torch.randn(steps, 3, 5)]
    step = retrograd.compile_backward(model, (given[0].clone().requires_grad_(),), kernels="library")
    step.save(tmp_path / "lstm.bwd")
    _check(model, given, retrograd.load(tmp_path / "lstm.bwd").bind(model))


@pytest.mark.long
def test_torch_compile() -> None:
    model, given = Weighed(nn.LSTM(5, 7, 2, batch_first=True)), [torch.randn(3, 9, 5)]
    options: dict[str, Any] = {"fallback": "error", "kernels": "library"}
    _check(model, given, torch.compile(model, backend="retrograd", fullgraph=True, options=options))


@pytest.mark.long
def test_penalties_on_gradients() -> None:
    """A derivative in the model is differentiated step by step."""

    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(2, 3, bidirectional=True)

        def forward(self, x: Tensor) -> Tensor:
            (slope,) = torch.autograd.grad(self.rnn(x)[0].square().sum(), x, create_graph=True)
            return slope.square().sum()

    model, given = Penalty(), [torch.randn(5, 2, 2)]
    step = retrograd.compile_backward(model, (given[0].clone().requires_grad_(),), kernels="library")
    _check(model, given, step)
