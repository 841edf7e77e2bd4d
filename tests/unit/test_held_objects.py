# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What objects hold is found without running code of theirs."""

from __future__ import annotations

import random
import weakref
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from retrograd.frontend.python.held_objects import reach


class Raises:
    """Whatever is asked of it raises, but for what it has."""

    __slots__ = ("__dict__", "inner", "unset")

    def __init__(self, inner: Any) -> None:
        object.__setattr__(self, "inner", inner)
        object.__getattribute__(self, "__dict__")["shadowed"] = [inner]

    def __getattribute__(self, name: str) -> NoReturn:
        raise RuntimeError(name)

    @property
    def shadowed(self) -> NoReturn:
        raise RuntimeError("a property is called")


class Items(dict[str, Any]):
    def values(self) -> NoReturn:
        raise RuntimeError("its own values")


def test_what_is_held_is_found_once() -> None:
    generator = random.Random(0)
    held: dict[str, Any] = {"list": [(generator,)], "module": torch.nn.Linear(1, 1), "text": "a", "function": reach}
    held["itself"] = [held, SimpleNamespace(above=held)]
    assert sum(each is generator for each in reach(held)) == 1
    assert not any(isinstance(each, str | torch.nn.Module) or each is reach for each in reach(held))


def test_no_code_of_a_class_runs() -> None:
    generator = random.Random(0)
    assert [each for each in reach(Raises(generator)) if each is generator] == [generator]
    assert generator in [*reach(Items(a=generator))]
    gone = weakref.proxy(Items())
    assert len([*reach([gone])]) == 2


def test_little_is_looked_at_of_much() -> None:
    assert len([*reach([1.0] * 1_000_000)]) == 1
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert len([*reach(deep)]) == 1000
