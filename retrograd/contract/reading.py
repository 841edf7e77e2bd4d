# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reads plain data from JSON, strictly: what is missing, unknown or of another type is refused by name.

A program then never runs on data that was understood by half.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from retrograd.contract.errors import RetrogradError
from retrograd.contract.sizes import Condition, Size, find_problem

_T = TypeVar("_T")


class ManifestError(RetrogradError, ValueError):
    """A manifest that is not JSON, or whose fields are not the ones of this format."""


def read_fields(data: Any, names: Collection[str], where: str, optional: Collection[str] = ()) -> Mapping[str, Any]:
    """``data``, once it is known to be an object of these fields, the ``optional`` ones there or not."""
    if not isinstance(data, dict):
        raise ManifestError(f"{where} must be a JSON object, not {type(data).__name__}")
    missing = sorted(set(names) - data.keys())
    if missing:
        raise ManifestError(f"{where} lacks the field {missing[0]!r}")
    unknown = sorted(data.keys() - set(names) - set(optional))
    if unknown:
        raise ManifestError(f"{where} has the unknown field {unknown[0]!r}")
    return data


def read_typed(fields: Mapping[str, Any], name: str, kind: type[_T], where: str) -> _T:
    """The field ``name``, which is a ``kind``."""
    return read_as(fields[name], kind, f"{where}.{name}")


def read_optional(fields: Mapping[str, Any], name: str, kind: type[_T], where: str) -> _T | None:
    """The field ``name``, which is a ``kind`` or null."""
    return None if fields[name] is None else read_typed(fields, name, kind, where)


def read_each(fields: Mapping[str, Any], name: str, where: str, read: Callable[[Any, str], _T]) -> tuple[_T, ...]:
    """The items of the list ``name``, each read by ``read``, which gets the item's place as well."""
    values = read_typed(fields, name, list, where)
    return tuple(read(value, f"{where}.{name}[{index}]") for index, value in enumerate(values))


def read_as(value: Any, kind: type[_T], where: str) -> _T:
    """``value``, which is a ``kind``."""
    # bool is a subclass of int, and `true` is no size.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ManifestError(f"{where} must be {kind.__name__}, not {type(value).__name__}")
    return value


def read_text(value: Any, where: str) -> str:
    """``value``, which is a string."""
    return read_as(value, str, where)


def read_integer(value: Any, where: str) -> int:
    """``value``, which is an integer."""
    return read_as(value, int, where)


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
    """``value`` with lists in the place of tuples, at any depth: what is read back from its JSON."""
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
