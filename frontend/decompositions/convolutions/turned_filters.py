# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The gradient of a convolution in its input as convolutions with the turned filter."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from retrograd.frontend.decompositions.convolutions.windows import Window, merge_phases, pad_axes


def correlate(x: Tensor, weight: Tensor, window: Window, groups: int) -> Tensor:
    """A correlation through the dispatcher, so that ``convolution`` may leave it to torch-mlir."""
    zeros = [0] * window.rank
    return torch.ops.aten.convolution.default(
        x, weight, None, window.stride, window.padding, window.dilation, False, zeros, groups
    )


def can_turn(window: Window) -> bool:
    """Whether the taps that reach inputs of one remainder modulo the stride are evenly spaced."""
    return all(s == 1 or d == 1 for s, d in zip(window.stride, window.dilation, strict=True))


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


def turned_correlations(grad: Tensor, weight: Tensor, window: Window, size: Sequence[int], groups: int) -> Tensor:
    """``grad [N, O, *out]`` to ``[N, C, *size]``: one correlation of stride 1 per remainder modulo the
    stride. No zero is multiplied, nothing is added up twice.
    """
    rank, ones, none = window.rank, (1,) * window.rank, (0,) * window.rank
    quotients = [-(-n // s) for n, s in zip(size, window.stride, strict=True)]
    axes = [[_Phase.of(window, axis, r) for r in range(window.stride[axis])] for axis in range(rank)]
    reach = [[d * max(phase.taps - 1, 0) for phase in line] for line, d in zip(axes, window.dilation, strict=True)]
    low = [max(0, *(r - p.shift for r, p in zip(*pair, strict=True))) for pair in zip(reach, axes, strict=True)]
    high = [
        max(0, *(q - n + p.shift for p in line)) for q, n, line in zip(quotients, grad.shape[2:], axes, strict=True)
    ]
    buffer, turned = pad_axes(grad, low, high), _turned_filter(weight, groups).to(grad.dtype)
    parts = []
    for phases in itertools.product(*axes):
        view, kernel = buffer, turned
        for axis, phase in enumerate(phases):
            length = window.dilation[axis] * (phase.taps - 1)
            start = low[axis] + phase.shift - length
            view = view.narrow(axis + 2, start, quotients[axis] + length) if phase.taps else view
            # The turned filter holds tap k at place kernel - 1 - k.
            last = window.kernel[axis] - 1 - phase.first - window.stride[axis] * (phase.taps - 1)
            kernel = torch.ops.aten.slice.Tensor(
                kernel, axis + 2, last, window.kernel[axis] - phase.first, window.stride[axis]
            )
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
