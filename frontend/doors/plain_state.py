# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The attributes that a model sets to plain values, which a program sets too where every run has the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from retrograd.frontend.python.kept_attributes import Containment, KeptAttribute
from retrograd.frontend.python.plain_attributes import Stores, is_settled
from retrograd.frontend.python.python_calls_seen import PythonSeen
from retrograd.frontend.python.python_contents import EitherOf, as_it_was, is_same_value
from retrograd.frontend.python.python_functions import Names, is_layer, names_read
from retrograd.frontend.python.python_places import Place, PythonValues

Key = tuple[int, str]


class PlainState:
    """The attributes without tensors that a model sets while it is traced, each with what it was."""

    def __init__(self) -> None:
        self.found: list[tuple[KeptAttribute, Any]] = []
        # Those that no program sets, each with the reason.
        self.left: list[str] = []
        # Those that the model goes by, and that were something else.
        self.read: list[KeptAttribute] = []
        # What statements set in the first of several traces.
        self.stores: Stores = set()
        # Those that every run of the model sets to the same, once that is known, and whether it reads them.
        self._same: set[Key] | None = None
        self._is_read = False
        self._values: dict[Key, Any] = {}
        self._others: dict[Key, list[Any]] = {}

    def take(self, containment: Containment) -> list[tuple[KeptAttribute, Any]]:
        """Note what the model has set."""
        found = containment.take_plain(self.stores)
        if does_more := containment.does_more():
            beside = "is set beside hooks, modules or objects, which no call makes"
            self.left, found = [f"{kept.qualified} {beside}" for kept, _ in found], []
        self.found = [pair for pair in found if self._same is None or _key(pair[0]) in self._same]
        if self._same is None and not does_more:
            self.left = [f"{name} depends on an open size" for name in containment.find_open()]
        self._values, self._others = {_key(kept): as_it_was(kept.value) for kept, _ in self.found}, {}
        return self.found

    def compare(self) -> None:
        """Note what another run has set."""
        for kept, _ in self.found:
            self._others.setdefault(_key(kept), []).append(as_it_was(kept.value))

    def settle(self, is_read: bool) -> list[KeptAttribute]:
        """Leave those out that other runs set to something else, and return them; ``is_read`` says whether these did
        otherwise by what was set."""
        same = [pair for pair in self.found if is_settled(self._values[_key(pair[0])], self._others[_key(pair[0])])]
        left = [kept for kept, _ in self.found if not any(kept is other for other, _ in same)]
        self.left += [f"{kept.qualified} is another value at each call" for kept in left]
        self.found, self._same, self._is_read = same, {_key(kept) for kept, _ in same}, is_read
        return left

    def keys(self) -> set[Key]:
        """They, by the identity of their module, and name."""
        return {_key(kept) for kept, _ in self.found}

    def find_unread(self, seen: PythonSeen) -> list[KeptAttribute]:
        """Those that no code which ran reads by its name."""
        if Names(seen.codes, seen.read).reads_all:
            return []
        read = seen.read.union(*map(names_read, seen.codes))
        return [kept for kept, _ in self.found if kept.name not in read and not is_layer(kept.module)]

    def guarded(self, python: PythonValues, seen: PythonSeen, others_read: bool) -> PythonValues:
        """Have the values that are looked at before each call be right behind a call, too.

        Where a run does otherwise by what the one before has set, what an attribute was is looked at; where it does
        not, what it was and what it is set to are one to the program. What no code reads is not looked at.
        ``others_read`` says whether attributes that are set to tensors may be what it goes by.
        """
        if not self.found:
            return python
        unread = {(id(kept.table), kept.name) for kept in self.find_unread(seen)}
        python = python.without([place for place in python.places if (id(place.table), place.name) in unread])
        known = {(id(kept.table), kept.name): _key(kept) for kept, _ in self.found}
        named = [place for place in python.places if (id(place.table), place.name) in known]
        changed = [(kept, before) for kept, before in self.found if not is_same_value(self._values[_key(kept)], before)]
        if self._is_read:
            names = {(id(place.table), place.name) for place in named}
            self.read = [kept for kept, _ in changed if (id(kept.table), kept.name) in names]
            # It may look them up by names that no code has.
            unnamed = [] if self.read or others_read else changed
            return python.with_more([Place(k.qualified, k.table, k.name, as_it_was(before)) for k, before in unnamed])
        either = [
            replace(place, value=EitherOf((place.value, self._values[known[id(place.table), place.name]])), sources=())
            for place in named
        ]
        return python.without(named).with_more(either) if named else python


def _key(kept: KeptAttribute) -> Key:
    return id(kept.module), kept.name
