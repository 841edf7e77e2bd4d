# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Layers and functions of PyTorch's that look at the contents of tensors, or that are given what is rare in a model,
compile whole, with eager's gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrograd


class Reader(nn.Module):
    """An encoder with two kinds of masks, whose inputs are normalized by means over all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, momentum=None)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x: Tensor, mask: Tensor, padding: Tensor) -> Tensor:
        out: Tensor = self.encoder(self.norm(x.transpose(1, 2)).transpose(1, 2), mask, padding)
        return out


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """New memory of torch's holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned_memory")
def test_masks_and_means_over_all_batches() -> None:
    """The mask is what it is at each call: that of the second is not causal. The check of the first call runs the
    graph in torch, whatever its new memory holds."""
    torch.manual_seed(0)
    ours = Reader()
    eager = deepcopy(ours)
    masks = [torch.triu(torch.full((5, 5), -math.inf), diagonal) for diagonal in (1, 2)]
    x, padding = torch.randn(2, 5, 8), torch.zeros(2, 5)
    padding[1, 3:] = -math.inf
    step = retrograd.compile_backward(ours, (x, masks[0], padding), fallback="error")
    for mask in masks:
        found, expected = step(x, mask, padding), eager(x, mask, padding)
        weights = torch.randn_like(expected)
        for model, result in ((ours, found), (eager, expected)):
            model.zero_grad()
            (result * weights).sum().backward()
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
        for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-5, atol=2e-5 * float(theirs.grad.abs().max()))
        torch.testing.assert_close(dict(ours.named_buffers()), dict(eager.named_buffers()))


def chosen_of_nans(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Ops that give NaN where they take one, and choices by comparisons, which fail there."""
    return (
        x.clamp(-1, 2),
        x.clamp(min=0.5),
        x.clamp(max=0.5),
        x.clamp(min=y),
        x.clamp(max=y),
        torch.maximum(x, y),
        torch.minimum(x, y),
        F.hardtanh(x),
        F.relu6(x),
        F.hardsigmoid(x),
        torch.where(x > y, x, y),
        torch.where(x < y, x, y),
        F.smooth_l1_loss(x, y, reduction="none", beta=0.5),
    )


def rows_of_nans(x: Tensor, y: Tensor) -> Tensor:
    """Each of ``chosen_of_nans`` for a row of its own, so that no NaN of one gradient hides another's."""
    rows = torch.arange(len(x))[:, None]
    chosen = torch.zeros_like(x)
    for number, values in enumerate(chosen_of_nans(x, y)):
        chosen = torch.where(rows == number, values, chosen)
    return chosen


def test_what_is_no_number_stays_none() -> None:
    nan, inf, count = math.nan, math.inf, len(chosen_of_nans(torch.ones(1), torch.ones(1)))
    first, second = [nan, 1.0, nan, inf, -inf, 9.0, -9.0, 0.25], [1.0, nan, nan, nan, 0.5, -0.5, nan, 0.75]
    given = [
        torch.tensor([numbers] * count, dtype=dtype, requires_grad=True)
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
        for numbers in (first, second)
    ]

    def of_types(*given: Tensor) -> list[Tensor]:
        return [rows_of_nans(x, y) for x, y in zip(given[::2], given[1::2], strict=True)]

    step = retrograd.compile_backward(of_types, given, verify=False)
    found = []
    for call in (step, of_types):
        results = call(*given)
        found.append((results, torch.autograd.grad(results, given, [torch.ones_like(r) for r in results])))
    (ours, gradients), (eager, expected) = found
    for mine, theirs in zip(ours, eager, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)
    for number, (a, b) in enumerate(zip(gradients, expected, strict=True)):
        compared = torch.ones_like(b, dtype=torch.bool)
        # Of hardtanh's at NaN PyTorch's own kernels say 0 or 1.
        compared[7:9] = ~given[number][7:9].isnan()
        torch.testing.assert_close(a[compared], b[compared], equal_nan=True)


def places_of_nans(x: Tensor) -> list[Tensor]:
    """Values by where they are, beside the places, of rows and of windows."""
    most, at = x.max(-1)
    least, place = x.min(0)
    windows, taps = F.max_pool2d(x[None, None], 2, return_indices=True)
    return [most, at, least, place, windows, taps, x.argmax(), x.argmin(-1)]


def test_the_place_of_what_is_no_number_is_found() -> None:
    """A gradient reaches it. Of several in a row it is the first, in a window the last."""
    x = torch.randn(4, 6)
    x[0, 1] = x[0, 3] = x[2, 5] = x[3, 0] = math.nan
    x.requires_grad_()
    step = retrograd.compile_backward(places_of_nans, (x,), verify=False, fallback="error")
    found = []
    for call in (step, places_of_nans):
        results = call(x)
        values = [result for result in results if result.is_floating_point()]
        found.append([*results, *torch.autograd.grad(values, x, [torch.ones_like(v) for v in values])])
    torch.testing.assert_close(*found, rtol=0.0, atol=0.0, equal_nan=True)


MASK = torch.tensor([False, True, True])


def written(m: Tensor) -> Tensor:
    """``m`` with numbers, and then its first row, where masks are set: what is computed, and a constant. Of what is not
    chosen all is kept, the first element among it."""
    m = m * 2
    m[m > 1] = 0.5
    m[MASK] = m[0].exp()
    return m


def logarithms(m: Tensor) -> Tensor:
    """Of what is positive, where the derivative is finite."""
    positive = m > 0
    return m[positive].log().mean()


def rarities(x: Tensor, m: Tensor, number: Tensor, narrow: Tensor, place: Tensor) -> tuple[Tensor, ...]:
    """Windows that do not fill their axis, tensors of no axis, 32-bit indices, one place or none, and so on."""
    return (
        F.max_pool2d(x, [3, 3], 2, ceil_mode=True),
        F.avg_pool2d(x, [2, 3], 2),
        m.take(place),
        m.take(place[None][:0]),
        F.normalize(number, dim=0, p=1.2),
        torch.linalg.vector_norm(number, math.inf, 0, True),
        m.gather(0, narrow),
        m[narrow, narrow.long()],
        F.rrelu(m),
        m.as_strided((2, 2), (1, 2), 0).clone(),
        torch.roll(x, (1, 2), (1, 3)),
        m.cov(),
        m.corrcoef(),
        F.multilabel_margin_loss(m[0], narrow[0].long()),
        F.max_pool2d(x[0], [2, 3], 2, 1),
        F.avg_pool2d(x, [2, 3], (), 0, False, True, -2),
        (m * m[1].exp()).sum(),
        torch.lerp(m[0], m[None] * m, m).sum(),
        written(m),
        logarithms(m),
        m[0].masked_scatter(m > 0, m.exp()),
    )


def test_rarities() -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(s, requires_grad=True) for s in ((1, 2, 3, 6), (3, 3), ())]
    arguments = (*leaves, torch.tensor([[0, 2, 1], [1, 1, 1]], dtype=torch.int32), torch.tensor(1))
    step = retrograd.compile_backward(rarities, arguments, fallback="error")

    def run(function: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
        found = function(*arguments)
        total = sum((t.flatten() * torch.arange(1.0, 1 + t.numel())).sum() for t in found)
        assert isinstance(total, Tensor)
        return [*(t.detach() for t in found), *torch.autograd.grad(total, leaves)]

    for ours, eager in zip(run(step), run(rarities), strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-5, atol=2e-5)
