# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Whether anything was written to Python's objects, asked of hundreds at once.

CPython up to 3.12 gives a dict another number at each write. That, an object's class, a function's code and defaults,
what a closure's variable holds and the bases of a class are words in memory at fixed places; one ``join`` of these
takes 40 ns an object, where to look one value up takes 100. Where these places are other ones, nothing is known of what
was written.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, MappingProxyType
from typing import Any

# In bytes from an object's begin: behind its count of references, and of a dict its class and how many it has.
_KIND, _HELD, _VERSION, _PARTS = 8, 16, 24, 48
_WORD = ctypes.sizeof(ctypes.c_void_p)
# Its attributes, of an object that Python lays out itself.
_ATTRIBUTES = -3 * _WORD
# ``tp_mro``, found in the first class that has bases.
_BASES = range(_WORD, 64 * _WORD, _WORD)

Words = memoryview
"""A part of an object's memory, as it is at the time that it is read."""


@dataclass(frozen=True)
class AttributesOf:
    """Stands for which dict has the attributes of an object."""

    owner: Any


def dict_of_class(kind: type) -> dict[str, Any]:
    """The dict behind ``vars(kind)``."""
    found: dict[str, Any] = gc.get_referents(vars(kind))[0]
    return found


def words_of(source: Any) -> Words | None:
    """Give the part of memory that is another after a write: to a dict; to the class of an object, or to which dict has
    its attributes; to the code or the defaults of a function; to a variable of a closure; to the bases of a class.
    ``None`` where that is not known.

    Other than a dict's it is the address of what was written, which is another only as long as what it was is kept.
    """
    if not IS_KNOWN:
        return None
    if isinstance(source, AttributesOf):
        return _attributes_place(source.owner)
    if isinstance(source, dict):
        return _read(source, _VERSION)
    if isinstance(source, FunctionType):
        return _read(source, _PARTS, 3)
    if isinstance(source, CellType):
        return _read(source, _HELD)
    return _read(source, _bases_place() if isinstance(source, type) else _KIND)


def joined(words: Iterable[Words]) -> bytes:
    """The present values of all of them."""
    return b"".join(words)


def raw_memory(address: int, size: int) -> Words:
    """The ``size`` bytes at an address, which must stay someone's."""
    return memoryview((ctypes.c_char * size).from_address(address))


def _attributes_place(owner: Any) -> Words | None:
    place = type(owner).__dictoffset__
    if not place:
        return None
    place = place if place > 0 else _ATTRIBUTES
    return _read(owner, place) if _word(owner, place) == id(owner.__dict__) else None


def _read(source: Any, place: int, count: int = 1) -> Words:
    return raw_memory(id(source) + place, count * _WORD)


def _bases_place() -> int:
    return next(place for place in _BASES if _word(_Class, place) == id(_Class.__mro__))


def _word(source: Any, place: int) -> int:
    return int.from_bytes(_read(source, place), sys.byteorder)


class _Class:
    """An example of a class."""


def _example(first: int = 1, *, second: int = 2) -> int:
    return first + second


def _are_where_expected() -> bool:
    """Whether CPython's objects have these words, and a dict another number after each kind of write."""
    if sys.implementation.name != "cpython" or sys.version_info >= (3, 13) or _WORD != 8:
        return False
    parts = [id(_example.__code__), id(_example.__defaults__), id(_example.__kwdefaults__)]
    found = [_word(_example, _PARTS + _WORD * i) for i in range(3)]
    is_class_found = any(_word(_Class, place) == id(_Class.__mro__) for place in _BASES)
    owner = _Class()
    table: Mapping[str, Any] = vars(owner)
    numbers = [_word(table, _VERSION)]
    for value in (1, 2):
        owner.value = value  # type: ignore[attr-defined]
        numbers.append(_word(table, _VERSION))
    del owner.value  # type: ignore[attr-defined]
    numbers.append(_word(table, _VERSION))
    is_held = _word(CellType(owner), _HELD) == id(owner)
    is_proxied = isinstance(vars(_Class), MappingProxyType) and type(dict_of_class(_Class)) is dict
    is_class_found &= _word(owner, _KIND) == id(_Class)
    return found == parts and is_class_found and is_held and is_proxied and len(set(numbers)) == 4


IS_KNOWN = _are_where_expected()
"""Whether these words are known of the Python that runs."""
