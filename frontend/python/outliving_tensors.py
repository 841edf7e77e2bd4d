# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Finds tensors of a trace that a model has put where they outlive it: into a dict that a hook closes over, a global
list, an attribute of an object that is no module.

A compiled program puts nothing there: what the user reads afterwards would be a tensor of the trace, or nothing. What
is put into attributes of modules :mod:`side_effects` sees and takes back; all else shows in that it is still alive.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from retrograd.frontend.python.source_locations import CaptureError, format_frame

_REMEDY = (
    "return the tensor; if it is a cache that is filled once, call the model once before compiling it; or use "
    'torch.compile(model, backend="retrograd") or retrograd.enable(), under which the model keeps it'
)
# How deep in containers a cache of functools holds a tensor.
_DEPTH = 5


class MadeTensors:
    """The tensors that a model makes while it is traced, for as long as they are alive, each with the line."""

    def __init__(self) -> None:
        self._made: list[tuple[weakref.ref[FunctionalTensor], str]] = []

    def note(self, result: Any, frame: FrameType | None) -> None:
        """Note what a function called at ``frame`` of the model's code returned."""
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, FunctionalTensor)]
        if tensors:
            place = "" if frame is None else f", computed at {format_frame(frame)}"
            self._made += [(weakref.ref(tensor), place) for tensor in tensors]

    def refuse_kept(self) -> None:
        """Refuse a model that has kept one of them, once the trace is over; takes them out of dicts and lists.

        Raises:
            CaptureError: it has; names the line that computed it, and what it is in.
        """
        if not self._alive():
            return
        # What is alive only because objects hold each other in a ring is not kept.
        gc.collect()
        kept = self._alive()
        # Others are alive because gradients of these need them.
        held = [(tensor, place, holder) for tensor, place in kept for holder in _take_out(tensor)]
        if kept:
            raise _kept_error(*(held or [(*kept[0], "in an object")])[0])

    def refuse_cached(self) -> None:
        """Refuse a model that keeps one of them in a cache, from which the next trace takes it: called where that has
        failed. Clears the cache.

        Raises:
            CaptureError: it does.
        """
        kept = self._alive()
        for holder in _clear_caches([tensor for tensor, _ in kept]):
            raise _kept_error(*kept[0], holder)

    def _alive(self) -> list[tuple[FunctionalTensor, str]]:
        return [(tensor, place) for reference, place in self._made if (tensor := reference()) is not None]


def _kept_error(tensor: FunctionalTensor, place: str, holder: str) -> CaptureError:
    return CaptureError(
        f"the model keeps a tensor {holder}, of shape {tuple(tensor.shape)}, where a compiled program puts none{place}",
        _REMEDY,
    )


def _take_out(tensor: FunctionalTensor) -> Iterator[str]:
    """Take a tensor of a trace out of what holds it; gives in words what that is."""
    yield from _clear_caches([tensor])
    for holder in gc.get_referrers(tensor):
        found = _take_one_out(holder, tensor)
        if found is not None:
            yield found


def _take_one_out(holder: Any, tensor: FunctionalTensor) -> str | None:
    if isinstance(holder, list):
        holder[:] = [item for item in holder if item is not tensor]
        return "in a list"
    if not isinstance(holder, dict):
        return None
    names = [name for name, value in holder.items() if value is tensor]
    owners = gc.get_referrers(holder)
    kinds = [owner for owner in owners if isinstance(owner, type) and any(vars(owner).get(n) is tensor for n in names)]
    # Attributes and globals are read by code that does not ask whether they are there.
    is_namespace = "__name__" in holder or any(getattr(owner, "__dict__", None) is holder for owner in owners)
    for name in names:
        if kinds:
            # Around its dict, of which Python keeps a cache.
            setattr(kinds[0], name, None)
        elif is_namespace:
            holder[name] = None
        else:
            del holder[name]
    return f"as {names[0]!r} in {'attributes or globals' if kinds or is_namespace else 'a dict'}" if names else None


def _clear_caches(tensors: list[FunctionalTensor]) -> Iterator[str]:
    """Clear the caches of :func:`functools.lru_cache` that hold one of ``tensors``; gives in words what they are."""
    known = {id(tensor) for tensor in tensors}
    for cache in [o for o in gc.get_objects() if isinstance(o, functools._lru_cache_wrapper)]:
        within, seen = [cache], {id(cache)}
        for _ in range(_DEPTH):
            parts = {id(part): part for outer in within for part in gc.get_referents(outer) if _may_lead_on(part)}
            within = [part for key, part in parts.items() if key not in seen]
            seen |= parts.keys()
            if any(id(part) in known for part in within):
                cache.cache_clear()
                yield f"in the cache of {cache.__wrapped__.__qualname__}()"
                break


def _may_lead_on(part: Any) -> bool:
    return isinstance(part, dict | list | tuple | torch.Tensor) or type(part).__name__ == "_lru_list_elem"
