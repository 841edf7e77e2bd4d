# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Python values that a program was compiled with, looked at before each call."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from reprlib import Repr
from typing import Any

import torch

from retrograd.frontend.python.python_contents import Contents, dicts_within, is_itself, is_same_value
from retrograd.frontend.python.python_tables import ABSENT, Table, keeps_address, sources_of
from retrograd.frontend.python.written_memory import Words, joined, words_of

# So much of a value is told.
_LONGEST = 100


class _Repr(Repr):
    """Of tensors within others no numbers either."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxstring, self.maxother = 3, 8, _LONGEST, _LONGEST

    def repr_Tensor(self, value: torch.Tensor, _level: int) -> str:
        return _short(value)

    repr_Parameter = repr_Tensor


_REPR = _Repr()


@dataclass(frozen=True)
class Place:
    """Where a value is looked up, ``table`` by ``name``, and what it was; ``path`` says where that is. As long as none
    of ``sources`` is written to, it is the same; where there are none, or no one can tell, it may be another one."""

    path: str
    table: Table
    name: str
    value: Any
    sources: tuple[Any, ...] = ()

    def has_same(self) -> bool:
        """Whether the value is there."""
        found = self.table.get(self.name, ABSENT)
        return found is self.value or is_same_value(found, self.value)

    def has_itself(self) -> bool:
        """Whether what is there is no equal one, which would be written to elsewhere."""
        found = self.table.get(self.name, ABSENT)
        if isinstance(self.value, Contents):
            known = self.sources[len(sources_of(self.table)) :]
            are_its = list(map(id, dicts_within(found))) == list(map(id, known))
            return are_its and self.value.holds_itself(found)
        return is_itself(found, self.value) and keeps_address(self.table, found, self.value, ())


@dataclass
class _Group:
    """Places with one table: where that was not written to, none of them is other."""

    words: list[Words]
    places: list[Place]


class PythonValues:
    """The values that a program was compiled with. ``tensors`` are where the model may have found tensors, whose
    values are weak references to these. Where ``eager`` are other ones, the model runs in eager: a trace has one value
    of them alone. ``steps`` says whether there is something from which another value is taken each time, and
    ``generators`` are those of random numbers, by what the model calls them."""

    def __init__(
        self,
        places: tuple[Place, ...] = (),
        tensors: tuple[Place, ...] = (),
        eager: tuple[Place, ...] = (),
        steps: bool = False,
        generators: Mapping[str, Any] | None = None,
    ) -> None:
        self.generators = dict(generators or {})
        self.places = places
        self.tensors = tensors
        self.eager = eager
        self.steps = steps
        self._groups = _grouped(places)
        grouped = {id(place) for group in self._groups for place in group.places}
        self._alone = [place for place in (*places, *eager) if id(place) not in grouped]
        self._note()

    def _note(self) -> None:
        self._words = [word for group in self._groups for word in group.words]
        self._known = joined(self._words)
        # A call looks at dozens of them.
        self._checks = [(place.table.get, place.name, place.value) for place in self._alone]

    def are_as_before(self) -> bool:
        """Whether all of them are as they were."""
        now = joined(self._words)
        if now != self._known and not self._are_same_behind(now):
            return False
        for get, name, value in self._checks:
            found = get(name, ABSENT)
            if found is not value and not is_same_value(found, value):
                return False
        return True

    def _are_same_behind(self, now: bytes) -> bool:
        """Whether what was written to has the same values still; ``now`` is what was written."""
        start, parted = 0, []
        for group in self._groups:
            end = start + sum(map(len, group.words))
            if now[start:end] != self._known[start:end]:
                if not all(place.has_same() for place in group.places):
                    return False
                if not all(place.has_itself() for place in group.places):
                    parted.append(group)
            start = end
        if not parted:
            self._known = now
            return True
        # What is there now is equal, and another: what is written to that is seen by looking alone.
        self._alone = [*self._alone, *(place for group in parted for place in group.places)]
        self._groups = [group for group in self._groups if group not in parted]
        self._note()
        return all(place.has_same() for group in self._groups for place in group.places)

    def without(self, left_out: Collection[Place]) -> PythonValues:
        """The same, of fewer places."""
        known = {id(place) for place in left_out}
        places = tuple(place for place in self.places if id(place) not in known)
        return PythonValues(places, self.tensors, self.eager, self.steps, self.generators)

    def with_more(self, more: Collection[Place]) -> PythonValues:
        """The same, of more places."""
        return PythonValues((*self.places, *more), self.tensors, self.eager, self.steps, self.generators)

    def are_in_eager(self) -> bool:
        """Whether what a trace has one value of is another one now."""
        return not all(place.has_same() for place in self.eager)

    def are_those_of(self, other: PythonValues) -> bool:
        """Whether the other ones are the same values, at the same places."""
        return not self.find_other(other)

    def find_other(self, other: PythonValues) -> list[str]:
        """The places where the other ones have another value, or none, or alone have one, each with both."""
        found, others = ({place.path: place.value for place in values.places} for values in (self, other))
        parted = [
            path
            for path in {**found, **others}
            if path not in found or path not in others or not is_same_value(found[path], others[path])
        ]
        return [f"{path} ({found.get(path, ABSENT)!r}, and {others.get(path, ABSENT)!r})" for path in parted]

    def changed_places(self) -> list[Place]:
        """The places where another value is now."""
        return [place for place in (*self.places, *self.eager) if not place.has_same()]

    def find_changed(self) -> list[str]:
        """Those that are others now, each with what it was and what it is."""
        changed = [(p.path, p.value, p.table.get(p.name, ABSENT)) for p in self.changed_places()]
        return [f"{path} ({_short(was)}, now {_short(now)})" for path, was, now in changed]


def _short(value: Any) -> str:
    """A value in a line: of a tensor what it is, and not what is in it."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} and shape {tuple(value.shape)}"
    text = " ".join(_REPR.repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _grouped(places: Collection[Place]) -> list[_Group]:
    groups: dict[tuple[int, ...], _Group | None] = {}
    for place in places:
        key = tuple(map(id, place.sources))
        if key not in groups:
            words = [words_of(source) for source in place.sources]
            known = [word for word in words if word is not None]
            groups[key] = _Group(known, []) if known and len(known) == len(words) else None
        if (group := groups[key]) is not None:
            group.places.append(place)
    return [group for group in groups.values() if group is not None]
