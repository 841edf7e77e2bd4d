# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Frees what pack hooks returned after its last use.

PyTorch hands it to a captured backward in a tuple, which its C++ code keeps until the end. A tensor that nobody but
this tuple knows can be emptied there, with its memory in a tensor of ours.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from retrograd.frontend.autograd.engine.python_calls import Frame


@dataclass(frozen=True)
class PackedLeaf:
    """Finds a tensor, by number, in what a pack hook gave."""

    index: int
    leaf: int

    def __call__(self, frame: Frame) -> torch.Tensor:
        value = frame.packed[self.index]
        found: torch.Tensor = value if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)[self.leaf]
        return found


def take_packed(packed: Sequence[Any], numbers: Container[int]) -> list[Any]:
    """The packed values, of which those in ``numbers`` are not looked at again where they are: their tensors have the
    same memory, and what they were is left empty, unless somebody else has it too."""
    return [_take(packed, n) if n in numbers else packed[n] for n in range(len(packed))]


def _take(holder: Any, place: Any) -> Any:
    # References of the holder's and of the call of getrefcount.
    if sys.getrefcount(holder[place]) > 2:
        return holder[place]
    value = holder[place]
    if type(value) in (tuple, list):
        return type(value)([_take(value, n) for n in range(len(value))])
    if type(value) is not torch.Tensor or not _is_plain(value):
        return value
    nothing = torch.empty(0, dtype=value.dtype, device=value.device)
    taken = torch.empty_like(nothing)
    taken.set_(value.untyped_storage(), value.storage_offset(), value.size(), value.stride())
    value.set_(nothing.untyped_storage())
    return taken


def _is_plain(tensor: Any) -> bool:
    """Whether nothing in C++, such as a saved tensor, and no weak reference knows a tensor, and it holds its values."""
    known = tensor._use_count() > 1 or weakref.getweakrefcount(tensor) > 0
    is_dense = tensor.layout is torch.strided and not tensor.requires_grad
    return is_dense and not known
