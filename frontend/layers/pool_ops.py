# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Maxima of windows over images with channels last, as ops of their own.

``retrograd::max_pool_last`` takes images ``[N, H, W, C]`` and gives maxima ``[N, P, Q, C]`` and, as int8, the number of
the tap that each is of; ``retrograd::max_pool_last_backward`` gives each element what the windows whose maximum it is
have for it. Each is compiled as one op that reads elements from where they are (``convert-torch-pools-to-linalg``).
``window`` is kernel, stride, padding and dilation, two numbers each.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from retrograd.frontend.decompositions.convolutions.correlation import out_size
from retrograd.frontend.decompositions.convolutions.windows import Window
from retrograd.frontend.layers.convolution_ops import FIRST, LAST
from retrograd.frontend.layers.own_ops import define_op

aten = torch.ops.aten
MOST_TAPS = 127
"""Taps are numbered in int8."""

_RANK = 2


def write_window(window: Window) -> list[int]:
    """The numbers of a window, as the ops take them."""
    return [*window.kernel, *window.stride, *window.padding, *window.dilation]


def _read_window(numbers: Sequence[int]) -> Window:
    return Window(*(tuple(numbers[start : start + _RANK]) for start in range(0, 4 * _RANK, _RANK)))


def find_places(taps: Tensor, numbers: Sequence[int], size: Sequence[int]) -> Tensor:
    """``[N, P, Q, C]``, int64: the place of each maximum in its flattened plane of ``size``."""
    window, wide = _read_window(numbers), taps.to(torch.int64)
    of_axis = (torch.div(wide, window.kernel[1], rounding_mode="floor"), torch.remainder(wide, window.kernel[1]))
    rows, columns = (
        torch.arange(taps.shape[1 + axis], device=taps.device).reshape([-1, 1, 1] if axis == 0 else [-1, 1])
        * window.stride[axis]
        - window.padding[axis]
        + tap * window.dilation[axis]
        for axis, tap in enumerate(of_axis)
    )
    return rows * size[1] + columns


def _max_pool_last(images: Tensor, window: Sequence[int], out: Sequence[int]) -> tuple[Tensor, Tensor]:
    known = _read_window(window)
    planes = images.permute(FIRST)
    # A window may end behind the padding, in ceil mode.
    is_ceil = [*out] != out_size(planes.shape[2:], known)
    shape = (known.kernel, known.stride, known.padding, known.dilation)
    most, places = aten.max_pool2d_with_indices.default(planes, *map(list, shape), is_ceil)
    row, column = torch.div(places, planes.shape[3], rounding_mode="floor"), places % planes.shape[3]
    taps = [
        torch.div(
            place
            + known.padding[axis]
            - torch.arange(out[axis], dtype=place.dtype, device=place.device).reshape([-1, 1] if axis == 0 else [-1])
            * known.stride[axis],
            known.dilation[axis],
            rounding_mode="floor",
        )
        for axis, place in enumerate((row, column))
    ]
    numbers = (taps[0] * known.kernel[1] + taps[1]).to(torch.int8)
    return most.permute(LAST).contiguous(), numbers.permute(LAST).contiguous()


def _max_pool_last_backward(grad: Tensor, taps: Tensor, window: Sequence[int], size: Sequence[int]) -> Tensor:
    known = _read_window(window)
    places = find_places(taps, window, size).permute(FIRST).contiguous()
    planes = grad.permute(FIRST).contiguous()
    images = planes.new_empty([*planes.shape[:2], *size])
    shape = (known.kernel, known.stride, known.padding, known.dilation)
    is_ceil = [*planes.shape[2:]] != out_size(size, known)
    found = aten.max_pool2d_with_indices_backward.default(planes, images, *map(list, shape), is_ceil, places)
    return found.permute(LAST).contiguous()


def _fake(images: Tensor, window: Sequence[int], out: Sequence[int]) -> tuple[Tensor, Tensor]:
    shape = [images.shape[0], *out, images.shape[3]]
    return images.new_empty(shape), images.new_empty(shape, dtype=torch.int8)


def _fake_backward(grad: Tensor, taps: Tensor, window: Sequence[int], size: Sequence[int]) -> Tensor:
    return grad.new_empty([grad.shape[0], *size, grad.shape[3]])


def can_number_taps(kernel: Sequence[int]) -> bool:
    """Whether the taps of a window have numbers in int8."""
    return prod(kernel) <= MOST_TAPS


MAX_POOL_LAST = define_op(
    "max_pool_last(Tensor images, int[] window, int[] out) -> (Tensor, Tensor)", _max_pool_last, _fake
)
MAX_POOL_LAST_BACKWARD = define_op(
    "max_pool_last_backward(Tensor grad, Tensor taps, int[] window, int[] size) -> Tensor",
    _max_pool_last_backward,
    _fake_backward,
)
