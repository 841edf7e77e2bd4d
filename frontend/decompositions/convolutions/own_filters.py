# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The gradient of filters of many taps, one for each channel, as a convolution that a CPU's library computes.

oneDNN has no fast gradient of such filters (5 x 5 taps of 4 x 672 x 4 x 4: 2.4 ms on one core with AVX-512), but its
convolution is one: of each plane with the gradients of its results, whose taps are a stride apart (0.2 ms).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.convolutions.windows import Window, slice_axis
from retrograd.frontend.libraries.ops import computes, has_many_own_taps

aten = torch.ops.aten


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
