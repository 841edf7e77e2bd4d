# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Gradients of images that were made larger or smaller by repeating the nearest element: sums, axis by axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition

aten = torch.ops.aten


def nearest_gradient(
    grad: Tensor, output_size: Sequence[int], input_size: Sequence[int], *scales: float | None, exact: bool
) -> Tensor:
    """The gradient of an input of ``input_size [N, C, *sizes]`` resized to ``[N, C, *output_size]``."""
    scales = scales or (None,) * len(output_size)
    for axis, (length, wanted, scale) in enumerate(zip(output_size, input_size[2:], scales, strict=True), 2):
        grad = _sum_nearest(grad, axis, length, wanted, scale, exact)
    return grad


def _sum_nearest(grad: Tensor, axis: int, length: int, wanted: int, scale: float | None, exact: bool) -> Tensor:
    given = scale if scale is not None and scale > 0 else None
    if isinstance(length, int) and isinstance(wanted, int) and length % wanted == 0:
        times = length // wanted
        # PyTorch's kernels for CPUs do not look at the scale here.
        without_scale = times <= 2 and not exact and grad.device.type == "cpu"
        if given is None or given == times or without_scale:
            return grad if times == 1 else grad.unflatten(axis, (wanted, times)).sum(axis + 1)
    places = torch.arange(length, dtype=torch.float32, device=grad.device) + (0.5 if exact else 0.0)
    # In float32, as PyTorch's kernels: where the product is whole but for rounding, it may be the place before.
    sizes = (torch.scalar_tensor(n, dtype=torch.float32, device=grad.device) for n in (wanted, length))
    ratio = torch.div(*sizes) if given is None else 1.0 / given
    nearest = (places * ratio).to(torch.int64).clamp(max=wanted - 1)
    shape = [*grad.shape[:axis], wanted, *grad.shape[axis + 1 :]]
    return grad.new_zeros(shape).index_add(axis, nearest, grad)


def _entry(op: OpOverload, exact: bool, reason: str = NO_LOWERING) -> Decomposition:
    function: Callable[..., Any] = partial(nearest_gradient, exact=exact)
    return Decomposition(op, function, reason)


_WHOLE_TIMES = (
    "torch-mlir takes every size to be a whole number of times the other: 5 rows made 16 are off by their norm"
)

ENTRIES = (
    _entry(aten.upsample_nearest1d_backward.default, False),
    _entry(aten.upsample_nearest2d_backward.default, False, _WHOLE_TIMES),
    _entry(aten.upsample_nearest3d_backward.default, False),
    _entry(aten._upsample_nearest_exact1d_backward.default, True),
    _entry(aten._upsample_nearest_exact2d_backward.default, True),
    _entry(aten._upsample_nearest_exact3d_backward.default, True),
)
