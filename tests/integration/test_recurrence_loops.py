# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""LSTMs, GRUs and RNNs that are compiled as loops, against eager in float64, through each door that they come by."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import retrograd
from retrograd.frontend.layers.recurrence_ops import LEAST_STEPS

STEPS = 17


class Weighed(nn.Module):
    """A number of all that a layer gives."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *states: Tensor) -> Tensor:
        given = states if len(states) == 2 else states[0] if states else None
        y, last = self.layer(x, given)
        h, c = last if isinstance(last, tuple) else (last, last.sin())
        loss: Tensor = (y * y.sin()).mean() + 0.1 * h.square().sum() + 0.3 * c.sum()
        return loss


def _gradients(step: Callable[..., Tensor], model: nn.Module, given: Sequence[Tensor]) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in given]
    model.zero_grad()
    step(*leaves).backward()
    gradients = [t.grad for t in (*leaves, *model.parameters())]
    return [g for g in gradients if g is not None]


def _check(model: nn.Module, given: Sequence[Tensor], step: Callable[..., Tensor]) -> None:
    exact = copy.deepcopy(model).double()
    expected = _gradients(exact, exact, [t.double() for t in given])
    _check_close(_gradients(step, model, given), expected)


def _check_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.double() - theirs).norm() <= 2e-6 * theirs.norm()


CASES: dict[str, tuple[nn.RNNBase, list[tuple[int, ...]]]] = {
    "one layer": (nn.LSTM(5, 7), [(STEPS, 3, 5)]),
    "one layer, states": (nn.LSTM(9, 17), [(STEPS, 1, 9), (1, 1, 17), (1, 1, 17)]),
    "both directions, states": (nn.LSTM(5, 7, 2, bidirectional=True), [(STEPS, 3, 5), (4, 3, 7), (4, 3, 7)]),
    "no bias, batch first": (nn.LSTM(5, 7, bias=False, batch_first=True), [(2, 20, 5)]),
    "two layers, no bias": (nn.LSTM(5, 33, 2, bias=False), [(LEAST_STEPS, 3, 5)]),
    "ones": (nn.LSTM(1, 1), [(LEAST_STEPS, 1, 1)]),
    "unbatched": (nn.LSTM(3, 4), [(STEPS, 3), (1, 4), (1, 4)]),
    "GRU, state": (nn.GRU(9, 17), [(STEPS, 1, 9), (1, 1, 17)]),
    "GRU, both directions": (nn.GRU(5, 7, bidirectional=True), [(STEPS, 3, 5), (2, 3, 7)]),
    "GRU, no bias, batch first": (nn.GRU(5, 33, 2, bias=False, batch_first=True), [(2, LEAST_STEPS, 5)]),
    "GRU, unbatched": (nn.GRU(1, 1), [(STEPS, 1)]),
    "RNN, both directions": (nn.RNN(5, 7, bidirectional=True), [(STEPS, 3, 5), (2, 3, 7)]),
    "RNN, ReLU, no bias": (nn.RNN(5, 33, 2, "relu", bias=False, batch_first=True), [(2, LEAST_STEPS, 5)]),
}


@pytest.mark.short_cases("one layer, states", "GRU, no bias, batch first", "RNN, ReLU, no bias")
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_exact(name: str) -> None:
    layer, shapes = CASES[name]
    model, given = Weighed(layer), [torch.randn(shape) for shape in shapes]
    leaves = tuple(t.clone().requires_grad_() for t in given)
    step = retrograd.compile_backward(model, leaves, fallback="error")
    op = f"torch.retrograd.{layer.mode.lower()}_backward"
    assert op in step.mlir("scheduled") and "scf.for" in step.mlir("linalg")
    _check(model, given, step)
    report = step.explain().to_dict()
    assert report["peak_bytes_predicted"] == report["peak_bytes_measured"]


def test_few_steps_are_written_out() -> None:
    model, given = Weighed(nn.LSTM(5, 7, 2)), [torch.randn(1, 3, 5)]
    step = retrograd.compile_backward(model, (given[0].clone().requires_grad_(),), fallback="error", verify=True)
    assert "retrograd.lstm" not in step.mlir("scheduled")
    _check(model, given, step)


@pytest.mark.long
def test_a_budget_has_steps_written_out() -> None:
    """Of a loop's values it could keep all or none, and the peaks that it keeps to would be higher."""
    model, given = Weighed(nn.RNN(5, 7)), [torch.randn(LEAST_STEPS, 3, 5)]
    leaves = (given[0].clone().requires_grad_(),)
    step = retrograd.compile_backward(model, leaves, partition="budget", memory_budget="64MiB", fallback="error")
    assert "retrograd.rnn" not in step.mlir("scheduled")
    _check(model, given, step)


