# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Convolutions of images with channels last, as ops of their own, which kernels of ours compute.

``retrograd::convolution_last`` takes images ``[N, H, W, G C]`` and filters ``[G O, R, S, C]``, for G groups of
channels, and gives ``[N, P, Q, G O]``; ``convolution_last_images`` gives the gradient of the images, or what a
transposed convolution does, and ``convolution_last_filters`` that of the filters. ``window`` is stride, padding and
dilation, two numbers each, and ``size`` what is left open of the result's shape: [P, Q], [H, W, G C] or [R, S, C].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from retrograd.contract.convolution import count_windows
from retrograd.frontend.layers.own_ops import define_op

aten = torch.ops.aten
LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
"""The axes of planes in the order of memory with channels last, and the other way."""


def _planes(x: Tensor) -> Tensor:
    return x.permute(FIRST)


def _last(x: Tensor) -> Tensor:
    return x.permute(LAST).contiguous()


def _convolution(images: Tensor, filters: Tensor, window: Sequence[int], size: Sequence[int]) -> Tensor:
    groups = images.shape[3] // filters.shape[3]
    how = (window[:2], window[2:4], window[4:], False, [0, 0], groups)
    found = aten.convolution.default(_planes(images), _planes(filters), None, *how)
    # Fewer windows than there are: a transposed convolution's images may end behind the last one.
    return _last(found[:, :, : size[0], : size[1]])


def _images(grad: Tensor, filters: Tensor, window: Sequence[int], size: Sequence[int]) -> Tensor:
    images = grad.new_empty([grad.shape[0], size[2], *size[:2]])
    how = (window[:2], window[2:4], window[4:], False, [0, 0], size[2] // filters.shape[3])
    gradients = _gradients(_planes(grad), images, _planes(filters), how, [True, False, False])
    return _last(gradients[0])


def _filters(grad: Tensor, images: Tensor, window: Sequence[int], size: Sequence[int]) -> Tensor:
    filters = grad.new_empty([grad.shape[3], size[2], *size[:2]])
    how = (window[:2], window[2:4], window[4:], False, [0, 0], images.shape[3] // size[2])
    gradients = _gradients(_planes(grad), _planes(images), filters, how, [False, True, False])
    return _last(gradients[1])


def _gradients(grad: Tensor, images: Tensor, filters: Tensor, how: Sequence[Any], mask: Sequence[bool]) -> Any:
    stride, padding, dilation = how[:3]
    # PyTorch asks for the gradient of all windows.
    more = [
        count_windows(*along) - given
        for given, *along in zip(
            grad.shape[2:], images.shape[2:], filters.shape[2:], stride, padding, dilation, strict=True
        )
    ]
    padded = torch.nn.functional.pad(grad, [0, more[1], 0, more[0]])
    return aten.convolution_backward.default(padded, images, filters, None, *how, mask)


def _fake(images: Tensor, filters: Tensor, window: Sequence[int], size: Sequence[int]) -> Tensor:
    return images.new_empty([images.shape[0], *size, filters.shape[0]])


def _fake_images(grad: Tensor, filters: Tensor, window: Sequence[int], size: Sequence[int]) -> Tensor:
    return grad.new_empty([grad.shape[0], *size])


def _fake_filters(grad: Tensor, images: Tensor, window: Sequence[int], size: Sequence[int]) -> Tensor:
    return grad.new_empty([grad.shape[3], *size])


_HOW = "int[] window, int[] size) -> Tensor"
CONVOLUTION_LAST = define_op(f"convolution_last(Tensor images, Tensor filters, {_HOW}", _convolution, _fake)
CONVOLUTION_LAST_IMAGES = define_op(
    f"convolution_last_images(Tensor grad, Tensor filters, {_HOW}", _images, _fake_images
)
CONVOLUTION_LAST_FILTERS = define_op(
    f"convolution_last_filters(Tensor grad, Tensor images, {_HOW}", _filters, _fake_filters
)
