# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Finds what of the user's program holds an object: who holds it, who holds that, and so on, up to something that
outlives the call.

Only a chain that ends in the user's own counts: in the model, the globals of one of the user's modules, a class of the
user's, or a variable of a function that is under way. Whatever else happens to hold an object ends no chain: what
PyTorch keeps for a backward, a ring that awaits the collector, the traceback of an exception, a generator, a log.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import inspect
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from retrograd.frontend.doors.unregistered_objects import attribute_names
from retrograd.frontend.python.live_objects import find_alive
from retrograd.frontend.python.side_effects import KEPT_REMEDY
from retrograd.frontend.python.source_locations import CaptureError

# How many objects, one inside of the other, a chain may have, and how many holders are followed at a time. For each of
# the former all objects of the process are read (30 ms with transformers imported), and compared with the latter.
_DEPTH, _WIDTH = 16, 512
_CACHE = functools._lru_cache_wrapper
_LEAD_ON = (
    *(dict, list, tuple, set, frozenset, deque),
    *(types.CellType, types.FunctionType, types.MethodType, functools.partial, _CACHE),
)
# Packages whose classes, globals and functions are nobody's: PyTorch's and ours, and what looks on from outside.
_NOBODYS = frozenset(
    (
        *("torch", "functorch", "torch_mlir", "retrograd", "builtins", "contextlib"),
        *("_pytest", "pytest", "pluggy", "IPython", "ipykernel", "debugpy", "pydevd", "_pydevd_bundle", "bdb", "pdb"),
        *("logging", "warnings", "traceback", "cProfile", "profile", "trace", "tracemalloc"),
    )
)


@dataclass(frozen=True)
class Holding:
    """How an object is held: ``chain`` begins with the object, and each that follows holds the one before; the last
    is of the user's program and outlives the call."""

    chain: tuple[Any, ...]

    def describe(self) -> str:
        """The nearest holder that has a name or a kind worth saying, in words: ``as 'layer' in a dict``."""
        texts = (_describe(*links) for links in self._links())
        return next((text for text in texts if text is not None), "in a variable of the context")

    def take_out(self) -> None:
        """Take the object, or the holder it is in, out of the first holder in the chain that can be changed."""
        for held, holder, above in self._links():
            # Another chain may have the same beginning.
            is_in = _names(held, holder) or any(part is held for part in gc.get_referents(holder))
            if not is_in or _take_out(held, holder, above):
                return

    def _links(self) -> Iterator[tuple[Any, Any, Any]]:
        """Each object, its holder, and the holder of that, if any."""
        return zip(self.chain, self.chain[1:], (*self.chain[2:], None), strict=False)


class _Own(list[Any]):
    """A list of the search itself, which is not to be taken for a holder."""


def find_holdings(objects: Sequence[Any], model: Sequence[Any]) -> list[Holding]:
    """How those of ``objects`` are held that the user's program holds, the shortest chains first. ``model`` has the
    modules and functions that belong to the program that is traced."""
    with _thawed():
        return _search(_Own(objects), _Roots(model))


@contextlib.contextmanager
def _thawed() -> Iterator[None]:
    """While this is open, the collector sees what a program has hidden from it by ``gc.freeze()``."""
    if not gc.get_freeze_count():
        yield
        return
    gc.unfreeze()
    try:
        yield
    finally:
        # What is garbage by now would never be collected.
        gc.collect(1)
        gc.freeze()


def _search(level: _Own, roots: _Roots) -> list[Holding]:
    # Each object that was met, and those that it holds of them, by its identity.
    held: dict[int, _Own] = {id(start): _Own() for start in level}
    known = _Own(level)
    ends = _Own(start for start in level if id(start) in roots.in_context)
    for _ in range(_DEPTH):
        above = _Own(o for o in gc.get_referrers(*level) if type(o) is not _Own and o is not held)
        above += [roots.locals[id(part)] for part in level if id(part) in roots.locals]
        within, level = {id(part) for part in level}, _Own()
        for holder in above:
            parts = _Own(part for part in roots.parts(holder) if id(part) in within)
            is_root = roots.has(holder)
            if id(holder) in held:
                held[id(holder)] += parts
            elif is_root or _leads_on(holder):
                held[id(holder)] = parts
                known.append(holder)
                (ends if is_root else level).append(holder)
        if not level or len(level) > _WIDTH:
            break
    return sorted((Holding(chain) for end in ends for chain in _chains(end, held)), key=lambda found: len(found.chain))


