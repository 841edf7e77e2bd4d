# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""LSTMs, GRUs and RNNs on CUDA: cuDNN's layers, as near to eager as rounding allows, in files written out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import relative_error, require_device
from torch import Tensor, nn

import retrograd

STEPS, BATCH, FEATURES, WIDTH = 12, 3, 8, 16
LAYERS: dict[str, Callable[..., nn.Module]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
HOWS = [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True}]
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def setup_module() -> None:
    require_device()


class Recurrent(nn.Module):
    """What a layer gives, states included, from a first state of zeros."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        outputs, states = self.layer(x)
        states = states if isinstance(states, tuple) else (states,)
        total: Tensor = outputs.float().square().mean() + sum(state.float().sin().mean() for state in states)
        return total


def _gradients(model: nn.Module, call: Callable[..., Tensor], x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    given = x.detach().clone().requires_grad_()
    call(given).backward()
    found = {"x": given.grad, **{name: parameter.grad for name, parameter in model.named_parameters()}}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def _assert_as_eager(model: nn.Module, call: Callable[..., Tensor], x: Tensor, allowed: float) -> None:
    found, expected = _gradients(model, call, x), _gradients(model, model, x)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative_error(found[name], gradient.double()) <= allowed, name


@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize(
    "how", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True}], ids=str
)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_cudnns(name: str, how: dict[str, Any], dtype: torch.dtype) -> None:
    model = Recurrent(LAYERS[name](FEATURES, WIDTH, **how)).to("cuda", dtype)
    x = torch.randn(STEPS, BATCH, FEATURES, device="cuda", dtype=dtype)
    compiled = retrograd.compile_backward(model, (x,), cache=False)
    _assert_as_eager(model, compiled, x, ALLOWED[dtype])
    islands = [island["what"] for island in compiled.explain().to_dict()["islands"]]
    assert any("cudnn" in what for what in islands), islands
    for _ in range(2):
        _assert_as_eager(model, compiled, torch.randn_like(x), ALLOWED[dtype])


@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float32, ALLOWED[torch.float16]), (torch.float64, ALLOWED[torch.float32])], ids=str
)
def test_under_autocast(dtype: torch.dtype, allowed: float) -> None:
    """Eager has cuDNN compute it in float16, whatever autocast's type is, and float64 as it is."""
    model = Recurrent(nn.LSTM(FEATURES, WIDTH)).to("cuda", dtype)
    x = torch.randn(STEPS, BATCH, FEATURES, device="cuda", dtype=dtype)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            found: Tensor = model(x)
        return found

    class Autocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return step(x)

    wrapped = Autocast()
    compiled = retrograd.compile_backward(wrapped, (x,), cache=False)
    _assert_as_eager(wrapped, compiled, x, allowed)


def test_twice_through_one_graph() -> None:
    """cuDNN writes to what its forward kept."""
    model = Recurrent(nn.LSTM(FEATURES, WIDTH)).cuda()
    x = torch.randn(STEPS, BATCH, FEATURES, device="cuda")
    loss = retrograd.compile_backward(model, (x,), cache=False)(x)
    grads = []
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("needs_grad", [False, True], ids=["data", "gradient"])
@pytest.mark.parametrize("name", LAYERS)
def test_backward_of_autograd(name: str, needs_grad: bool) -> None:
    """Of data, which no gradient goes to, cuDNN gives those of the weights alone: the process ended there."""
    torch.manual_seed(0)
    model = nn.Sequential(LAYERS[name](FEATURES, WIDTH, num_layers=2, bidirectional=True)).cuda()

    def train(x: Tensor) -> list[Tensor]:
        model.zero_grad()
        model(x)[0][-1].square().mean().backward()
        grads = [x.grad, *(p.grad for p in model.parameters())] if needs_grad else [p.grad for p in model.parameters()]
        return [grad.clone() for grad in grads if grad is not None]

    before = len(retrograd.explain_recompiles())
    for _ in range(3):
        x = torch.randn(STEPS, BATCH, FEATURES, device="cuda")
        with retrograd.enable():
            found = train(x.clone().requires_grad_(needs_grad))
        expected = train(x.clone().requires_grad_(needs_grad))
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert relative_error(ours, theirs) <= ALLOWED[torch.float32]
    assert [entry.outcome for entry in retrograd.explain_recompiles()[before:]] == ["compiled"]


def test_a_file_has_them_written_out(tmp_path: Path) -> None:
    model = Recurrent(nn.GRU(FEATURES, WIDTH)).cuda()
    x = torch.randn(4, BATCH, FEATURES, device="cuda", requires_grad=True)
    compiled = retrograd.compile_backward(model, (x,), cache=False)
    compiled.save(tmp_path / "layer.rgd")
    _assert_as_eager(model, retrograd.load(tmp_path / "layer.rgd", model), x, ALLOWED[torch.float32])
