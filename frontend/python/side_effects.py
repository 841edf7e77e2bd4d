# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Undoes what a model does to itself while it is traced, and refuses what a compiled program would not do."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from retrograd.frontend.doors.unregistered_objects import objects_within, take_apart
from retrograd.frontend.python.python_contents import is_plain, is_same_value
from retrograd.frontend.python.python_places import PythonValues
from retrograd.frontend.python.python_tables import ABSENT, torchs_own
from retrograd.frontend.python.source_locations import CaptureError, is_plain_tensor

# The dicts of a module that hold what is known by name, and the modules in it.
TABLES = ("_parameters", "_buffers", "_modules")

WHERE_KEPT = 'torch.compile(model, backend="retrograd") or retrograd.enable(), under which the model'
KEPT_REMEDY = (
    "return the tensor; if it is a cache that is filled once, call the model once before compiling it; or use "
    f"{WHERE_KEPT} keeps it"
)


@contextlib.contextmanager
def restored(model: torch.nn.Module | None) -> Iterator[set[tuple[int, str]]]:
    """Give the attributes of every module back as they were before the block, and what is in the dicts, lists and sets
    that are attributes: hooks among them, which PyTorch keeps so. The block is given a set, which after it has the
    attributes that were other numbers or texts at its end, by the identity of their module, and name."""
    modules = [] if model is None else list(model.modules())
    before = [{name: dict(vars(module)[name]) for name in TABLES} | {"": dict(vars(module))} for module in modules]
    contents = [
        (id(module), name, _Contents(value), name in torchs_own(module))
        for module in modules
        for name, value in vars(module).items()
        if _is_container(value)
    ]
    changed: set[tuple[int, str]] = set()
    try:
        yield changed
    finally:
        for module, tables in zip(modules, before, strict=True):
            then, now = tables[""], vars(module)
            pairs = [(name, then.get(name, ABSENT), now.get(name, ABSENT)) for name in {*then, *now}]
            changed |= {
                (id(module), name) for name, a, b in pairs if (is_plain(a) or is_plain(b)) and not is_same_value(a, b)
            }
            for name in TABLES:
                _restore(vars(module)[name], tables[name])
            _restore(vars(module), tables[""])
        for owner, name, content, is_torchs in contents:
            if not is_torchs and content.holds_other_values():
                changed.add((owner, name))
            content.restore()


