# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tensors that are of the form of those of an earlier call, which were looked at one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._C._dynamo import guards

# Those that are of another form each time are looked at one by one.
_MOST_FORMS = 8


class _Forms(NamedTuple):
    """Guards of the tensors in ``places`` among ``number``; others are ``repeated``, with their first places."""

    guards: Any
    number: int
    places: tuple[int, ...]
    repeated: tuple[tuple[int, int], ...]
    note: tuple[int, ...]


def guard_forms(tensors: Sequence[torch.Tensor]) -> guards.TensorGuards:
    """Dynamo's guards, which let tensors of the forms of these through."""
    # A list for each tensor, which PyTorch's stub says otherwise.
    sizes: Any = [list(tensor.shape) for tensor in tensors]
    strides: Any = [list(tensor.stride()) for tensor in tensors]
    return guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


class KnownForms:
    """Knows the forms of tensors that were found right: type in Python, dtype, device, sizes, strides, whether it
    requires grad, and whether it is a view that is read with other signs, zeros without memory, or a transform's; and
    what the caller noted of them.

    Dynamo's guards compare all tensors in one call of C++, 0.05 us for each, a tenth of what Python takes to ask for
    half of it. No tensor is kept. Where a tensor lies is for the caller to look at.
    """

    __slots__ = ("_known", "_left")

    def __init__(self) -> None:
        # In one piece, for the sake of other threads.
        self._known: _Forms | None = None
        self._left = _MOST_FORMS

    def find(self, tensors: Sequence[Any]) -> tuple[int, ...] | None:
        """Returns the note on tensors of these forms, one of which stands in two places where that was so before; None
        of others than were learned last."""
        known = self._known
        if known is None or len(tensors) != known.number:
            return None
        if known.repeated:
            if any(tensors[place] is not tensors[first] for place, first in known.repeated):
                return None
            tensors = [tensors[place] for place in known.places]
        return known.note if known.guards.check(*tensors) else None

    def learn(self, tensors: Sequence[Any], note: tuple[int, ...] = ()) -> None:
        """Know these from now on, which the caller found right, and no others; not again and again."""
        if not (self._left and tensors) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            return
        self._left -= 1
        firsts: dict[int, int] = {}
        repeated = []
        for place, tensor in enumerate(tensors):
            first = firsts.setdefault(id(tensor), place)
            if first != place:
                repeated.append((place, first))
        places = (*firsts.values(),)
        kept = [tensors[place] for place in places]
        self._known = _Forms(guard_forms(kept), len(tensors), places, tuple(repeated), note)
