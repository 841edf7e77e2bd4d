# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Finds the attributes that a model sets to numbers, texts and other plain values, without tensors."""

from __future__ import annotations

import contextlib
import dis
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from retrograd.frontend.python.python_contents import is_same_value

# Exactly: what derives from these may be of a trace, as a symbol for a size, or a number that each call draws.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_TREES = (tuple, list, dict, torch.Size, None)
_STORE = dis.opmap["STORE_ATTR"]

Stores = set[tuple[int, str]]
"""Attributes that statements set, by the identity of their module, and name."""


@contextlib.contextmanager
def noting_stores() -> Iterator[Stores]:
    """Give the attributes of modules that are set while this is open by statements (``self.size = n``). What is set by
    ``setattr()`` is none of them: code that puts back what was there sets so what no other code names."""
    found: Stores = set()
    untouched = torch.nn.Module.__setattr__

    def note(self: torch.nn.Module, name: str, value: Any) -> None:
        frame = sys._getframe(1)
        if frame.f_code.co_code[frame.f_lasti] == _STORE:
            found.add((id(self), name))
        untouched(self, name, value)

    with mock.patch.object(torch.nn.Module, "__setattr__", note):
        yield found


def is_set_plain(value: Any, before: Any, is_stored: bool) -> bool:
    """Whether an attribute was set to a plain value, or to a tuple, list or dict of such: it is another object than
    before, or a statement set it to the same that no one can write to."""
    if value is before and not (is_stored and _is_fixed(value)):
        return False
    leaves, spec = pytree.tree_flatten(value)
    return all(_is_plain(leaf) for leaf in leaves) and _is_written(spec)


def has_symbols(value: Any) -> bool:
    """Whether sizes that are symbols are in a value."""
    return any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in pytree.tree_leaves(value))


def is_settled(value: Any, others: list[Any]) -> bool:
    """Whether other runs have set the same."""
    return all(is_same_value(value, other) for other in others)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN


def _is_fixed(value: Any) -> bool:
    return all(map(_is_fixed, value)) if type(value) in (tuple, torch.Size) else _is_plain(value)


def _is_written(spec: pytree.TreeSpec) -> bool:
    """Whether a tree can be put together again from its text."""
    return spec.type in _TREES and all(map(_is_written, spec.children()))