def _chains(end: Any, held: dict[int, _Own]) -> Iterator[tuple[Any, ...]]:
    """The chains from each of the objects that were looked for to ``end``."""
    seen = {id(end)}
    waiting: list[tuple[Any, ...]] = [(end,)]
    while waiting:
        chain = waiting.pop()
        parts = held[id(chain[0])]
        if not parts:
            yield chain
        for part in parts:
            if id(part) not in seen:
                seen.add(id(part))
                waiting.append((part, *chain))


def _leads_on(holder: Any) -> bool:
    """Whether who holds ``holder`` holds what is in it."""
    kind = type(holder)
    if issubclass(kind, (torch.Tensor, type, types.ModuleType, BaseException)):
        return False
    if issubclass(kind, torch.nn.Module) and kind.__module__.startswith("torch.nn."):
        return True
    return issubclass(kind, _LEAD_ON) or not _is_nobodys(kind.__module__)


def _is_nobodys(module: Any) -> bool:
    return not isinstance(module, str) or module.partition(".")[0] in _NOBODYS


def _is_users(module: Any) -> bool:
    return not _is_nobodys(module) and module.partition(".")[0] not in sys.stdlib_module_names


class _Roots:
    """The objects that the user's program holds for longer than a call: the model, and functions that are traced; the
    globals of modules; classes; variables of functions that are under way, and of the context."""

    def __init__(self, model: Sequence[Any]) -> None:
        modules = {name: module for name, module in sys.modules.items() if isinstance(module, types.ModuleType)}
        self._namespaces = {id(vars(module)) for name, module in modules.items() if _is_users(name)}
        self._variables: set[int] = set()
        self._model = {id(part) for part in model}
        self.in_context = {id(value) for value in contextvars.copy_context().values()}
        # Each threading.local, by the identity of the dict that it has for this thread, which shows no holder.
        self.locals = {id(vars(o)): o for o in find_alive(threading.local) if type(o) is threading.local}
        self._read_frames()

    def _read_frames(self) -> None:
        frame: types.FrameType | None = sys._getframe()
        while frame is not None:
            if not _is_nobodys(frame.f_globals.get("__name__")):
                variables = frame.f_locals
                self._namespaces.add(id(frame.f_globals))
                if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                    self._namespaces.add(id(variables))
                else:
                    self._variables |= {id(value) for value in variables.values()}
                    # A copy, which would keep alive what is in it until the function returns; unless the function has
                    # asked for it, it is held here, by the frame and by the call of getrefcount.
                    if sys.getrefcount(variables) == 3:
                        variables.clear()
            frame = frame.f_back

    def has(self, holder: Any) -> bool:
        """Whether it is one of those."""
        kind = type(holder)
        if id(holder) in self._model or id(holder) in self._namespaces:
            return True
        if issubclass(kind, type):
            return _is_users(holder.__module__)
        if kind is types.CellType:
            return id(holder.cell_contents) in self._variables
        return id(holder) in self._variables | self.in_context and _leads_on(holder)

    def parts(self, holder: Any) -> list[Any]:
        """The objects that an object holds."""
        return [vars(holder)] if type(holder) is threading.local else gc.get_referents(holder)


def _names(held: Any, holder: Any) -> list[Any]:
    """The keys of a dict, or names of attributes, by which ``holder`` holds it."""
    if isinstance(holder, dict):
        return [name for name, value in holder.items() if value is held]
    if isinstance(holder, _LEAD_ON):
        return []
    return [name for name in attribute_names(holder) if getattr(holder, name) is held]