@pytest.mark.short_cases("LSTM")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_values_are_recomputed(kind: type[nn.LSTM] | type[nn.GRU]) -> None:
    """A policy that has what a loop gives computed once more has the loop run once more."""
    model, given = Weighed(kind(5, 7)), [torch.randn(STEPS, 3, 5)]
    policy = retrograd.must_recompute(op=f"retrograd.{kind.__name__.lower()}")
    leaves = (given[0].clone().requires_grad_(),)
    step = retrograd.compile_backward(model, leaves, save_policy=policy, fallback="error")
    assert step.explain().to_dict()["recomputed_ops"]
    _check(model, given, step)


@pytest.mark.long
def test_several_losses_and_backwards() -> None:
    """Two losses of one forward: both of them, one by one on a graph that is kept, and one alone."""

    class Losses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(5, 7, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y, (_, c) = self.lstm(x)
            return y.square().sum(), c.sin().sum()

    model = Losses()
    exact, x = copy.deepcopy(model).double(), torch.randn(STEPS, 3, 5)
    step = retrograd.compile_backward(model, (x.clone().requires_grad_(),), fallback="error")
    for weights in ((1.0, 0.5), (1.0, 0.0), (0.0, 1.0)):
        found: list[list[Tensor]] = []
        for call, of, given in ((step, model, x), (exact, exact, x.double())):
            leaf = given.clone().requires_grad_()
            of.zero_grad()
            for loss, weight in zip(call(leaf), weights, strict=True):
                if weight:
                    (weight * loss).backward(retain_graph=True)
            found.append([t.grad for t in (leaf, *of.parameters()) if t.grad is not None])
        _check_close(*found)


@pytest.mark.long
def test_dropout_between_layers() -> None:
    """Compared with the trace, which draws the same numbers, and a loop behind them."""
    model = Weighed(nn.LSTM(4, 6, 2, dropout=0.5))
    x = torch.randn(STEPS, 3, 4, requires_grad=True)
    step = retrograd.compile_backward(model, (x,), fallback="error", verify=True)
    assert "retrograd.lstm_backward" in step.mlir("scheduled")
    step(x).backward()


@pytest.mark.long
def test_saved_programs(tmp_path: Path) -> None:
    model, given = Weighed(nn.LSTM(5, 7)), [torch.randn(STEPS, 3, 5)]
    step = retrograd.compile_backward(model, (given[0].clone().requires_grad_(),), fallback="error")
    step.save(tmp_path / "lstm.bwd")
    _check(model, given, retrograd.load(tmp_path / "lstm.bwd").bind(model))


def test_inference() -> None:
    model, x = nn.LSTM(5, 7), torch.randn(STEPS, 3, 5)
    compiled = torch.compile(model, backend="retrograd", fullgraph=True, options={"fallback": "error"})
    with torch.no_grad():
        _check_close([compiled(x)[0]], [copy.deepcopy(model).double()(x.double())[0]])


@pytest.mark.short_cases("RNN")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_torch_compile_takes_long_sequences(kind: type[nn.LSTM] | type[nn.GRU] | type[nn.RNN]) -> None:
    """However many steps a loop has, it is compiled: written out, 300 would be left to eager."""
    model, given = Weighed(kind(5, 7, 2, batch_first=True)), [torch.randn(3, 150, 5)]
    _check(model, given, torch.compile(model, backend="retrograd", fullgraph=True, options={"fallback": "error"}))


@pytest.mark.long
def test_penalties_on_gradients() -> None:
    """A derivative in the model is differentiated step by step."""

    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNN(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            (slope,) = torch.autograd.grad(self.rnn(x)[0].square().sum(), x, create_graph=True)
            return slope.square().sum()

    model, given = Penalty(), [torch.randn(LEAST_STEPS, 2, 2)]
    leaves = (given[0].clone().requires_grad_(),)
    _check(model, given, retrograd.compile_backward(model, leaves))
