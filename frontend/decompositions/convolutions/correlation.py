# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Correlations and their adjoints as matrix products.

Three contractions carry every convolution: the correlation, its adjoint in the input, and its adjoint in the weight.
Each is one batched product over columns (im2col, channels first), which IREE packs and tiles as it does any matrix
product; its loops for a convolution's own weight gradient are ten to thirty times slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from retrograd.contract.convolution import count_windows
from retrograd.frontend.decompositions.convolutions.im2col import Columns, is_static
from retrograd.frontend.decompositions.convolutions.turned_filters import can_turn, turned_correlations
from retrograd.frontend.decompositions.convolutions.windows import Window, fold, tap_views

# With fewer input channels than this, folding writes so little that it beats a correlation with the turned filter.
TURNED_CHANNELS = 4
# Beyond so many remainders modulo the stride, a correlation for each takes longer to compile than one folded product.
MAX_PHASES = 4


def correlation(x: Tensor, weight: Tensor, window: Window, groups: int) -> Tensor:
    """``y[n, o, p] = sum over c and taps t of x[n, c, p * stride + t * dilation - padding] weight[o, c, t]``."""
    out = out_size(x.shape[2:], window)
    lead, filters = x.shape[0], weight.shape[0]
    if _is_product(window, groups):
        view = _only_view(x, window, out)
        if _is_of_rows(x, out):
            return torch.mm(view.flatten(1), weight.flatten(1).t()).reshape(lead, filters, *out)
        return torch.bmm(_for_each(weight.flatten(1), lead), view).reshape(lead, filters, *out)
    depth = weight.shape[1]
    columns = Columns.plan(window, x.shape[2:], out, x.shape[:2], x.element_size())
    if depth == 1 and (columns.by_tap or filters == groups):
        return _weighted_sum(x, weight, columns)
    grouped = x.reshape(lead * groups, depth, *x.shape[2:])
    total: Tensor | None = None
    for chunk, matrix in zip(columns.build(grouped), columns.split_filter(weight), strict=True):
        matrix = matrix.reshape(1, groups, filters // groups, matrix.shape[1])
        matrix = matrix.expand(lead, *matrix.shape[1:]).reshape(lead * groups, *matrix.shape[2:])
        part = torch.bmm(matrix, chunk)
        total = part if total is None else total + part
    assert total is not None, "a window has at least one tap"
    return total.reshape(lead, filters, *out)


def input_gradient(grad: Tensor, weight: Tensor, window: Window, size: Sequence[int], groups: int) -> Tensor:
    """The adjoint of ``correlation`` in its input: ``grad [N, O, *out]`` to ``[N, C, *size]``.

    As correlations with the turned filter where that is possible and pays, else as a product whose columns are folded.
    A weight of narrower type than ``grad`` is turned as it is, and widened when it is multiplied.
    """
    if _is_product(window, groups):
        matrix, lead = weight.to(grad.dtype).flatten(1), grad.shape[0]
        is_of_rows = _is_of_rows(grad, grad.shape[2:])
        flat = (
            torch.mm(grad.flatten(1), matrix) if is_of_rows else torch.bmm(_for_each(matrix.t(), lead), grad.flatten(2))
        )
        value = flat.reshape(lead, weight.shape[1], *grad.shape[2:])
        return fold([((0,) * window.rank, value)], window, size)
    narrow = groups == 1 and weight.shape[1] < TURNED_CHANNELS
    turns = is_static((*size, *grad.shape[2:])) and can_turn(window) and math.prod(window.stride) <= MAX_PHASES
    if narrow or not turns or math.prod(window.kernel) == 1:
        return _folded_product(grad, weight.to(grad.dtype), window, size, groups)
    return turned_correlations(grad, weight, window, size, groups)


def _folded_product(grad: Tensor, weight: Tensor, window: Window, size: Sequence[int], groups: int) -> Tensor:
    lead, out = grad.shape[0], grad.shape[2:]
    depth, filters = weight.shape[1], weight.shape[0] // groups
    grouped = grad.reshape(lead * groups, filters, -1)
    columns = Columns.plan(window, size, out, (lead, groups * depth), grad.element_size())
    products = []
    for part in columns.split_filter(weight):
        matrix = part.reshape(1, groups, filters, part.shape[1]).transpose(2, 3)
        matrix = matrix.expand(lead, *matrix.shape[1:]).reshape(lead * groups, part.shape[1], filters)
        products.append(torch.bmm(matrix, grouped))
    return columns.fold(products).reshape(lead, groups * depth, *size)


def weight_gradient(x: Tensor, grad: Tensor, window: Window, groups: int) -> Tensor:
    """The adjoint of ``correlation`` in its weight: ``[O, C / groups, *kernel]``."""
    out = grad.shape[2:]
    depth, filters = x.shape[1] // groups, grad.shape[1] // groups
    if _is_product(window, groups):
        if _is_of_rows(grad, out):
            rows = _only_view(x, window, out).flatten(1)
            return torch.mm(grad.flatten(1).t(), rows).reshape(filters, depth, *window.kernel)
        left, right = grad.transpose(0, 1).flatten(1), _only_view(x, window, out).transpose(1, 2)
        return torch.mm(left, right.flatten(0, 1)).reshape(filters, depth, *window.kernel)
    columns = Columns.plan(window, x.shape[2:], out, x.shape[:2], x.element_size())
    if depth == 1 and filters == 1:
        return _sums_of_products(x, grad, columns)
    left = _channels_first(grad, groups).flatten(2)
    parts = []
    for chunk in columns.build(_channels_first(x, groups)):
        product = _batched_product(left, chunk.transpose(1, 2))
        parts.append(product.reshape(groups * filters, -1, depth))
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return whole.transpose(1, 2).reshape(groups * filters, depth, *window.kernel)


def _is_product(window: Window, groups: int) -> bool:
    """Whether a correlation of all channels with a filter of one tap: a product, without columns."""
    return groups == 1 and math.prod(window.kernel) == 1


def _is_of_rows(x: Tensor, out: Sequence[int]) -> bool:
    """Whether such a product is of one place of each image, as where channels are weighted by what is in them: a linear
    layer, which reads its matrix once and not for each image. On a CPU; on GPUs it is not measured."""
    return x.device.type == "cpu" and is_static(out) and math.prod(out) == 1


def _only_view(x: Tensor, window: Window, out: Sequence[int]) -> Tensor:
    """The view of ``x`` at the one tap, ``[N, C, positions]``."""
    return next(tap_views(x, window, window.taps(), out)).flatten(2)


def _for_each(matrix: Tensor, lead: int) -> Tensor:
    """A matrix for each of ``lead`` products. Expanded last, it is seen by bwd-share-matrices to be shared: IREE would
    copy it."""
    return matrix.expand(lead, *matrix.shape)


def _channels_first(x: Tensor, groups: int) -> Tensor:
    """``[N, C, *spatial]`` as ``[groups, C / groups, N, *spatial]``."""
    return x.transpose(0, 1).reshape(groups, x.shape[1] // groups, x.shape[0], *x.shape[2:])


def _weighted_sum(x: Tensor, weight: Tensor, columns: Columns) -> Tensor:
    """One input channel per group, ``weight [O, 1, *kernel]``: what is at each tap times its weight, added up. Products
    of single elements vectorize where a matrix of one row does not."""
    lead, channels, *_ = x.shape
    shape = (lead, weight.shape[0], *columns.out)
    if not columns.by_tap:
        parts = [
            (chunk.reshape(lead, -1, channels, chunk.shape[2]) * kernel.T.reshape(1, -1, channels, 1)).sum(1)
            for chunk, kernel in zip(columns.build(x), columns.split_filter(weight), strict=True)
        ]
        return sum(parts[1:], parts[0]).reshape(shape)
    window = columns.window
    # Several filters of one channel stand along an axis of their own.
    single, filters = weight.shape[0] == channels, [] if weight.shape[0] == channels else [-1]
    views = tap_views(x if single else x.unsqueeze(2), window, window.taps(), columns.out)
    kernel = weight.reshape(1, channels, *filters, *[1] * window.rank, math.prod(window.kernel))
    total: Tensor | None = None
    for i, view in enumerate(views):
        part = view * kernel.select(-1, i)
        total = part if total is None else total + part
    assert total is not None, "a window has at least one tap"
    return total.reshape(shape)


def _sums_of_products(x: Tensor, grad: Tensor, columns: Columns) -> Tensor:
    """The weight's gradient where each channel has a filter of its own, ``[C, 1, *kernel]``."""
    window = columns.window
    if columns.by_tap:
        axes = [0, *range(2, grad.dim())]
        sums = [(grad * view).sum(axes) for view in tap_views(x, window, window.taps(), columns.out)]
        # One behind the other they are copied as they are; side by side each takes a kernel.
        return torch.stack(sums).transpose(0, 1).reshape(-1, 1, *window.kernel)
    lead, channels = x.shape[:2]
    flat = grad.reshape(lead, 1, channels, -1)
    parts = [(chunk.reshape(lead, -1, channels, chunk.shape[2]) * flat).sum([0, 3]) for chunk in columns.build(x)]
    return torch.cat(parts).transpose(0, 1).reshape(-1, 1, *window.kernel)


def _batched_product(left: Tensor, right: Tensor) -> Tensor:
    """A batch of one as a plain product, which has more lowerings."""
    return torch.mm(left[0], right[0]).unsqueeze(0) if left.shape[0] == 1 else torch.bmm(left, right)


def out_size(size: Sequence[int], window: Window) -> list[int]:
    """How many places a window has along each axis of so many elements."""
    return [
        count_windows(*along)
        for along in zip(size, window.kernel, window.stride, window.padding, window.dilation, strict=True)
    ]
