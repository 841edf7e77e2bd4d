# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Complex numbers and Fourier transforms in compiled programs: gradients beside eager, and no op that runs in torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compared import assert_same
from torch import Tensor, nn

import retrograd

ROTATIONS = torch.polar(torch.ones(6, 2), torch.arange(12.0).reshape(6, 2))


class Spectral(nn.Module):
    """A Fourier layer with complex weights that are held as real ones, rotary embeddings, a convolution by transforms
    of two axes, and a spectrogram."""

    window: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4, 4, 2) / 4)
        self.kernel = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("window", torch.hann_window(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        modes = torch.fft.rfft(hidden, dim=1, norm="ortho")
        mixed = torch.einsum("bki,kio->bko", modes, torch.view_as_complex(self.weight))
        hidden = torch.fft.irfft(mixed, n=6, dim=1, norm="ortho")
        pairs = torch.view_as_complex(hidden.reshape(-1, 6, 2, 2).contiguous())
        turned = torch.view_as_real(pairs * ROTATIONS).flatten(2)
        shape = (8, 6)
        smoothed = torch.fft.irfft2(torch.fft.rfft2(turned, shape) * torch.fft.rfft2(self.kernel, shape), shape)
        frames = torch.stft(turned.flatten(1), 4, hop_length=2, window=self.window, return_complex=True)
        return torch.tanh(smoothed), frames.abs().log1p()


def gradients(run: Callable[..., Any], leaves: list[Tensor], *args: Any) -> list[Tensor]:
    """Outputs and gradients of ``leaves``."""
    outputs = run(*args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = [torch.linspace(0.5, 1.5, o.numel()).reshape(o.shape).to(o.dtype) for o in outputs]
    weights = [w * (1 + 0.5j) if w.is_complex() else w for w in weights]
    return [*outputs, *torch.autograd.grad(outputs, leaves, weights)]


def test_what_is_complex_inside(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Spectral(), torch.randn(2, 6, 4, requires_grad=True)
    step = retrograd.compile_backward(model, (x,), fallback="error", portable=True)
    leaves = [x, *model.parameters()]
    assert_same(gradients(step, leaves, x), gradients(model, leaves, x))
    step.save(tmp_path / "model.vmfb")
    loaded = retrograd.load(tmp_path / "model.vmfb", model)
    assert_same(gradients(loaded, leaves, x), gradients(model, leaves, x))


def test_what_is_complex_outside() -> None:
    """Arguments, parameters and results; lazy conjugates among them, strides that are not contiguous."""

    def layer(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x @ w
        return hidden.tanh().abs(), hidden.conj() / (w.sum() + 3)

    torch.manual_seed(1)
    x, w = (torch.randn(4, 4, dtype=torch.complex64).requires_grad_() for _ in range(2))
    step = retrograd.compile_backward(layer, (x, w), fallback="error")
    for given in (x, torch.randn(4, 4, dtype=torch.complex64).t().conj().requires_grad_()):
        before = given.detach().clone()
        assert_same(gradients(step, [given, w], given, w), gradients(layer, [given, w], given, w))
        assert torch.equal(given.detach(), before)


def test_dynamo_and_sizes_that_differ() -> None:
    """Transforms along an axis of fixed size; what is complex may have others."""

    def spectrum(x: Tensor) -> Tensor:
        energy: Tensor = torch.fft.rfft(x).abs().square().mean(-1)
        return energy

    compiled = torch.compile(spectrum, backend="retrograd", dynamic=True, options={"fallback": "error"})
    for rows in (3, 5):
        x = torch.randn(rows, 8, requires_grad=True)
        assert_same(gradients(compiled, [x], x), gradients(spectrum, [x], x))


def test_a_backward_as_it_runs() -> None:
    def loss(x: Tensor) -> Tensor:
        return F.softplus(torch.fft.fft(x, norm="ortho").real).sum()

    x = torch.randn(3, 10, requires_grad=True)
    (expected,) = torch.autograd.grad(loss(x), x)
    before = len(retrograd.explain_recompiles())
    with retrograd.enable():
        for _ in range(2):
            (found,) = torch.autograd.grad(loss(x), x)
            assert_same([found], [expected])
    (entry,) = retrograd.explain_recompiles()[before:]
    assert entry.outcome == "compiled"
    assert "runs in torch" not in str(entry)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.filterwarnings("ignore::retrograd.EagerIslandWarning")
def test_complex_numbers_of_half_precision_run_in_torch() -> None:
    def layer(x: Tensor) -> Tensor:
        return torch.view_as_real(x.sin().chalf()).float()

    x = torch.randn(3, requires_grad=True)
    step = retrograd.compile_backward(layer, (x,))
    assert_same(gradients(step, [x], x), gradients(layer, [x], x))
