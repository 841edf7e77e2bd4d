# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Python values that a program was compiled with, looked at before each call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class _Absent:
    """No value, where there may be any."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()


class Table(Protocol):
    """Where values are found by name."""

    def get(self, name: str, default: Any = None, /) -> Any:
        """The value of that name."""
        ...


class Environment:
    """Variables of the environment by name."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def get(self, name: str, default: Any = None, /) -> Any:
        """As of a dict."""
        return self._variables.get(name, default)


@dataclass(frozen=True)
class Place:
    """Where a value is looked up, ``table`` by ``name``, and what it was; ``path`` says where that is."""

    path: str
    table: Table
    name: str
    value: Any


class PythonValues:
    """The values that a program was compiled with."""

    def __init__(self, places: tuple[Place, ...] = ()) -> None:
        self.places = places
        # A call looks at hundreds of them.
        self._checks = [(place.table.get, place.name, place.value) for place in places]

    def are_as_before(self) -> bool:
        """Whether all of them are as they were."""
        for get, name, value in self._checks:
            found = get(name, ABSENT)
            if found is not value and not is_same_value(found, value):
                return False
        return True

    def are_those_of(self, other: PythonValues) -> bool:
        """Whether the other ones are the same values, at the same places."""
        found, others = ({place.path: place.value for place in values.places} for values in (self, other))
        return found.keys() == others.keys() and all(
            is_same_value(value, others[path]) for path, value in found.items()
        )

    def find_changed(self) -> list[str]:
        """Those that are others now, each with what it was and what it is."""
        return [
            f"{p.path} ({p.value!r}, now {found!r})"
            for p in self.places
            if not is_same_value(found := p.table.get(p.name, ABSENT), p.value)
        ]


def is_plain(value: Any) -> bool:
    """Whether it is a number or a text, and no tensor and nothing that has one."""
    return isinstance(value, bool | int | float | complex | str)


def is_same_value(a: Any, b: Any) -> bool:
    """Whether two Python values are the same to a program: of one type and equal, not-a-number included."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(is_same_value(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_same_value, a, b))
    return bool(a == b) or (isinstance(a, float) and a != a and b != b)
