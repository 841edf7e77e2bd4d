# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Objects of a class are found while other threads make tuples, which nobody else may hold until they are full."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from retrograd.frontend.python.live_objects import find_alive


class _Kept(list[int]):
    pass


class _Below(_Kept):
    pass


class _Equal(type):
    def __eq__(cls, other: object) -> bool:
        return True

    # As Python has it where only equality is told.
    __hash__ = None  # type: ignore[assignment]


class _Odd(metaclass=_Equal):
    pass


def test_objects_of_a_class_and_of_those_below() -> None:
    kept = [_Kept(), _Below()]
    assert {id(each) for each in find_alive(_Kept)} == {id(each) for each in kept}


def test_nothing_else_is_held_between_two_instructions() -> None:
    """Where another thread may go on, it finds a tuple as it left it."""
    being_made = (_Kept(), _Kept())
    counts: set[int] = set()

    def look(frame: FrameType, _event: str, _argument: Any) -> Any:
        frame.f_trace_opcodes = True
        counts.add(sys.getrefcount(being_made))
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        find_alive(_Kept)
    finally:
        sys.settrace(before)
    assert len(counts) == 1


def _find_beside_odd() -> bool:
    kept, odd = _Kept(), _Odd()
    # As an attribute has it known to the collector.
    odd.__dict__["kept"] = kept
    found = find_alive(_Kept)
    return any(each is kept for each in found) and all(isinstance(each, _Kept) for each in found)


def test_classes_may_have_an_equality_of_their_own() -> None:
    # Nothing of it is alive after it.
    assert _find_beside_odd()
