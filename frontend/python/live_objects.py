# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Finds the objects of a class that are alive, while other threads go on."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from itertools import chain, groupby, starmap
from typing import Any, TypeVar

T = TypeVar("T")


def find_alive(kind: type[T]) -> list[T]:
    """The objects of this class, and of those below it, that the collector knows.

    Between two of its instructions Python may let another thread go on, which may be in the midst of making a tuple.
    Were that one held here meanwhile, as one of all objects, it could not be filled ("bad argument to internal
    function"). All that holds objects of other classes is therefore made and gone within one call of a function in C,
    and holds nothing that is itself among them.
    """
    met = list(map(type, _each()))
    kinds = dict(zip(map(id, met), met, strict=True)).values()
    if any(type(t).__eq__ is not type.__eq__ or type(t).__hash__ is not type.__hash__ for t in kinds):
        # A metaclass that makes classes equal, or has no hash for them: they cannot be told apart as below.
        return [each for each in gc.get_objects() if issubclass(type(each), kind)]
    # Not isinstance, which asks objects for their __class__.
    others: dict[type, Iterable[Any]] = {t: () for t in kinds if not issubclass(t, kind)}
    # Of a class that others lacks, ``get`` gives its second argument: the objects in a row that are of it.
    found = list(chain.from_iterable(starmap(others.get, groupby(_each(), type))))
    # Classes may have come into use since.
    return [each for each in found if issubclass(type(each), kind)]


def _each() -> Iterable[Any]:
    """Every object, of a list that is made when the first one is asked for."""
    return chain.from_iterable(map(gc.get_objects, (None,)))
