# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which Python a model runs while it is traced, and what of it is other at each call: random numbers and clocks.

A trace holds what Python's own generators, numpy's and clocks gave at that time, and would give it for ever. What is
drawn shows in a generator's state; which functions ran, and who called a clock, a profiler in C says. Only where
something is refused is the model run once more, line by line, to find the line.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch.utils import checkpoint

from retrograd.frontend.python.call_profiler import CallProfiler, call_profiler
from retrograd.frontend.python.drawn_arrays import Drawing, DrawnError, find_calls
from retrograd.frontend.python.found_lines import (
    GENERATED,
    Found,
    alone,
    describe_line,
    find_call,
    find_line,
    is_library,
    is_users,
    run_profiled,
)
from retrograd.frontend.python.generators import (
    Changes,
    generator_state,
    is_same_state,
    restore_generators,
    save_generators,
)
from retrograd.frontend.python.source_locations import IN_PARTS, CaptureError, is_user_file

_CHECKPOINT = checkpoint.__file__
_OF_DATACLASSES = "__create_fn__."
# As the profiler names functions in C.
_CLOCKS = re.compile(r"<built-in method (time\.(?!sleep)\w+|now|utcnow|today|posix\.urandom|_?io\.open)>")
# What puts a hook on a node of autograd's graph, or on what one keeps.
_HOOKING = "register_hook|register_prehook|register_hooks"
_HOOKS = re.compile(rf"<method '({_HOOKING})' of '.*' objects>")
# The same of a tensor, and what calls a function whose backward is Python.
_IN_BACKWARD = (
    torch.Tensor.register_hook.__code__,
    torch.Tensor.register_post_accumulate_grad_hook.__code__,
    torch.autograd.Function.apply.__code__,
)
# Of PyTorch's generators, what decides which numbers come next, and what tells them.
_SEEDING = "manual_seed|seed|initial_seed|set_state|graphsafe_set_state"
_SEEDS = re.compile(rf"<method '({_SEEDING})' of 'torch._C.Generator' objects>")
# Both are looked for wherever they are called.
_ANYWHERE = re.compile(f"{_HOOKING}|{_SEEDING}")
_INSTEAD = "decide it outside of the model and pass it as an argument, or use torch.rand, which differs at each call; "
_REMEDY = f"{_INSTEAD}{IN_PARTS}"
# Dynamo takes what such a generator draws first for a constant.
_REMEDY_OF_OBJECTS = f"{_INSTEAD}or use retrograd.enable(), which compiles the backward as it runs"
_FILE_REMEDY = "read it before the model is called, and pass what it has as an argument or keep it as an attribute"
_CLOCK_REMEDY = "take it out of the model, or leave it out where torch.compiler.is_compiling()"


@dataclass
class PythonSeen:
    """The Python that a model ran: the code of its functions, and the variables of the environment that it read, each
    with what it was then (``None`` where it was not set), or that it read all of them. ``read`` has the names of
    attributes that it asked for by ``getattr`` and ``hasattr``; ``asks_compiling`` says that it asked whether it
    compiles, ``hooks_graph`` that hooks were put on autograd's graph, or custom functions, whose backward is Python."""

    codes: set[CodeType] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    reads_environment: bool = False
    # What it asked of parameters and buffers but for their contents, with the name of each.
    asked: set[tuple[str, str]] = field(default_factory=set)
    environment: dict[str, str | None] = field(default_factory=dict)
    asks_compiling: bool = False
    hooks_graph: bool = False


