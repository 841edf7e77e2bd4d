# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Calls of convolutions in a trace: which of them kernels of our own take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from retrograd.contract.convolution import Convolution, count_windows
from retrograd.frontend.decompositions.convolutions.windows import spread_axes
from retrograd.frontend.libraries.kernel_calls import describe_tensor, show_tensor, take_call


def takes_forward(x: Tensor, weight: Tensor, *how: Any) -> bool:
    """Whether kernels compute a call."""
    return take_convolution(_describe(x, weight, None, *how))


def takes_backward(grad: Tensor, x: Tensor, weight: Tensor, *how: Any) -> bool:
    """Whether kernels compute a call for its gradients."""
    return take_convolution(_describe(x, weight, grad, *how))


def take_convolution(call: Convolution) -> bool:
    """Whether kernels compute a convolution; notes why they do not."""
    what = f"convolution of {show_tensor(call.images)} with {show_tensor(call.filters)}"
    return take_call("convolutions", call, what)


def _describe(
    x: Tensor,
    weight: Tensor,
    given: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Convolution:
    """Which convolution a call is; ``given`` is of the shape of what it gives, if that is known."""
    rank = weight.dim() - 2
    axes = [spread_axes(numbers, rank) for numbers in (stride, padding, dilation, output_padding)]
    window = (axes[0], axes[1], axes[2])
    taken, filters = describe_tensor(x), describe_tensor(weight)
    if given is not None:
        results = describe_tensor(given)
    else:
        channels = filters[1][1] * groups if transposed else filters[1][0]  # type: ignore[operator]
        sizes = [
            _size(size, kernel, transposed, *numbers)
            for size, kernel, *numbers in zip(taken[1][2:], filters[1][2:], *axes, strict=False)
        ]
        results = taken[0], (taken[1][0], channels, *sizes)
    images, results = (results, taken) if transposed else (taken, results)
    return Convolution(images, filters, results, *window, groups)


def _size(
    size: int | None, kernel: int | None, transposed: bool, stride: int, padding: int, dilation: int, more: int
) -> int | None:
    """How many places there are along an axis."""
    if size is None or kernel is None:
        return None
    if transposed:
        return (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1 + more
    return count_windows(size, kernel, stride, padding, dilation)
