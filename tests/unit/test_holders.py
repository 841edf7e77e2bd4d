# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What of a program holds an object for longer than a call, and what only seems to."""

from __future__ import annotations

import contextvars
import functools
import gc
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from retrograd.frontend.python.holders import find_holdings


class Thing:
    """What is looked for, and what holds others as an attribute."""

    held: Any = None


class Slotted:
    __slots__ = ("__weakref__", "held")


class Pair(NamedTuple):
    first: Any
    second: int


KEPT: dict[str, Any] = {}
VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("VARIABLE", default=None)


def _words(things: list[Any]) -> list[str]:
    """How the only thing in ``things`` is held apart from that."""
    return [found.describe() for found in find_holdings([things.pop()], [])]


def _fill_dict(store: Any, thing: Any) -> None:
    store["a"] = thing


# What makes a store when a test begins: what was there before, only a search of the whole heap reads.
CONTAINERS: list[tuple[Callable[[], Any], Callable[[Any, Any], Any], str]] = [
    (dict, _fill_dict, "as 'a' in a dict"),
    (lambda: [1], list.append, "in a list"),
    (lambda: deque([2]), deque.append, "in a deque"),
    (set, set.add, "in a set"),
    (list, lambda store, thing: store.append(Pair(thing, 1)), "in a list"),
    (lambda: [[], {}], lambda store, thing: store[0].append(thing), "in a list"),
    (Thing, lambda store, thing: setattr(store, "held", thing), "as 'held' in attributes or globals"),
    (Slotted, lambda store, thing: setattr(store, "held", thing), "as 'held' in attributes or globals"),
    (torch.nn.ReLU, lambda store, thing: setattr(store, "held", thing), "as 'held' in attributes or globals"),
]


@pytest.mark.parametrize(("make", "fill", "words"), CONTAINERS)
def test_what_a_variable_holds(make: Callable[[], Any], fill: Callable[[Any, Any], Any], words: str) -> None:
    store, things = make(), [Thing()]
    fill(store, things[0])
    gone, found = weakref.ref(things[0]), find_holdings([things.pop()], [])
    said = {holding.describe() for holding in found}
    assert said == {words}
    for holding in found:
        holding.take_out()
    del found, holding
    is_gone = gone() is None
    assert is_gone


def _program() -> tuple[Callable[..., Any], list[Any]]:
    thing = Thing()

    def remember(new: Any = None) -> None:
        nonlocal thing
        thing = new or thing

    return remember, [thing]


@functools.lru_cache
def cached(number: int) -> tuple[Any, ...]:
    return (Thing(), number)


@pytest.mark.whole_heap
def test_what_holds_it_without_a_variable() -> None:
    """A closure of the model, a cache, a global, a class, the context, an attribute of this thread: one search."""
    remember, things = _program()
    KEPT["b"], Thing.held = Thing(), Slotted()
    token = VARIABLE.set([Thing()])
    of_thread = threading.local()
    of_thread.held = Thing()
    things += [cached(3)[0], KEPT["b"], Thing.held, VARIABLE.get()[0], of_thread.held]
    words = [
        "in a variable of a closure",
        "in the cache of cached()",
        "as 'b' in a dict",
        "as 'held' in attributes or globals",
        "in a list",
        "as 'held' in attributes or globals",
    ]
    expected = sorted(zip(map(id, things), words, strict=True))
    # In no variable of this function, which would hold them too.
    found = find_holdings([things.pop() for _ in words], [remember])
    assert sorted((id(holding.chain[0]), holding.describe()) for holding in found) == expected
    next(holding for holding in found if holding.chain[0] is Thing.held).take_out()
    del found
    KEPT.clear()
    VARIABLE.reset(token)
    assert Thing.held is None and Thing().held is None


class Ends:
    """What holds an object, and is not the program's for longer than a call."""

    @staticmethod
    def traceback(thing: Any) -> Any:
        def fails(inner: Any) -> None:
            raise ValueError(str(type(inner)))

        try:
            fails(thing)
        except ValueError as error:
            return error

    @staticmethod
    def generator(thing: Any) -> Any:
        def give(inner: Any) -> Iterator[Any]:
            yield 1
            yield inner

        started = give(thing)
        next(started)
        return started

    @staticmethod
    def log(thing: Any) -> Any:
        return logging.LogRecord("log", logging.INFO, "", 1, "%s", (thing,), None)

    @staticmethod
    def context_of_a_function(thing: Any) -> Any:
        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                ctx.held = thing
                return x * 2

        return Function.apply(torch.ones(1, requires_grad=True))  # type: ignore[no-untyped-call]

    @staticmethod
    def hook(thing: Any) -> Any:
        x = torch.ones(1, requires_grad=True) * 2
        x.register_hook(lambda gradient: (thing, gradient)[1])
        return x

    @staticmethod
    def ring(thing: Any) -> Any:
        ring: list[Any] = [thing]
        ring.append(ring)
        return None

    @staticmethod
    def weak(thing: Any) -> Any:
        return weakref.ref(thing), weakref.WeakValueDictionary({"a": thing})

    @staticmethod
    def graph(thing: Any) -> Any:
        graph = torch.fx.Graph()
        graph.placeholder("x").meta["val"] = thing
        return graph


@pytest.mark.parametrize("end", [name for name in vars(Ends) if not name.startswith("_")])
def test_what_ends_with_the_call(end: str) -> None:
    """Though a variable of the caller leads there."""
    gc.disable()
    try:
        things = [Thing()]
        kept = getattr(Ends, end)(things[0])
        said = _words(things)
        assert said == []
        del kept
    finally:
        gc.enable()


def test_objects_that_raise_when_they_are_asked() -> None:
    """A proxy of what is gone raises by ``isinstance``."""
    things = [Thing()]
    kept = [weakref.proxy(Thing()), things[0]]
    with pytest.raises(ReferenceError):
        isinstance(kept[0], int)
    said = _words(things)
    assert said == ["in a list"]


def test_variables_of_callers_are_left_as_they_are() -> None:
    """What they are read from is a copy that would keep alive what they held; unless the caller asked for it."""
    other = Thing()
    gone = weakref.ref(other)
    find_holdings([Thing()], [])
    del other
    is_gone = gone() is None
    copy = locals()
    find_holdings([Thing()], [])
    assert is_gone and copy["is_gone"]