def run_watched(run: Callable[[], Any], seen: PythonSeen, generators: Mapping[str, Any]) -> Any:
    """Run ``run``, add the Python that it ran to ``seen``, and return its result. ``generators`` are those that it may
    draw from, by name, beside those of ``random`` and ``numpy.random``; they are afterwards as they were.

    Raises:
        CaptureError: it drew random numbers from one of them, seeded PyTorch's, or asked a clock; names the line.
    """
    known = {"random": random, "numpy.random": np.random, **generators}
    before = {name: generator_state(generator) for name, generator in known.items()}
    seeded = torch.default_generator.get_state()
    profiler = call_profiler(_is_told, _has_calls)
    with alone(), _watched_environment(seen), _watched_attributes(seen):
        profiler.enable(subcalls=True, builtins=True)
        try:
            result = run()
        except BaseException:
            restore_generators(known, before)
            raise
        finally:
            profiler.disable()
    drawn = [name for name, generator in known.items() if not is_same_state(generator_state(generator), before[name])]
    if drawn:
        restore_generators(known, before)
        line, frame = find_line(run, lambda: is_same_state(generator_state(known[drawn[0]]), before[drawn[0]]))
        restore_generators(known, before)
        if line is not None:
            calls = find_calls(run, frame, lambda again, holds: find_line(again, holds)[1], Changes(known).happened)
            restore_generators(known, before)
            drawing = Drawing(calls, partial(save_generators, known)) if calls else None
            remedy = _REMEDY_OF_OBJECTS if isinstance(known[drawn[0]], random.Random) else _REMEDY
            raise DrawnError(
                f"the model draws random numbers from Python's {drawn[0]}, {_FROZEN}{line}", remedy, drawing
            )
    entries = profiler.getstats()
    seen.hooks_graph |= any(_runs_in_backward(entry.code) for entry in entries)
    _refuse_seeding(run, entries, seeded)
    of_pytorch = _generated_for_pytorch(entries)
    for entry in entries:
        if isinstance(entry.code, str) or not is_users(entry.code) or entry.code in of_pytorch:
            continue
        # What a dataclass is filled by reads nothing, and may be PyTorch's, which keeps some and makes others anew.
        if entry.code.co_qualname.startswith(_OF_DATACLASSES):
            continue
        seen.codes.add(entry.code)
        for called in entry.calls or ():
            seen.asks_compiling |= _asks_compiling(called.code)
            clock = _clock_name(called.code)
            # What is not called again was done once and for all, such as an import.
            place = find_call(run, entry.code, called.code) if clock else None
            if place is not None:
                remedy = _FILE_REMEDY if clock is not None and clock.endswith("io.open") else _CLOCK_REMEDY
                raise CaptureError(f"the model calls {clock}, {_FROZEN}{place}", remedy)
    return result


def _is_told(code: CodeType) -> bool:
    return code.co_filename == GENERATED or _asks_compiling(code) or _clock_name(code) is not None


def _has_calls(code: CodeType) -> bool:
    return is_users(code) or any(map(_ANYWHERE.fullmatch, code.co_names))


def _runs_in_backward(code: Any) -> bool:
    return _HOOKS.fullmatch(code) is not None if isinstance(code, str) else code in _IN_BACKWARD


