# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reads plain data from JSON, strictly: what is missing, unknown or of another type is refused by name. A program then
never runs on data that was understood by half."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from retrograd.contract.errors import RetrogradError
from retrograd.contract.sizes import Condition, Size, find_problem

_T = TypeVar("_T")


class ManifestError(RetrogradError, ValueError):
    """A manifest that is not JSON, or whose fields are not the ones of this format."""


def read_plain(cls: type[_T], data: Any, where: str, left_out: Collection[str] = ()) -> _T:
    """A dataclass of plain data from the JSON object that :func:`to_json` makes of it, less the fields ``left_out``.

    Each field is read as its annotation says: a name of :data:`_READERS`, a dataclass that its module knows, or tuples,
    mappings by text and ``None`` of these.

    Raises:
        ManifestError: a field is missing, unknown or of another type.
    """
    kinds = {field.name: str(field.type) for field in fields(cls) if field.name not in left_out}  # type: ignore[arg-type]
    known = vars(sys.modules[cls.__module__])
    found = read_fields(data, kinds, where)
    return cls(**{name: _read_kind(found[name], kind, f"{where}.{name}", known) for name, kind in kinds.items()})


def read_fields(data: Any, names: Collection[str], where: str) -> Mapping[str, Any]:
    """``data``, once it is known to be an object of these fields."""
    if not isinstance(data, dict):
        raise ManifestError(f"{where} must be a JSON object, not {type(data).__name__}")
    missing = sorted(set(names) - data.keys())
    if missing:
        raise ManifestError(f"{where} lacks the field {missing[0]!r}")
    unknown = sorted(data.keys() - set(names))
    if unknown:
        raise ManifestError(f"{where} has the unknown field {unknown[0]!r}")
    return data


def read_as(value: Any, kind: type[_T], where: str) -> _T:
    """``value``, which is a ``kind``."""
    # bool is a subclass of int, and `true` is no size.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ManifestError(f"{where} must be {kind.__name__}, not {type(value).__name__}")
    return value


def _read_kind(value: Any, kind: str, where: str, known: Mapping[str, Any]) -> Any:
    if kind.endswith(" | None"):
        return None if value is None else _read_kind(value, kind.removesuffix(" | None"), where, known)
    if mapping := _MAPPING.fullmatch(kind):
        items = read_as(value, dict, where).items()
        return {key: _read_kind(item, mapping[1], f"{where}.{key}", known) for key, item in items}
    if kind.startswith("tuple["):
        listed, inner = read_as(value, list, where), kind[len("tuple[") : -1].split(", ")
        kinds = inner[:1] * len(listed) if inner[-1] == "..." else inner
        if len(listed) != len(kinds):
            raise ManifestError(f"{where} must have {len(kinds)} items, not {len(listed)}")
        places = enumerate(zip(listed, kinds, strict=True))
        return tuple(_read_kind(item, one, f"{where}[{place}]", known) for place, (item, one) in places)
    if kind in _READERS:
        return _READERS[kind](value, where)
    cls: Any = known[kind]
    if not isinstance(cls, type):
        # Another name of one of the above.
        return _read_kind(value, str(cls), where, known)
    return cls.from_dict(value, where) if hasattr(cls, "from_dict") else read_plain(cls, value, where)


def read_size(value: Any, where: str) -> Size:
    """A size from its JSON form."""
    problem = find_problem(value)
    if problem is not None:
        raise ManifestError(f"{where} must be a size: {problem}")
    size: Size = _as_tuple(value)
    return size


def read_condition(value: Any, where: str) -> Condition:
    """A condition from its JSON form."""
    problem = find_problem(value, fractions=True)
    if problem is not None or not isinstance(value, list):
        raise ManifestError(f"{where} must be a condition: {problem or 'expected a list'}")
    condition: Condition = _as_tuple(value)
    return condition


def to_json(value: Any) -> Any:
    """``value`` with lists in the place of tuples, and objects in that of dataclasses, at any depth: what is read back
    from its JSON."""
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


_MAPPING = re.compile(r"(?:Mapping|dict)\[str, (.*)\]")
_READERS: Mapping[str, Callable[[Any, str], Any]] = {
    "str": lambda value, where: read_as(value, str, where),
    "int": lambda value, where: read_as(value, int, where),
    "bool": lambda value, where: read_as(value, bool, where),
    "Size": read_size,
    "Condition": read_condition,
    "Any": lambda value, _where: value,
}
