# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a step takes in eager, found on tensors without contents: the bytes that PyTorch's profiler counts."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from measure_memory import held_at_most
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from retrograd.frontend.doors.capture import capture_joint
from retrograd.frontend.doors.eager_peak import LiveBytes, eager_peak_of_graph, eager_peak_of_model


class Block(nn.Module):
    """Attention, normalization and dropout, with an output beside the loss and a value that is used in place."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = self.attention(x, x, x, need_weights=False)
        y = F.dropout(self.norm(x + y), 0.1)
        return y.square().mean(), y.mul(2).relu_()


class Checkpointed(nn.Module):
    """Two layers of which the first is computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.second = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.first, x, use_reentrant=False)
        z: Tensor = self.second(y).tanh()
        return z


MODELS = {
    "layers": nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)),
    "attention": Block(),
    "checkpoint": Checkpointed(),
    "lstm": nn.LSTM(16, 16),
}


def measure(model: nn.Module, x: Tensor) -> int:
    """What the profiler sees of a step, after one that made what the libraries keep."""

    def step() -> None:
        outputs = model(x)
        leaves = torch.utils._pytree.tree_leaves(outputs)
        torch.autograd.backward(leaves, tangents)

    tangents = [torch.ones_like(leaf) for leaf in torch.utils._pytree.tree_leaves(model(x))]
    for _ in range(2):
        model.zero_grad()
        peak = held_at_most(step)
    return peak


@pytest.mark.parametrize("name", MODELS)
def test_as_the_profiler_sees_it(name: str) -> None:
    model, x = MODELS[name], torch.randn(8, 32, 16)
    with contextlib.ExitStack() as stack:
        captured = capture_joint(stack, model, (x,), None)
        found = eager_peak_of_model(captured.module)
    measured = measure(model, x)
    # oneDNN's recurrent layer works in memory of torch's that no op gives; a checkpoint keeps the generator's state.
    aside = torch.get_rng_state().nbytes if name == "checkpoint" else 0
    assert found == pytest.approx(measured, rel=0.3 if name == "lstm" else 1e-6, abs=aside)


def test_a_model_is_as_before() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(x)
            return y * 2

    model, x = Counts(), torch.randn(4, 3)
    before, state = {name: t.clone() for name, t in model.state_dict().items()}, torch.get_rng_state()
    with contextlib.ExitStack() as stack:
        captured = capture_joint(stack, model, (x,), None)
        assert eager_peak_of_model(captured.module)
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    for name, tensor in model.state_dict().items():
        assert type(tensor) is Tensor
        assert torch.equal(tensor, before[name])


def test_unknown_where_contents_are_asked_for() -> None:
    graph = torch.fx.symbolic_trace(nn.Linear(3, 3))
    assert eager_peak_of_graph(graph, [torch.randn(2, 3)]) == 2 * 3 * 4 + 3 * 3 * 4 + 3 * 4

    def looks(x: Tensor) -> Tensor:
        return x * x.sum().item()

    traced = torch.fx.symbolic_trace(looks)
    x = torch.randn(2, 3, requires_grad=True)
    assert eager_peak_of_graph(traced, [x]) is None


def test_bytes_alive() -> None:
    known = torch.ones(100)
    with LiveBytes([known]) as live:
        one = known + 1
        view = one[:10]
        assert live.now == 400
        del one
        # The view holds all of it.
        assert live.now == 400
        two = known.to(torch.float64)
        assert live.now == 1200
        del view
        assert live.now == 800
        known.add_(1)
        del two
        assert (live.now, live.peak) == (0, 1200)
