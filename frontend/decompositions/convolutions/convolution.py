# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Convolutions and their gradients: PyTorch's ops in terms of a correlation and its adjoints (``correlation.py``). A
transposed convolution is the adjoint in the input, used as the forward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from retrograd.frontend.decompositions.convolutions.correlation import (
    correlation,
    input_gradient,
    out_size,
    weight_gradient,
)
from retrograd.frontend.decompositions.convolutions.im2col import is_static
from retrograd.frontend.decompositions.convolutions.kernel_calls import takes_backward, takes_forward
from retrograd.frontend.decompositions.convolutions.turned_filters import correlate
from retrograd.frontend.decompositions.convolutions.windows import Window, slice_axis, spread_axes
from retrograd.frontend.decompositions.entry import Decomposition
from retrograd.frontend.decompositions.sums import computed, sum_of_channels
from retrograd.frontend.libraries.ops import computes, has_many_own_taps
from retrograd.frontend.sizes.taken_conditions import take_equal

aten = torch.ops.aten

# From this many taps and channels on, torch-mlir's own dense convolution of stride 1 beats columns, on a GPU.
DIRECT_TAPS = 9
DIRECT_CHANNELS = 2
# On a CPU rows of results that are no multiple of this (14, 7) are not vectorized: the loops take 10 times as long as
# columns do. Of others they take 1.3 times as long, without the memory for columns, which a budget may not have.
DIRECT_WIDTH = 4
# Beyond this many taps slices for each, which open sizes need, would make graphs of thousands of ops.
MAX_TAPS = 512


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """``aten.convolution``: ``x [N, C, *spatial]`` with ``weight [O, C / groups, *kernel]``.

    A transposed convolution's weight is ``[C, O / groups, *kernel]``. Half types are added up in f32, and those of f16
    that a library would compute in f32 are. Returns
    ``NotImplemented`` for unbatched tensors, for filters of too many taps on open sizes, and where torch-mlir's own
    lowering is faster, or a kernel of ours takes it.
    """
    how = (stride, padding, dilation, transposed, output_padding, groups)
    if takes_forward(x, weight, *how):
        # As PyTorch's libraries add a bias on a GPU, in the type of the images.
        own = NotImplemented if bias is None else aten.convolution.default(x, weight, None, *how)
        return own if bias is None else own + bias.reshape(1, -1, *[1] * (x.dim() - 2))
    if x.dtype is torch.float16:
        wide = (computed(x), computed(weight), None if bias is None else computed(bias), *how)
        if computes(aten.convolution.default, *wide):
            return aten.convolution.default(*wide).to(x.dtype)
    window = Window.of(tuple(weight.shape[2:]), stride, padding, dilation)
    direct = not transposed and groups == 1 and _is_direct(window, weight, x)
    half = x.dtype in (torch.bfloat16, torch.float16)
    if x.dim() != window.rank + 2 or _has_too_many_taps(window, x) or (direct and not half):
        return NotImplemented
    xs, ws = computed(x), computed(weight)
    if transposed:
        extra = spread_axes(output_padding, window.rank)
        y = input_gradient(xs, weight, window, _transposed_size(x.shape[2:], window, extra), groups)
    else:
        y = correlate(xs, ws, window, groups) if direct else correlation(xs, ws, window, groups)
    if bias is not None:
        y = y + computed(bias).reshape(1, -1, *[1] * window.rank)
    return y.to(x.dtype)


def _has_too_many_taps(window: Window, x: Tensor) -> bool:
    return math.prod(window.kernel) > MAX_TAPS and not is_static(x.shape[2:])