class BackwardWatch:
    """Sees which Python of the user's runs between :meth:`start` and :meth:`stop`: hooks on autograd's graph and
    backwards of custom functions, whose ``codes`` it has."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self._profiler: CallProfiler | None = None
        self._set_aside = contextlib.ExitStack()

    @property
    def is_watching(self) -> bool:
        """Whether it has begun, and not ended."""
        return self._profiler is not None

    def start(self) -> None:
        """Begin, or begin anew."""
        self.stop()
        self._set_aside.enter_context(alone())
        self._profiler = call_profiler(lambda _code: False, lambda _code: False)
        self._profiler.enable(subcalls=True, builtins=False)

    def stop(self) -> None:
        """End, if it has begun."""
        if self._profiler is not None:
            self._profiler.disable()
            self._set_aside.close()
            codes = {entry.code for entry in self._profiler.getstats() if not isinstance(entry.code, str)}
            self._profiler, self.codes = None, {code for code in codes if is_users(code)}


def _generated_for_pytorch(entries: Sequence[Any]) -> set[CodeType]:
    """Code without a file, of dataclasses say, that PyTorch alone calls: there is some at the first of several traces
    that is not at the next, where what was parsed is kept."""
    called: dict[bool, set[CodeType]] = {False: set(), True: set()}
    for entry in entries:
        by_others = isinstance(entry.code, str) or is_user_file(entry.code.co_filename)
        called[by_others] |= {c.code for c in entry.calls or () if getattr(c.code, "co_filename", "") == GENERATED}
    return called[False] - called[True]


def _refuse_seeding(run: Callable[[], Any], entries: Sequence[Any], before: torch.Tensor) -> None:
    """Refuse a model that sets PyTorch's default generator to a state, or asks for its seed: what is compiled draws
    numbers from a seed of each call. Of a model that is refused, the generator is given its state ``before``."""
    names = {entry.code for entry in entries if isinstance(entry.code, str) and _SEEDS.fullmatch(entry.code)}
    place = _find_seeding(run, names) if names else None
    if place is not None:
        torch.default_generator.set_state(before)
        raise CaptureError(
            f"the model sets or asks for the state of PyTorch's random numbers, which compiled code does not{place}",
            "draw them before the model is called and pass them as an argument, or from a torch.Generator of its own; "
            "or use retrograd.enable(), which compiles the backward as it runs",
        )


def _find_seeding(run: Callable[[], Any], names: set[str]) -> str | None:
    """Run the model once more, up to where it calls one of these methods of a default generator, other than as
    ``checkpoint`` does; ``None`` where it does not."""
    defaults = {id(torch.default_generator), *map(id, torch.cuda.default_generators)}

    def on_event(frame: FrameType, event: str, arg: Any) -> None:
        if event != "c_call" or id(getattr(arg, "__self__", None)) not in defaults:
            return
        if f"<method '{arg.__name__}' of 'torch._C.Generator' objects>" in names:
            user = _find_user(frame)
            if _is_called_from(frame, _CHECKPOINT, user):
                return
            raise Found("" if user is None else describe_line(user, user.f_lineno))

    return run_profiled(run, on_event)


def _is_called_from(frame: FrameType | None, filename: str, outermost: FrameType | None) -> bool:
    """Whether code of a file is on the way from a frame to one that it was called from."""
    while frame is not outermost and frame is not None and frame.f_code.co_filename != filename:
        frame = frame.f_back
    return frame is not outermost and frame is not None


def _find_user(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not is_users(frame.f_code):
        frame = frame.f_back
    return frame


_FROZEN = "which would be compiled in as they were while tracing"


def _asks_compiling(code: Any) -> bool:
    """Whether this is ``torch.compiler.is_compiling``, or an older name for it."""
    return not isinstance(code, str) and code.co_name == "is_compiling" and not is_user_file(code.co_filename)


def _clock_name(code: Any) -> str | None:
    """The function that gives another value at each call, if ``code`` is one's."""
    if isinstance(code, str):
        found = _CLOCKS.fullmatch(code)
        return found[1].replace("posix.", "os.").replace("_io.", "io.") if found else None
    module = os.path.splitext(os.path.basename(code.co_filename))[0] if is_library(code.co_filename) else ""
    named = module in ("uuid", "secrets") or code.co_qualname.startswith("SystemRandom.")
    return f"{module}.{code.co_qualname}" if named and not code.co_name.startswith("__") else None


@contextlib.contextmanager
def _watched_environment(seen: PythonSeen) -> Iterator[None]:
    """Note which variables of the environment the model reads."""
    kind, thread = type(os.environ), threading.get_ident()
    getitem, keys = kind.__getitem__, kind.__iter__

    def is_asked(table: Any) -> bool:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and is_library(frame.f_code.co_filename):
            frame = frame.f_back
        is_models = frame is not None and is_users(frame.f_code) and threading.get_ident() == thread
        return table in (os.environ, os.environb) and is_models

    def read(self: Any, key: Any) -> Any:
        if is_asked(self):
            seen.environment[os.fsdecode(key)] = None
            seen.environment[os.fsdecode(key)] = os.fsdecode(getitem(self, key))
        return getitem(self, key)

    def read_all(self: Any) -> Iterator[Any]:
        if is_asked(self):
            seen.reads_environment = True
        return keys(self)

    kind.__getitem__, kind.__iter__ = read, read_all  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__getitem__, kind.__iter__ = getitem, keys  # type: ignore[method-assign]


@contextlib.contextmanager
def _watched_attributes(seen: PythonSeen) -> Iterator[None]:
    """Note which attributes the model reads by names that may be in none of its code. Other threads ask for theirs."""
    thread = threading.get_ident()
    originals = {"getattr": builtins.getattr, "hasattr": builtins.hasattr}

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def ask(*args: Any) -> Any:
            is_named = len(args) > 1 and isinstance(args[1], str) and threading.get_ident() == thread
            if is_named and is_users(sys._getframe(1).f_code):
                seen.read.add(args[1])
            return function(*args)

        return ask

    for name, function in originals.items():
        setattr(builtins, name, noting(function))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(builtins, name, function)
