# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which results of a graph hang on memory that no op has written, and may be anything."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from retrograd.frontend.autograd.engine.family_lock import SETTINGS
from retrograd.frontend.preparation.empty_tensors import gives_unwritten, leaves_unwritten

# Of a small tensor so many blocks are zeroed, of all that are zeroed so many bytes.
_MOST_COPIES = 1024
_MOST_CLEARED = 1 << 22
# How often an op is run again at the most, until no fill is left of its results.
_MORE_RUNS = 3


def find_unset(run: Callable[[], Sequence[Any]], eager: Sequence[Any]) -> list[Tensor | None]:
    """Where the results of ``run``, once ``eager``, hang on memory that no op has written; ``None`` for results that do
    not.

    They are NaN where memory is filled with NaN when it is allocated, and are not where it is filled with zeros;
    whole numbers are the largest there are, and zero. What memory held in ``eager`` is not asked, which may be NaN.
    """
    with filled_memory():
        filled = run()
    suspects = [_find_filled(value, e) for value, e in zip(filled, eager, strict=True)]
    if all(mask is None for mask in suspects):
        return suspects
    with _ZerosInMemory():
        cleared = run()
    masks = [None if mask is None else mask & ~_is_fill(value) for mask, value in zip(suspects, cleared, strict=True)]
    return [mask if mask is not None and mask.any() else None for mask in masks]


def _find_filled(value: Any, eager: Any) -> Tensor | None:
    if not isinstance(value, Tensor) or not isinstance(eager, Tensor):
        return None
    mask = _is_fill(value)
    return mask if mask.any() else None


def _is_fill(value: Tensor) -> Tensor:
    """Where a tensor holds what memory is filled with; truth values have nothing that tells."""
    if value.dtype is torch.bool:
        return torch.zeros_like(value)
    if value.is_floating_point() or value.is_complex():
        return value.isnan()
    return value == torch.iinfo(value.dtype).max


@contextlib.contextmanager
def filled_memory() -> Iterator[None]:
    """While this is open, PyTorch fills memory that it allocates: with NaN, and of whole numbers with the largest."""
    with SETTINGS, warnings.catch_warnings(), _deterministic():
        # Of ops that know no other order.
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    memory: Any = torch.utils.deterministic
    filled, deterministic = memory.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warns_only)
        memory.fill_uninitialized_memory = filled


class _ZerosInMemory(TorchDispatchMode):
    """Has ops that give memory as it was allocated give zeros there.

    What the kernel of an op leaves of its result is found by filling memory while it runs, and then running it once
    more, in memory that was zero when it was given back: what is a fill in the one run only was not written.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if gives_unwritten(func):
            return tree_map(lambda t: t.zero_() if isinstance(t, Tensor) else t, func(*args, **kwargs))
        if not leaves_unwritten(func) or func._schema.is_mutable:
            return func(*args, **kwargs)
        with filled_memory():
            filled = func(*args, **kwargs)
        run = partial(_run_in_zeros, lambda: func(*args, **kwargs), filled)
        found = run()
        found = tree_map(_clear_unwritten, found, filled, found)
        for _ in range(_MORE_RUNS):
            if not any(_is_fill(t).any() for t in tree_leaves(found) if isinstance(t, Tensor)):
                break
            # Computed so, or a block was given that is none of those zeroed, and held it: another one is asked for.
            found = tree_map(_clear_unwritten, found, filled, run())
        return found


def _run_in_zeros(run: Callable[[], Any], like: Any) -> Any:
    """The results of an op, like these, in memory that was zero when it was given back, most likely."""
    cleared = [torch.zeros_like(t) for t in tree_leaves(like) if isinstance(t, Tensor) for _ in range(_copies_of(t))]
    del cleared
    return run()


def _copies_of(tensor: Tensor) -> int:
    """How many blocks of memory of a tensor's size are zeroed, so that the next one is of these."""
    return max(1, min(_MOST_COPIES, _MOST_CLEARED // max(1, tensor.nbytes)))


def _clear_unwritten(value: Any, filled: Any, again: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.masked_fill(_is_fill(filled) & ~_is_fill(again), 0)