@contextlib.contextmanager
def unchanged(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Give what arguments that are no tensors hold, by their names, back as it was before the block.

    Raises:
        CaptureError: the block changed one, as a model does with a cache that it is given; names it.
    """
    watched = {name: _watch(value) for name, value in arguments.items() if not is_plain(value)}
    try:
        yield
        for name, contents in watched.items():
            if any(content.is_changed() for content in contents):
                kind = type(arguments[name]).__name__
                raise CaptureError(
                    f"the model changes its argument {name}, a {kind}, where a compiled program would not",
                    "leave it out (use_cache=False, say, of a cache), or return what it would hold; or use "
                    'torch.compile(model, backend="retrograd"), which changes it as eager does',
                )
    finally:
        for contents in watched.values():
            for content in contents:
                content.restore()


def _watch(value: Any) -> list[_Contents]:
    """Note the contents of an object's attributes, and of the objects that they lead to."""
    tables = [vars(part) for part in objects_within(value) if hasattr(part, "__dict__") and type(vars(part)) is dict]
    return [_Contents(table) for table in tables] + ([_Contents(value)] if _is_container(value) else [])


def refuse_hooks_of_all_modules() -> None:
    """Refuse hooks that run for all modules: the tracer's own modules would run them, too.

    Raises:
        CaptureError: there is one.
    """
    tables = (
        torch_module._global_forward_pre_hooks,
        torch_module._global_forward_hooks,
        torch_module._global_backward_pre_hooks,
        torch_module._global_backward_hooks,
    )
    if any(tables):
        raise CaptureError(
            "there is a hook for all modules, of torch.nn.modules.module.register_module_*_hook, which would run for "
            "the module that the tracer puts around the model",
            "register it on the modules that it is for, or remove it",
        )


def refuse_dispatch_modes() -> None:
    """Refuse modes that are to see each op: they see the trace's, and what they make of them is not in it. Those that
    traces are made by are none of these.

    Raises:
        CaptureError: one is open.
    """
    context = torch._guards.TracingContext.try_get()
    # That of a trace around this one is ours.
    own = None if context is None else context.fake_mode
    if modes := [mode for mode in _get_current_dispatch_mode_stack() if mode is not own]:
        names = ", ".join(type(mode).__name__ for mode in modes)
        raise CaptureError(
            f"{names} is open, which is to see each op, and compiled code has none",
            "compile outside of it, and call the model itself inside",
        )


def refuse_counting(
    model: torch.nn.Module | None,
    call: Callable[[], Any],
    python: PythonValues,
    put_back: Callable[[], None] = lambda: None,
    kept: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """Refuse a model that computes with what it changes itself, as by the number of its calls.

    It is run twice, the second time with what the first left in its attributes, and in the values of ``python``, but
    for what ``put_back`` puts back. ``kept`` gives what is to be the same after each, by the names of attributes.

    Raises:
        CaptureError: the second run calls other functions, or with other numbers; names the attributes.
    """
    modules = [] if model is None else list(model.modules())
    if any(isinstance(module, torch.nn.RNNBase) for module in modules):
        # A recurrent layer brings what it keeps of its parameters up to date where it finds others than last time.
        call()
        put_back()
    before = [dict(vars(module)) for module in modules]
    contents = [(n, _Contents(v)) for m in modules for n, v in vars(m).items() if _is_container(v) and n not in TABLES]
    trails, keeps = [], []
    for _ in range(2):
        with OpTrail() as trail:
            result = call()
        trails.append([*trail.steps, shown(take_apart(result))])
        keeps.append(kept())
        put_back()
    if trails[0] != trails[1] or keeps[0] != keeps[1]:
        changed = {
            name
            for module, known in zip(modules, before, strict=True)
            for name, value in vars(module).items()
            if is_plain(value) and not is_same_value(value, known.get(name, ABSENT))
        }
        changed |= {name for name, content in contents if content.holds_other_values()}
        changed |= {place.path for place in python.changed_places()}
        changed |= {name for name, value in keeps[0].items() if value != keeps[1][name]}
        raise CaptureError(
            f"the model computes otherwise each time that it is called, by what it sets itself: "
            f"{', '.join(sorted(changed)) or 'its attributes'}",
            "pass it as an argument, or keep it as a buffer, a tensor; if it is set once, call the model once before",
        )


class OpTrail(TorchFunctionMode):
    """Notes which functions of torch are called with which numbers and texts, and whether with one of ``watched``."""

    def __init__(self, watched: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.steps: list[tuple[Any, ...]] = []
        self.meets_watched = False
        self._watched = {id(tensor): tensor for tensor in watched}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs or {}))
        self.steps.append((func, *shown(leaves)))
        self.meets_watched |= any(id(leaf) in self._watched for leaf in leaves)
        return func(*args, **(kwargs or {}))


def shown(values: Any) -> tuple[str, ...]:
    """The numbers and texts among the leaves of a tree, as text, in slices, sizes, NumPy's arrays and tensors that are
    none of a trace's too: what a trace has one value of."""
    texts: list[str] = []
    for leaf in pytree.tree_leaves(values):
        if is_plain(leaf) or isinstance(leaf, torch.dtype | torch.device | range | None):
            texts.append(repr(leaf))
        elif isinstance(leaf, slice):
            texts += ["slice", *shown((leaf.start, leaf.stop, leaf.step))]
        elif isinstance(leaf, torch.Size):
            texts += shown(tuple(leaf))
        elif isinstance(leaf, np.ndarray | np.generic):
            texts.append(f"{leaf.dtype} {leaf.tobytes().hex() if leaf.dtype != object else leaf!r}")
        elif isinstance(leaf, torch.Tensor) and _has_contents(leaf):
            with _disable_current_modes():
                texts.append(repr(leaf.detach().resolve_conj().resolve_neg().tolist()))
    return tuple(texts)


# Of a tensor with more elements the contents are not compared.
_MOST_SHOWN = 4096


def _has_contents(tensor: torch.Tensor) -> bool:
    """Whether it is a small one of the user's on the CPU, and none of a trace's."""
    with torch._C.DisableTorchFunction():
        is_small = tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.numel() <= _MOST_SHOWN
        return is_plain_tensor(tensor) and is_small


def _restore(table: dict[str, Any], before: Mapping[str, Any]) -> None:
    if list(table) != list(before) or any(table[name] is not value for name, value in before.items()):
        table.clear()
        table.update(before)


class _Contents:
    """The contents of a dict, list or set, and of those in it, as they were."""

    def __init__(self, container: Any) -> None:
        self._container = container
        self._items = dict(container) if isinstance(container, dict) else list(container)
        self._inner = [_Contents(value) for value in _values(self._items) if _is_container(value)]

    def is_changed(self) -> bool:
        """Whether something else is in it by now, other than what an object works out once and keeps by a new name."""
        container, items = self._container, self._items
        if isinstance(items, dict):
            new = [value for name, value in container.items() if name not in items]
            changed = any(container.get(name, ABSENT) is not value for name, value in items.items())
            changed |= any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(new))
        else:
            changed = self._differs()
        return changed or any(inner.is_changed() for inner in self._inner)

    def holds_other_values(self) -> bool:
        """Whether numbers or texts are in it that were not, or others in another order."""
        values = [value for container in (self._container, self._items) for value in _values(container)]
        is_other = self._differs() and any(map(is_plain, values))
        return is_other or any(inner.holds_other_values() for inner in self._inner)

    def _differs(self) -> bool:
        container, items = self._container, self._items
        if isinstance(items, dict):
            return list(container) != list(items) or any(container[name] is not value for name, value in items.items())
        now = list(container)
        return len(now) != len(items) or any(a is not b for a, b in zip(now, items, strict=True))

    def restore(self) -> None:
        """Put back what was in it, where that is other by now."""
        container, items = self._container, self._items
        if isinstance(items, dict):
            _restore(container, items)
        elif self._differs():
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(items)
        for inner in self._inner:
            inner.restore()


def _values(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def _is_container(value: Any) -> bool:
    """Whether it is a dict, list or set with the methods of one."""
    return type(value) in (dict, OrderedDict, defaultdict, list, set)
