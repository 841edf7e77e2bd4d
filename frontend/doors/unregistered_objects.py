# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Objects with tensors in them that PyTorch's trees know nothing of: caches, results of classes of the user's.

What a model returns is taken apart into tensors and put together again at each call. An object becomes a node of the
tree, whose children are its attributes and, of a dict, list or tuple with a class of its own, its items; the tree gives
an object of the same class with the new tensors in it, made without its ``__init__``.
"""

from __future__ import annotations

import enum
import types
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from retrograd.frontend.traceable.masked_selections import Selection

# What holds no tensor, or none that a trace could have made.
PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, type, type(None), torch.dtype, torch.device, torch.Size)
# What may hold tensors where no attribute shows them.
_HIDES_TENSORS = (
    *(types.FunctionType, types.MethodType, types.GeneratorType, types.CoroutineType),
    *(torch.nn.Module, torch.Tensor),
    # Stands for a tensor: who takes its parts for those of a result would give it to the user.
    Selection,
)
_ITEMS = (dict, list, tuple)


@dataclass(frozen=True)
class _Shape:
    """An object but for what it holds: its class, the names of its attributes, and how many items follow these.
    ``keys`` are those of a dict."""

    kind: type
    names: tuple[str, ...]
    keys: tuple[Any, ...] = ()


class _Parts:
    """An object of another class, as a node of a tree."""

    def __init__(self, shape: _Shape, values: Sequence[Any]) -> None:
        self.shape, self.values = shape, list(values)


def take_apart(value: Any) -> Any:
    """``value`` as a tree that PyTorch takes apart; flattened and put together, it gives objects like those in
    ``value``. Objects without tensors, and those that cannot be looked into, stay as they are."""
    return _take_apart(value, ())


def _take_apart(value: Any, above: tuple[int, ...]) -> Any:
    leaves, spec = pytree.tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return _take_object_apart(value, above)
    return pytree.tree_unflatten([_take_object_apart(leaf, above) for leaf in leaves], spec)


def _take_object_apart(leaf: Any, above: tuple[int, ...]) -> Any:
    if isinstance(leaf, (*PLAIN, *_HIDES_TENSORS)) or id(leaf) in above:
        return leaf
    names = attribute_names(leaf)
    values = [getattr(leaf, name) for name in names]
    keys: tuple[Any, ...] = ()
    if isinstance(leaf, _ITEMS):
        keys = tuple(leaf) if isinstance(leaf, dict) else ()
        values += [dict.__getitem__(leaf, key) for key in keys] if isinstance(leaf, dict) else list(leaf)
    parts = [_take_apart(part, (*above, id(leaf))) for part in values]
    if not any(isinstance(part, torch.Tensor) for part in pytree.tree_leaves(parts)):
        return leaf
    return _Parts(_Shape(type(leaf), names, keys), parts)


def is_handed_on(leaf: Any) -> bool:
    """Whether what `take_apart` left as it was can be given to each caller: it holds no tensor for certain."""
    if isinstance(leaf, types.FunctionType):
        return leaf.__closure__ is None and not leaf.__defaults__ and not leaf.__kwdefaults__
    return isinstance(leaf, PLAIN) or (not isinstance(leaf, _HIDES_TENSORS) and _is_bare(leaf, set()))


def _is_bare(value: Any, seen: set[int]) -> bool:
    """Whether all that is in an object can be looked at, and no tensor is among it."""
    if id(value) in seen or isinstance(value, (*PLAIN, range, slice)):
        return True
    seen.add(id(value))
    parts = pytree.tree_leaves(value)
    if len(parts) != 1 or parts[0] is not value:
        return all(_is_bare(part, seen) for part in parts)
    if isinstance(value, _HIDES_TENSORS):
        return isinstance(value, types.FunctionType) and is_handed_on(value)
    items = [*value.values()] if isinstance(value, dict) else [*value] if isinstance(value, list | tuple) else []
    seen_into = hasattr(value, "__dict__") or bool(_all_slots(type(value))) or isinstance(value, _ITEMS)
    return seen_into and all(
        _is_bare(part, seen) for part in (*items, *(getattr(value, name) for name in attribute_names(value)))
    )


def objects_within(value: Any) -> list[Any]:
    """An object, and the others that its attributes and items lead to: none that are plain, hide tensors, or are
    containers that PyTorch's trees know."""
    found: list[Any] = []
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        leaf = waiting.pop()
        if id(leaf) in seen or isinstance(leaf, (*PLAIN, *_HIDES_TENSORS)):
            continue
        seen.add(id(leaf))
        found.append(leaf)
        waiting += pytree.tree_leaves(held_by(leaf))
    return found


def held_by(value: Any) -> dict[str, Any]:
    """The attributes of an object by name and, of one that is a dict, list or tuple, its items."""
    items = [*value.values()] if isinstance(value, dict) else [*value] if isinstance(value, list | tuple) else []
    return {name: getattr(value, name) for name in attribute_names(value)} | ({"": items} if items else {})


def attribute_names(value: Any) -> tuple[str, ...]:
    """The attributes of an object that are its own: of its ``__dict__`` and of slots that are set."""
    slots = [slot for slot in _all_slots(type(value)) if hasattr(value, slot)]
    return tuple(dict.fromkeys((*getattr(value, "__dict__", ()), *slots)))


def _all_slots(kind: type) -> list[str]:
    return [slot for base in kind.__mro__ for slot in _slots(base)]


def _slots(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    named = (slots,) if isinstance(slots, str) else tuple(slots)
    hidden = (f"_{kind.__name__.lstrip('_')}{name}" if _is_private(name) else name for name in named)
    return (name for name in hidden if name not in ("__dict__", "__weakref__"))


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")


def _flatten(parts: _Parts) -> tuple[list[Any], _Shape]:
    return parts.values, parts.shape


def _flatten_with_keys(parts: _Parts) -> tuple[list[tuple[Any, Any]], _Shape]:
    shape, items = parts.shape, len(parts.values) - len(parts.shape.names)
    keys = shape.keys or range(items)
    paths: list[Any] = [*map(pytree.GetAttrKey, shape.names), *map(pytree.MappingKey, keys)]
    return list(zip(paths, parts.values, strict=True)), shape


def _put_together(values: Iterable[Any], shape: _Shape) -> Any:
    given = list(values)
    attributes, items = given[: len(shape.names)], given[len(shape.names) :]
    if issubclass(shape.kind, tuple):
        made: Any = tuple.__new__(shape.kind, items)
    else:
        made = shape.kind.__new__(shape.kind)
    if issubclass(shape.kind, dict):
        # Around its own, as below; an OrderedDict keeps its order in places of its own.
        plain = OrderedDict if issubclass(shape.kind, OrderedDict) else dict
        for key, item in zip(shape.keys, items, strict=True):
            plain.__setitem__(made, key, item)
    elif issubclass(shape.kind, list):
        list.extend(made, items)
    for name, value in zip(shape.names, attributes, strict=True):
        # Around a class's own __setattr__, which may compute, or refuse where a dataclass is frozen.
        object.__setattr__(made, name, value)
    return made


pytree.register_pytree_node(_Parts, _flatten, _put_together, flatten_with_keys_fn=_flatten_with_keys)
