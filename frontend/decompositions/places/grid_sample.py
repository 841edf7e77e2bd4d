# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Images read at places between their elements: ``grid_sample``.

A place is a weighted sum over its corners, so that one form is there for images of any number of axes; backward ops
are its derivatives. Source: PyTorch's ``GridSampler.h``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition

aten = torch.ops.aten

_BILINEAR, _NEAREST, _BICUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)
# Keys' kernel has this slope at 1: "Cubic convolution interpolation for digital image processing" (1981).
_SLOPE = -0.75


def grid_sampler(x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool) -> Tensor:
    """``aten.grid_sampler_2d`` and ``_3d``: ``[n, c, *places]`` of ``x [n, c, *sizes]`` at ``grid [n, *places, axes]``,
    whose last axis counts from the image's last axis, from -1 to 1."""
    sizes = x.shape[2:]
    # From here on in the order of the image's axes.
    spots = [_to_pixels(grid[..., -1 - axis], size, align_corners) for axis, size in enumerate(sizes)]
    if mode == _BICUBIC:
        return _bicubic(x, spots, padding, align_corners)
    spots = [_inside(s, size, padding, align_corners) for s, size in zip(spots, sizes, strict=True)]
    if mode == _NEAREST:
        return _read(x, [torch.round(s) for s in spots])
    low = [torch.floor(s.detach()) for s in spots]
    total = x.new_zeros(())
    for corner in itertools.product((0, 1), repeat=len(sizes)):
        places = [at + step for at, step in zip(low, corner, strict=True)]
        shares = [(s - at) if step else (at + 1 - s) for s, at, step in zip(spots, low, corner, strict=True)]
        total = total + _read(x, places) * math.prod(shares[1:], start=shares[0]).unsqueeze(1)
    return total


def grid_sampler_backward(
    grad: Tensor, x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """``aten.grid_sampler_2d_backward`` and ``_3d_backward``: the gradients of image and grid, as ``mask`` asks."""
    wanted = [t for t, needed in zip((x, grid), mask, strict=True) if needed]

    def sample(*given: Tensor) -> Tensor:
        rest = iter(given)
        image, places = (next(rest) if needed else t for t, needed in zip((x, grid), mask, strict=True))
        return grid_sampler(image, places, mode, padding, align_corners)

    found = iter(pull_back(sample, wanted, grad))
    image, places = (next(found) if needed else None for needed in mask)
    return image, places


def _bicubic(x: Tensor, spots: Sequence[Tensor], padding: int, align_corners: bool) -> Tensor:
    low = [torch.floor(s.detach()) for s in spots]
    shares = [[cubic_weight(s - at, step) for step in range(-1, 3)] for s, at in zip(spots, low, strict=True)]
    total = x.new_zeros(())
    for corner in itertools.product(range(4), repeat=len(spots)):
        places = [
            _inside(at + (step - 1), size, padding, align_corners)
            for at, step, size in zip(low, corner, x.shape[2:], strict=True)
        ]
        weight = [per_axis[step] for per_axis, step in zip(shares, corner, strict=True)]
        total = total + _read(x, [torch.round(p) for p in places]) * math.prod(weight[1:], start=weight[0]).unsqueeze(1)
    return total


def cubic_weight(t: Tensor, step: int) -> Tensor:
    """The weight of the element ``step`` from the one below a place that is ``t`` past that one."""
    distance = t + 1 if step == -1 else t if step == 0 else 1 - t if step == 1 else 2 - t
    if step in (0, 1):
        return ((_SLOPE + 2) * distance - (_SLOPE + 3)) * distance * distance + 1
    return ((_SLOPE * distance - 5 * _SLOPE) * distance + 8 * _SLOPE) * distance - 4 * _SLOPE


def _to_pixels(place: Tensor, size: int, align_corners: bool) -> Tensor:
    return (place + 1) / 2 * (size - 1) if align_corners else ((place + 1) * size - 1) / 2


def _inside(spot: Tensor, size: int, padding: int, align_corners: bool) -> Tensor:
    """A place as the padding has it: outside of the image it has no slope."""
    if padding == _ZEROS:
        return spot
    if padding == _REFLECTION:
        spot = _reflect(spot, 0, size - 1) if align_corners else _reflect(spot, -0.5, size)
    inside = (spot > 0) & (spot < size - 1)
    return torch.where(inside, spot, torch.where(spot > 0, float(size - 1), 0.0).to(spot.dtype))


def _reflect(spot: Tensor, low: float, span: float) -> Tensor:
    """A place reflected, as often as it takes, at ``low`` and at ``low + span``."""
    if span == 0:
        return torch.zeros_like(spot)
    distance = (spot - low).abs()
    turns = torch.floor(distance.detach() / span)
    rest = distance - turns * span
    return torch.where(turns - 2 * torch.floor(turns / 2) == 0, rest + low, span - rest + low)


def _read(x: Tensor, places: Sequence[Tensor]) -> Tensor:
    """``x [n, c, *sizes]`` at whole numbers ``[n, *places]``; zero outside of the image."""
    inside = torch.ones_like(places[0], dtype=torch.bool)
    flat = torch.zeros_like(places[0], dtype=torch.int64)
    for place, size in zip(places, x.shape[2:], strict=True):
        # A place that is no number is outside, too.
        inside = inside & (place >= 0) & (place <= size - 1)
        whole = torch.where((place >= 0) & (place <= size - 1), place, 0.0).to(torch.int64)
        flat = flat * size + whole
    batch, channels = x.shape[:2]
    index = flat.reshape(batch, 1, -1).expand(batch, channels, -1)
    values = x.flatten(2).gather(2, index).reshape(batch, channels, *flat.shape[1:])
    return torch.where(inside.unsqueeze(1), values, 0.0)


ENTRIES = (
    *(
        Decomposition(op, grid_sampler, "torch-mlir lowers some modes and paddings, in two dimensions")
        for op in (aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
    ),
    *(
        Decomposition(op, grid_sampler_backward, NO_LOWERING)
        for op in (aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
    ),
)


# -- Derivatives ------------------------------------------------------------------------------------------------------

# Backward ops as the derivatives of what their forward ops decompose to.


def pull_back(function: Callable[..., Tensor], primals: Sequence[Tensor], tangent: Tensor) -> tuple[Tensor, ...]:
    """The gradients of ``primals`` that ``tangent``, that of ``function(*primals)``, gives: of each its shape, zeros
    where nothing depends on it. PyTorch differentiates ``function`` while the ops of both are traced."""
    # In a decomposition the tracer is at work and autograd has been left behind.
    with torch.overrides.enable_reentrant_dispatch(), torch.enable_grad():
        leaves = [p.detach().requires_grad_() for p in primals]
        found = torch.autograd.grad(function(*leaves), leaves, tangent.detach(), allow_unused=True)
    return tuple(torch.zeros_like(p) if g is None else g.detach() for p, g in zip(primals, found, strict=True))