def _describe(held: Any, holder: Any, above: Any) -> str | None:
    if isinstance(holder, dict):
        names = _names(held, holder)
        kind = "attributes or globals" if _is_namespace(holder, above) else "a dict"
        return f"as {names[0]!r} in {kind}" if names else None
    if type(holder) is _CACHE:
        return f"in the cache of {holder.__wrapped__.__qualname__}()"
    if isinstance(holder, types.CellType):
        return "in a variable of a closure"
    if isinstance(holder, tuple) or issubclass(type(holder), (types.FunctionType, types.MethodType, functools.partial)):
        return None
    names = _names(held, holder)
    return f"as {names[0]!r} in attributes or globals" if names else f"in a {type(holder).__name__}"


def _is_namespace(holder: dict[Any, Any], above: Any) -> bool:
    """Whether code reads what is in this dict by name, and does not ask whether it is there."""
    return "__name__" in holder or isinstance(above, type) or getattr(above, "__dict__", None) is holder


def _take_out(held: Any, holder: Any, above: Any) -> bool:
    """Take ``held`` out of its holder; returns whether that could be done."""
    if isinstance(holder, dict):
        return _take_out_of_dict(held, holder, above)
    if isinstance(holder, list):
        holder[:] = [item for item in holder if item is not held]
    elif isinstance(holder, deque):
        kept = [item for item in holder if item is not held]
        holder.clear()
        holder.extend(kept)
    elif isinstance(holder, set):
        holder.discard(held)
    elif isinstance(holder, types.CellType):
        holder.cell_contents = None
    elif type(holder) is _CACHE:
        holder.cache_clear()
    else:
        names = _names(held, holder)
        for name in names:
            setattr(holder, name, None)
        return bool(names)
    return True


def _take_out_of_dict(held: Any, holder: dict[Any, Any], above: Any) -> bool:
    names = _names(held, holder)
    for name in names:
        if isinstance(above, type):
            # Around its dict, of which Python keeps a cache.
            setattr(above, name, None)
        elif _is_namespace(holder, above):
            holder[name] = None
        else:
            del holder[name]
    return bool(names)


class MadeTensors:
    """The tensors that a model is given and makes while it is traced, for as long as they are alive, each with the
    line."""

    def __init__(self) -> None:
        self._made: list[tuple[weakref.ref[torch.Tensor], str]] = []
        # What the tensors of a trace are; a forward that is only recorded has none of these.
        self.kind: type[torch.Tensor] = FunctionalTensor

    def note(self, result: Any, line: str | None) -> None:
        """Note what a function returned that a line of the model's code called."""
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, self.kind)]
        if tensors:
            place = "" if line is None else f", computed at {line}"
            self._made += [(weakref.ref(tensor), place) for tensor in tensors]

    def note_of_backward(self) -> None:
        """Note the tensors of the trace that are alive, among which are those that a hook on autograd's graph was
        given or made."""
        known = {id(reference()) for reference, _ in self._made}
        alive = [each for each in find_alive(self.kind) if type(each) is self.kind and id(each) not in known]
        self._made += [(weakref.ref(tensor), ", computed in the backward") for tensor in alive]

    def place_of(self, tensor: torch.Tensor) -> str:
        """``, computed at`` the line that computed a tensor; empty where that is not known."""
        return next((place for reference, place in reversed(self._made) if reference() is tensor), "")

    def take_out_kept(self, model: Sequence[Any]) -> CaptureError | None:
        """Once the trace is over or has failed, take those that the user's program still holds out of what holds them;
        returns the error that names the line that computed one, and what it was in. ``model`` has the modules and
        functions that were traced."""
        alive = [tensor for reference, _ in self._made if (tensor := reference()) is not None]
        found = find_holdings(alive, model) if alive else []
        if not found:
            self._made.clear()
            return None
        tensor, holder = found[0].chain[0], found[0].describe()
        for holding in found:
            holding.take_out()
        return CaptureError(
            f"the model keeps a tensor {holder}, of shape {tuple(tensor.shape)}, where a compiled program puts none"
            f"{self.place_of(tensor)}",
            KEPT_REMEDY,
        )
