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
import types
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from retrograd.frontend.python.side_effects import KEPT_REMEDY
from retrograd.frontend.python.source_locations import CaptureError

# How deep in containers a cache of functools holds a tensor.
_DEPTH = 5
# The type of its entries.
_CACHED = "_lru_list_elem"
# A call that is under way, and what a backward needs.
_NOBODYS = (types.FrameType, torch.Tensor, torch.autograd.function.FunctionCtx)


class MadeTensors:
    """The tensors that a model makes while it is traced, for as long as they are alive, each with the line."""

    def __init__(self) -> None:
        self._made: list[tuple[weakref.ref[FunctionalTensor], str]] = []

    def note(self, result: Any, line: str | None) -> None:
        """Note what a function returned that a line of the model's code called."""
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, FunctionalTensor)]
        if tensors:
            place = "" if line is None else f", computed at {line}"
            self._made += [(weakref.ref(tensor), place) for tensor in tensors]

    def place_of(self, tensor: torch.Tensor) -> str:
        """``, computed at`` the line that computed a tensor; empty where that is not known."""
        return next((place for reference, place in reversed(self._made) if reference() is tensor), "")

    def refuse_kept(self) -> None:
        """Refuse a model that has kept one of them, once the trace is over; takes them out of dicts and lists.

        Raises:
            CaptureError: it has; names the line that computed it, and what it is in.
        """
        if not self._alive():
            self._made.clear()
            return
        # What is alive only because objects hold each other in a ring is not kept.
        gc.collect()
        found: list[tuple[FunctionalTensor, str, str]] = []
        for item in self._alive():
            # Without a holder in Python it is alive because the gradient of another needs it.
            holders = [
                text
                for holder in gc.get_referrers(item[0])
                if holder is not item
                if (text := _take_out(holder, item[0]))
            ]
            holders += _clear_caches([item[0]])
            found = found or [(*item, holder) for holder in holders]
        if found:
            raise _kept_error(*found[0])

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
        KEPT_REMEDY,
    )


def _take_out(holder: Any, tensor: FunctionalTensor) -> str | None:
    """Take a tensor of a trace out of what holds it, if that is a list or a dict; returns in words what it is, ``None``
    where it is nothing of the model's."""
    if _is_for_a_backward(holder):
        return None
    if isinstance(holder, dict):
        return _take_out_of_dict(holder, tensor)
    if isinstance(holder, list):
        holder[:] = [item for item in holder if item is not tensor]
    elif isinstance(holder, types.CellType):
        holder.cell_contents = None
        return "in a variable of a closure"
    elif isinstance(holder, _NOBODYS) or type(holder).__name__ == _CACHED:
        return None
    return f"in a {type(holder).__name__}"


def _is_for_a_backward(holder: Any) -> bool:
    """Whether it is a part of a context of an ``autograd.Function``, or what only the hook of a tensor closes over:
    these may hold themselves, in rings that Python does not find."""
    if isinstance(holder, types.CellType):
        closures = [closure for closure in gc.get_referrers(holder) if isinstance(closure, tuple)]
        functions = [f for closure in closures for f in gc.get_referrers(closure) if isinstance(f, types.FunctionType)]
        holders = [owner for f in functions for owner in gc.get_referrers(f) if owner is not functions]
        return all(isinstance(owner, OrderedDict | types.FrameType) for owner in holders)
    owners = gc.get_referrers(holder)
    owners += [outer for owner in owners if isinstance(owner, dict) for outer in gc.get_referrers(owner)]
    return any(isinstance(owner, torch.autograd.function.FunctionCtx) for owner in owners)


def _take_out_of_dict(holder: dict[Any, Any], tensor: FunctionalTensor) -> str | None:
    names = [name for name, value in holder.items() if value is tensor]
    if not names:
        return None
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
    return f"as {names[0]!r} in {'attributes or globals' if kinds or is_namespace else 'a dict'}"


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
    return isinstance(part, dict | list | tuple | torch.Tensor) or type(part).__name__ == _CACHED
