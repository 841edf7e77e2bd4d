# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Correlations and their adjoints as matrix products.

Three contractions carry every convolution: the correlation, its adjoint in the input, and its adjoint in the weight.
Each is one batched product over columns (im2col, channels first), which IREE packs and tiles as it does any matrix
product; its loops for a convolution's own weight gradient are ten to thirty times slower.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from retrograd.frontend.decompositions.windows import Tap, Window, fold, merge_phases, pad_axes, tap_views

aten = torch.ops.aten

# Columns past this size cost more to write than they save; they are then built for one row of the filter at a time.
COLUMN_BYTES = 1 << 20
# With fewer input channels than this, folding writes so little that it beats a correlation with the turned filter.
TURNED_CHANNELS = 4


def correlation(x: Tensor, weight: Tensor, window: Window, groups: int) -> Tensor:
    """``y[n, o, p] = sum over c and taps t of x[n, c, p * stride + t * dilation - padding] weight[o, c, t]``."""
    out = _out_size(x.shape[2:], window)
    lead, filters = x.shape[0], weight.shape[0]
    if weight.shape[1] == 1:
        return _weighted_sum(tap_views(x, window, window.taps(), out), weight)
    depth = weight.shape[1]
    grouped = x.reshape(lead * groups, depth, *x.shape[2:])
    total: Tensor | None = None
    for taps in _tap_chunks(window, x.shape[1], x, out):
        columns = _columns(grouped, window, taps, out)
        matrix = _filter_matrix(weight, taps).reshape(1, groups, filters // groups, len(taps) * depth)
        matrix = matrix.expand(lead, *matrix.shape[1:]).reshape(lead * groups, *matrix.shape[2:])
        part = torch.bmm(matrix, columns)
        total = part if total is None else total + part
    assert total is not None, "a window has at least one tap"
    return total.reshape(lead, filters, *out)


def input_gradient(grad: Tensor, weight: Tensor, window: Window, size: Sequence[int], groups: int) -> Tensor:
    """The adjoint of ``correlation`` in its input: ``grad [N, O, *out]`` to ``[N, C, *size]``.

    As correlations with the turned filter where that is possible and pays, else as a product whose columns are folded.
    """
    narrow = groups == 1 and weight.shape[1] < TURNED_CHANNELS
    static = all(isinstance(n, int) for n in (*size, *grad.shape[2:]))
    undilated = all(s == 1 or d == 1 for s, d in zip(window.stride, window.dilation, strict=True))
    if narrow or not static or not undilated or math.prod(window.kernel) == 1:
        return _folded_product(grad, weight, window, size, groups)
    return _turned_correlations(grad, weight, window, size, groups)


def _folded_product(grad: Tensor, weight: Tensor, window: Window, size: Sequence[int], groups: int) -> Tensor:
    lead, out = grad.shape[0], grad.shape[2:]
    depth, filters = weight.shape[1], weight.shape[0] // groups
    grouped = grad.reshape(lead * groups, filters, -1)
    contributions: list[tuple[Tap, Tensor]] = []
    for taps in _tap_chunks(window, groups * depth, grad, out):
        matrix = _filter_matrix(weight, taps).reshape(1, groups, filters, len(taps) * depth).transpose(2, 3)
        matrix = matrix.expand(lead, *matrix.shape[1:]).reshape(lead * groups, len(taps) * depth, filters)
        product = torch.bmm(matrix, grouped).reshape(lead * groups, len(taps), depth, *out)
        contributions += [(tap, product[:, i]) for i, tap in enumerate(taps)]
    return fold(contributions, window, size).reshape(lead, groups * depth, *size)


@dataclass(frozen=True)
class _Phase:
    """Along one axis, the inputs of one remainder modulo the stride, and the taps that reach them.

    Input ``q * stride + remainder`` takes tap ``first + stride * m`` of output ``q + shift - m``, for ``taps`` values
    of ``m``.
    """

    first: int
    taps: int
    shift: int

    @classmethod
    def of(cls, window: Window, axis: int, remainder: int) -> _Phase:
        shift, first = divmod(remainder + window.padding[axis], window.stride[axis])
        return cls(first, max(-(-(window.kernel[axis] - first) // window.stride[axis]), 0), shift)


def _turned_correlations(grad: Tensor, weight: Tensor, window: Window, size: Sequence[int], groups: int) -> Tensor:
    """One correlation of stride 1 per remainder modulo the stride: no zero is multiplied, nothing is added up twice."""
    rank, ones, none = window.rank, (1,) * window.rank, (0,) * window.rank
    quotients = [-(-n // s) for n, s in zip(size, window.stride, strict=True)]
    axes = [[_Phase.of(window, axis, r) for r in range(window.stride[axis])] for axis in range(rank)]
    reach = [[d * max(phase.taps - 1, 0) for phase in line] for line, d in zip(axes, window.dilation, strict=True)]
    low = [max(0, *(r - p.shift for r, p in zip(*pair, strict=True))) for pair in zip(reach, axes, strict=True)]
    high = [
        max(0, *(q - n + p.shift for p in line)) for q, n, line in zip(quotients, grad.shape[2:], axes, strict=True)
    ]
    buffer, turned = pad_axes(grad, low, high), _turned_filter(weight, groups)
    parts = []
    for phases in itertools.product(*axes):
        view, kernel = buffer, turned
        for axis, phase in enumerate(phases):
            length = window.dilation[axis] * (phase.taps - 1)
            start = low[axis] + phase.shift - length
            view = view.narrow(axis + 2, start, quotients[axis] + length) if phase.taps else view
            # The turned filter holds tap k at place kernel - 1 - k.
            last = window.kernel[axis] - 1 - phase.first - window.stride[axis] * (phase.taps - 1)
            kernel = aten.slice.Tensor(kernel, axis + 2, last, window.kernel[axis] - phase.first, window.stride[axis])
        if not all(phase.taps for phase in phases):
            parts.append(grad.new_zeros(grad.shape[0], turned.shape[0], *quotients))
            continue
        step = Window(tuple(phase.taps for phase in phases), ones, none, window.dilation)
        parts.append(correlate(view, kernel, step, groups))
    return merge_phases(parts, window.stride, size)


def _turned_filter(weight: Tensor, groups: int) -> Tensor:
    """``[O, C / groups, *kernel]`` turned about its middle, inputs and filters swapped: ``[C, O / groups, ...]``."""
    filters, depth, *kernel = weight.shape
    swapped = weight.reshape(groups, filters // groups, depth, *kernel).transpose(1, 2)
    return swapped.reshape(groups * depth, filters // groups, *kernel).flip(list(range(2, weight.dim())))


def weight_gradient(x: Tensor, grad: Tensor, window: Window, groups: int) -> Tensor:
    """The adjoint of ``correlation`` in its weight: ``[O, C / groups, *kernel]``."""
    out = grad.shape[2:]
    depth, filters = x.shape[1] // groups, grad.shape[1] // groups
    if depth == 1 and filters == 1:
        axes = [0, *range(2, grad.dim())]
        sums = [(grad * view).sum(axes) for view in tap_views(x, window, window.taps(), out)]
        return torch.stack(sums, -1).reshape(-1, 1, *window.kernel)
    left = _channels_first(grad, groups).flatten(2)
    grouped = _channels_first(x, groups)
    parts = []
    for taps in _tap_chunks(window, x.shape[1], x, out):
        views = [view.flatten(2) for view in tap_views(grouped, window, taps, out)]
        columns = views[0] if len(views) == 1 else torch.cat(views, 1)
        product = _batched_product(left, columns.transpose(1, 2))
        parts.append(product.reshape(groups * filters, len(taps), depth))
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return whole.transpose(1, 2).reshape(groups * filters, depth, *window.kernel)


def _channels_first(x: Tensor, groups: int) -> Tensor:
    """``[N, C, *spatial]`` as ``[groups, C / groups, N, *spatial]``."""
    return x.transpose(0, 1).reshape(groups, x.shape[1] // groups, x.shape[0], *x.shape[2:])


def _columns(x: Tensor, window: Window, taps: Sequence[Tap], out: Sequence[int]) -> Tensor:
    """``[B, C, *spatial]`` as ``[B, taps * C, positions]``."""
    views = [view.flatten(2) for view in tap_views(x, window, taps, out)]
    return views[0] if len(views) == 1 else torch.cat(views, 1)


def _filter_matrix(weight: Tensor, taps: Sequence[Tap]) -> Tensor:
    """``[O, C, *kernel]`` as ``[O, taps * C]`` for some rows of taps, in the order of ``_columns``."""
    rank = weight.dim() - 2
    rows = weight.permute(0, *range(2, rank + 2), 1)
    if len(taps) < weight[0, 0].numel():
        for axis, position in enumerate(taps[0][:-1]):
            rows = rows.narrow(axis + 1, position, 1)
    return rows.reshape(weight.shape[0], len(taps) * weight.shape[1])


def _tap_chunks(window: Window, channels: int, x: Tensor, out: Sequence[int]) -> list[list[Tap]]:
    """The taps whose columns are built at once: all, or a row of the filter where all would be too many bytes."""
    taps = window.taps()
    row = window.kernel[-1]
    count = x.shape[0] * channels * len(taps) * x.element_size()
    for length in out:
        count = count * length
    # A symbolic size is not asked: the answer would become a guard.
    if not isinstance(count, int) or count <= COLUMN_BYTES:
        return [taps]
    return [taps[i : i + row] for i in range(0, len(taps), row)]


def _weighted_sum(views: Sequence[Tensor], weight: Tensor) -> Tensor:
    """One input channel per group, ``weight [O, 1, *kernel]``: each view ``[N, C, *out]`` times its tap, added up.

    Products of single elements vectorize where a matrix of one row does not.
    """
    lead, channels, *out = views[0].shape
    kernel = weight.reshape(1, channels, -1, len(views))
    total: Tensor | None = None
    for i, view in enumerate(views):
        part = view.unsqueeze(2) * kernel[..., i].reshape(1, channels, -1, *[1] * len(out))
        total = part if total is None else total + part
    assert total is not None, "a window has at least one tap"
    return total.reshape(lead, weight.shape[0], *out)


def correlate(x: Tensor, weight: Tensor, window: Window, groups: int) -> Tensor:
    """A correlation through the dispatcher, so that ``convolution`` may leave it to torch-mlir."""
    zeros = [0] * window.rank
    return aten.convolution.default(
        x, weight, None, window.stride, window.padding, window.dilation, False, zeros, groups
    )


def _batched_product(left: Tensor, right: Tensor) -> Tensor:
    """A batch of one as a plain product, which has more lowerings."""
    return torch.mm(left[0], right[0]).unsqueeze(0) if left.shape[0] == 1 else torch.bmm(left, right)


def _out_size(size: Sequence[int], window: Window) -> list[int]:
    return [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(size, window.kernel, window.stride, window.padding, window.dilation, strict=True)
    ]
