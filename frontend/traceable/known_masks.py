# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Masks that depend on no argument, such as ``~torch.eye(n, dtype=torch.bool)``: their contents are known in a trace.

What makes a tensor of sizes and numbers, and what is computed of such tensors alone, is computed twice: in the trace,
and beside it on the CPU. ``x[mask]`` of a known mask is then ``x[rows, columns]`` with numbers, of a known size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

_MOST_ELEMENTS = 1 << 20
_MAKE = frozenset(("arange", "eye", "full", "ones", "zeros"))
# Of their tensor only the shape and the type count.
_MAKE_LIKE = frozenset(("full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"))
_COMPUTE_NAMES = """
    __add__ __and__ __eq__ __floordiv__ __ge__ __getitem__ __gt__ __invert__ __le__ __lt__ __mod__ __mul__ __ne__ __or__
    __rsub__ __sub__ __xor__ add bitwise_and bitwise_not bitwise_or bitwise_xor block_diag bool cat clone concat
    contiguous detach diag eq expand flip float floor_divide ge gt int kron le logical_and logical_not logical_or
    logical_xor long lt mul ne remainder repeat repeat_interleave reshape roll stack sub t to transpose tril triu
    unsqueeze view
"""
_COMPUTE = frozenset(_COMPUTE_NAMES.split())
# In place, on a tensor that is known.
_WRITE = frozenset(("fill_diagonal_",))
_ALL = _MAKE | _MAKE_LIKE | _COMPUTE | _WRITE


# Arguments of a call, by place and by name.
Known = tuple[tuple[Any, ...], dict[str, Any]]
# On a tensor of the trace.
_NOTE = "_retrograd_contents"


@dataclass(frozen=True)
class _Note:
    """The contents of a tensor, the version that it had then, and one list for each tensor that it was made from and
    may share memory with, itself among them: emptied where writes to one are no longer counted."""

    contents: Tensor
    version: int
    counted: tuple[list[bool], ...]


def forget(x: Any) -> Any:
    """``x.data``, through which writes are not counted: what shares memory with it is not known from here on. Gives
    ``NotImplemented``: it is read as ever."""
    note: _Note | None = getattr(x, _NOTE, None)
    for counted in () if note is None else note.counted:
        counted.clear()
    return NotImplemented


def contents_of(tensor: Any) -> Tensor | None:
    """Return the contents of a tensor of a trace, on the CPU; ``None`` where they are not known, or were written to
    since."""
    if not isinstance(tensor, Tensor):
        return None
    note: _Note | None = getattr(tensor, _NOTE, None)
    return note.contents if note is not None and all(note.counted) and note.version == tensor._version else None


def read_arguments(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Known | None:
    """The arguments of a call in a trace with contents in the place of tensors, before it may write to them; ``None``
    where what it gives cannot be known."""
    name = getattr(func, "__name__", "")
    return _known_arguments(name, args, kwargs) if name in _ALL else None


def note_contents(func: Callable[..., Any], arguments: Any, given: Known, result: Any) -> None:
    """Work out what is in ``result``, which ``func`` gave for ``arguments``, whose contents are in
    ``given``."""
    if not isinstance(result, Tensor) or result.numel() > _MOST_ELEMENTS:
        return
    plain_args, plain_kwargs = given
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        if func.__name__ in _WRITE:
            plain_args = (plain_args[0].clone(), *plain_args[1:])
        found = func(*plain_args, **plain_kwargs)
    if isinstance(found, Tensor) and found.shape == result.shape and found.dtype == result.dtype:
        notes = (getattr(leaf, _NOTE, None) for leaf in pytree.tree_leaves(arguments))
        counted = tuple({id(one): one for note in notes if note is not None for one in note.counted}.values())
        setattr(result, _NOTE, _Note(found, result._version, counted or ([True],)))


def _known_arguments(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Known | None:
    """The arguments with contents in the place of tensors; ``None`` where those are not known, or a size is open."""
    leaves, tree = pytree.tree_flatten((tuple(args), {k: v for k, v in kwargs.items() if k != "out"}))
    if kwargs.get("out") is not None:
        return None
    plain: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            # Sizes may be given as tensors, too, whose contents count.
            like = name in _MAKE_LIKE and bool(args) and leaf is args[0]
            plain.append(_make_like(leaf) if like else contents_of(leaf))
        elif isinstance(leaf, torch.device):
            plain.append(torch.device("cpu"))
        else:
            plain.append(leaf)
    if any(leaf is None and isinstance(given, Tensor) for leaf, given in zip(plain, leaves, strict=True)):
        return None
    if any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in plain):
        return None
    positional, named = pytree.tree_unflatten(plain, tree)
    if named.get("device") is not None:
        named["device"] = "cpu"
    return positional, named


def _make_like(tensor: Tensor) -> Tensor | None:
    """A tensor of the same shape and type, with anything in it."""
    if not all(isinstance(size, int) for size in tensor.shape) or tensor.numel() > _MOST_ELEMENTS:
        return None
    with _disable_current_modes():
        return torch.empty([int(size) for size in tensor.shape], dtype=tensor.dtype, device="cpu")


def places_of(mask: Tensor) -> tuple[list[int], ...] | None:
    """Where a mask is set, a list for each axis; ``None`` where that is not known."""
    contents = contents_of(mask)
    if contents is None:
        return None
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return tuple(axis.tolist() for axis in contents.nonzero(as_tuple=True))
