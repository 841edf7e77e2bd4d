# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``x[i]`` by a tensor of no axes, such as ``scores[scores.argmax()]``, for which PyTorch asks what is in ``i``.

In eager it is a view of ``x``. Here it is a copy, which is the same unless one of both is written to afterwards: then
the trace is refused.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

from retrograd.frontend.python.source_locations import CaptureError, place_of_caller

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


class SinglePlaces:
    """The copies that were made in one trace, each with the versions of both then, and the line."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, int, Tensor, int, str]] = []

    def select(self, x: Any, key: Any) -> Any:
        """``x[key]`` by integers in tensors of no axes among numbers, slices and new axes; ``NotImplemented`` for other
        keys."""
        keys = key if isinstance(key, tuple) else (key,)
        if not isinstance(x, Tensor) or not any(map(_is_place, keys)) or not all(map(_is_simple, keys)):
            return NotImplemented
        whole: list[Any] = [slice(None) if _is_place(part) else part for part in keys]
        taken = x[tuple(whole)]
        copied = taken
        for axis, place in reversed(_find_axes(keys, x.dim())):
            before: list[Any] = [slice(None)] * axis
            copied = copied[(*before, place.reshape(1))].squeeze(axis)
        self._copies.append((x, x._version, copied, copied._version, place_of_caller()))
        return copied

    def check(self) -> None:
        """Raise :class:`CaptureError` if one of both was written to."""
        for x, version, copied, copy_version, place in self._copies:
            if (x._version, copied._version) != (version, copy_version):
                raise CaptureError(
                    f"data-dependent control flow: x[i] by an i of no axis{place} is a view of x, and one of both is "
                    "written to in place",
                    "write x[i[None]][0] where a copy is meant; to write to x, use x[i[None]] = y[None]",
                )


def _is_place(part: Any) -> TypeGuard[Tensor]:
    return isinstance(part, Tensor) and not part.dim() and part.dtype in _INTEGERS


def _is_simple(part: Any) -> bool:
    plain = isinstance(part, int | slice) and not isinstance(part, bool)
    return part is None or part is Ellipsis or plain or _is_place(part)


def _find_axes(keys: tuple[Any, ...], dims: int) -> list[tuple[int, Tensor]]:
    """Where in the result, were they slices, the places of ``keys`` stand, and these."""
    consuming = sum(part is not None and part is not Ellipsis for part in keys)
    found, axis = [], 0
    for part in keys:
        if _is_place(part):
            found.append((axis, part))
        if part is Ellipsis:
            axis += dims - consuming
        elif not isinstance(part, int):
            axis += 1
    return found