def _is_direct(window: Window, weight: Tensor, x: Tensor) -> bool:
    """Whether a dense convolution is left to torch-mlir's own loops, as faster than columns, or nearly as fast and in
    less memory; those over volumes never are."""
    plain = window.rank <= 2 and all(s == 1 for s in window.stride)
    if not plain or math.prod(window.kernel) < DIRECT_TAPS or weight.shape[1] < DIRECT_CHANNELS:
        return False
    # Of channels that lie last the op is known to give such; columns would change the strides of results.
    if x.device.type != "cpu" or not is_static(x.shape) or suggest_memory_format(x) is not torch.contiguous_format:
        return True
    return out_size(x.shape[2:], window)[-1] % DIRECT_WIDTH == 0


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    """``aten.convolution_backward``: the gradients of input, weight and bias, ``None`` where ``output_mask`` is
    false. Returns ``NotImplemented`` where kernels of ours take them.
    """
    how = (stride, padding, dilation, transposed, output_padding, groups)
    if any(output_mask[:2]) and takes_backward(grad, x, weight, *how):
        if not output_mask[2]:
            return NotImplemented
        sums = sum_of_channels(computed(grad)).to(grad.dtype)
        return *aten.convolution_backward.default(grad, x, weight, None, *how, [*output_mask[:2], False])[:2], sums
    window = Window.of(tuple(weight.shape[2:]), stride, padding, dilation)
    if x.dim() != window.rank + 2 or _has_too_many_taps(window, x):
        return NotImplemented
    # Where a backward is traced by itself, nothing else relates the sizes of images and of results.
    extra, sizes = spread_axes(output_padding, window.rank), x.shape[2:]
    take_equal(
        grad.shape[2:], lambda: _transposed_size(sizes, window, extra) if transposed else out_size(sizes, window)
    )
    gs, xs, ws = computed(grad), computed(x), computed(weight)
    widened = (gs, xs, ws, bias_sizes, *how, output_mask)
    if x.dtype is torch.float16 and computes(aten.convolution_backward.default, *widened):
        return tuple(None if g is None else g.to(x.dtype) for g in aten.convolution_backward.default(*widened))
    grad_x = grad_weight = grad_bias = None
    in_planes = output_mask[1] and takes_planes(gs, xs, ws, window, transposed, groups)
    if output_mask[0]:
        if in_planes:
            # By itself, a library may take it.
            grad_x = aten.convolution_backward.default(grad, x, weight, None, *how, [True, False, False])[0]
        elif transposed:
            grad_x = _transposed_input_gradient(gs, ws, window, x.shape, extra, groups)
        else:
            grad_x = input_gradient(gs, weight, window, x.shape[2:], groups)
        grad_x = grad_x.to(x.dtype)
    if output_mask[1]:
        wide, narrow = (gs, xs) if transposed else (xs, gs)
        found = filters_of_planes(gs, xs, window) if in_planes else weight_gradient(wide, narrow, window, groups)
        grad_weight = found.to(weight.dtype)
    if output_mask[2]:
        grad_bias = sum_of_channels(gs).to(grad.dtype)
    return grad_x, grad_weight, grad_bias


def _transposed_input_gradient(
    grad: Tensor, weight: Tensor, window: Window, shape: Sequence[int], extra: Sequence[int], groups: int
) -> Tensor:
    grad_x: Tensor = correlate(grad, weight, window, groups)
    # Output padding of a whole stride or more leaves room for windows past the last input.
    for axis, (more, step) in enumerate(zip(extra, window.stride, strict=True)):
        if more >= step:
            grad_x = grad_x.narrow(axis + 2, 0, shape[axis + 2])
    return grad_x


def _transposed_size(size: Sequence[int], window: Window, extra: Sequence[int]) -> list[int]:
    zipped = zip(size, window.kernel, window.stride, window.padding, window.dilation, extra, strict=True)
    return [(n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, k, s, p, d, e in zipped]


ENTRIES = (
    Decomposition(
        aten.convolution.default,
        convolution,
        "torch-mlir's NCHW loops are 4-20 times eager's time with a stride, a small filter, one channel or a volume",
    ),
    Decomposition(
        aten.convolution_backward.default,
        convolution_backward,
        "torch-mlir has no grouped or transposed form, and its weight gradient takes 20 to 30 times eager's time",
    ),
)


# oneDNN has no fast gradient of such filters (5 x 5 taps of 4 x 672 x 4 x 4: 2.4 ms on one core with AVX-512), but its
# convolution is one: of each plane with the gradients of its results, whose taps are a stride apart (0.2 ms).
def takes_planes(grad: Tensor, x: Tensor, weight: Tensor, window: Window, transposed: bool, groups: int) -> bool:
    """Whether the filters' gradient is to be computed so, by a library."""
    if transposed or not has_many_own_taps(x, weight, groups):
        return False
    return computes(aten.convolution.default, *_planes(grad, x, window))


def filters_of_planes(grad: Tensor, x: Tensor, window: Window) -> Tensor:
    """``grad [N, C, *out]`` and ``x [N, C, *size]`` to ``[C, 1, *kernel]``."""
    taps = aten.convolution.default(*_planes(grad, x, window))
    # Where a stride leaves some of an image over there are windows that are no taps.
    for axis, kernel in enumerate(window.kernel):
        taps = slice_axis(taps, axis + 2, 0, kernel)
    lead, channels = x.shape[:2]
    return taps.reshape(lead, channels, *window.kernel).sum(0).unsqueeze(1)


def _planes(grad: Tensor, x: Tensor, window: Window) -> tuple[Any, ...]:
    """The arguments of that convolution."""
    planes = math.prod(x.shape[:2])
    images, filters = x.reshape(1, planes, *x.shape[2:]), grad.reshape(planes, 1, *grad.shape[2:])
    how = (window.dilation, window.padding, window.stride)
    return images, filters, None, *map(list, how), False, [0] * window.rank, planes
