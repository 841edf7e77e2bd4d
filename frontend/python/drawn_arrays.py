# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Arrays that a function of the model's draws from Python's random numbers, as arguments of the compiled program.

SpecAugment masks are such: a function that takes sizes and probabilities draws a mask with numpy and returns it as an
array, which the model makes a tensor of. Each call of the compiled program calls that function first, as eager would
in the middle of it, and takes what it returns as one more argument.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType, FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from retrograd.frontend.python.source_locations import CaptureError

DRAWN = "drawn"
"""The name of the argument that drawn arrays are given by."""


@dataclass(frozen=True)
class DrawingCall:
    """A call of a function that draws an array: of Python values alone, the same each time."""

    function: FunctionType
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def draw(self, device: torch.device) -> torch.Tensor:
        """Call the function, and give its array as a tensor."""
        return torch.as_tensor(self.function(*self.args, **self.kwargs), device=device)


def draw_all(calls: Sequence[DrawingCall], device: torch.device) -> dict[str, tuple[torch.Tensor, ...]]:
    """Gives what these calls draw, one after the other, as an argument by name."""
    return {DRAWN: tuple(call.draw(device) for call in calls)}


class DrawnError(CaptureError):
    """The model draws numbers from Python's generators, all of them in these ``calls``: given their arrays as an
    argument, it may be captured."""

    def __init__(self, message: str, remedy: str, calls: Sequence[DrawingCall]) -> None:
        super().__init__(message, remedy)
        self.calls = tuple(calls)


class GivenArrays:
    """A model that is given the arrays which ``calls`` draw, by the name :data:`DRAWN`; without them it draws them
    itself."""

    def __init__(self, model: Callable[..., Any], calls: Sequence[DrawingCall]) -> None:
        owner = getattr(model, "__self__", None)
        # As a bound method has it: whose parameters are differentiated.
        self.__self__ = model if isinstance(model, torch.nn.Module) else owner
        self.__qualname__ = type(model).__name__ if isinstance(model, torch.nn.Module) else model.__qualname__
        self._model = model
        self._calls = tuple(calls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if DRAWN not in kwargs:
            return self._model(*args, **kwargs)
        remaining = iter(zip(self._calls, kwargs.pop(DRAWN), strict=True))

        def give(function: FunctionType, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
            call, drawn = next(remaining, (None, None))
            if call is None or drawn is None or (call.function, call.args, call.kwargs) != (function, args, kwargs):
                raise CaptureError(
                    f"the model calls {function.__qualname__} otherwise at each call",
                    "call it outside of the model and pass what it gives as an argument",
                )
            result: torch.Tensor = drawn
            return result

        functions = {call.function for call in self._calls}
        with replaced(functions, give), warnings.catch_warnings():
            # What is made a tensor of is one already.
            warnings.filterwarnings("ignore", "To copy construct from a tensor")
            return self._model(*args, **kwargs)


@contextmanager
def replaced(
    functions: set[FunctionType], give: Callable[[FunctionType, tuple[Any, ...], Mapping[str, Any]], Any]
) -> Iterator[None]:
    """Have ``give`` called in place of these functions, wherever modules name them, until the block ends."""
    stand_ins = {id(function): _stand_in(function, give) for function in functions}
    places = [
        (module.__dict__, name, value)
        for module in [*sys.modules.values()]
        for name, value in [*getattr(module, "__dict__", {}).items()]
        if id(value) in stand_ins
    ]
    try:
        for table, name, function in places:
            table[name] = stand_ins[id(function)]
        yield
    finally:
        for table, name, function in places:
            table[name] = function


def _stand_in(function: FunctionType, give: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return give(function, args, kwargs)

    return call


FindFrame = Callable[[Callable[[], Any], Callable[[], bool]], FrameType | None]
"""Runs the first until the second is false, and gives the frame in which it became so, if it did."""


def find_calls(
    run: Callable[[], Any], frame: FrameType | None, find_frame: FindFrame, drew: Callable[[], bool]
) -> list[DrawingCall]:
    """The calls that give all the arrays that ``run`` draws, found from the ``frame`` in which some were drawn first;
    none where something is drawn in another way.

    Each is of the outermost function around a frame that takes Python values alone. ``drew`` says whether numbers were
    drawn since it was last asked.
    """
    functions: set[FunctionType] = set()
    while frame is not None:
        function = _find_function(frame)
        if function is None or function in functions:
            return []
        functions.add(function)
        seen = _Recorder(drew)
        frame = find_frame(partial(seen.run, run, functions), seen.is_unchanged)
        if frame is None:
            return seen.calls if seen.gives_arrays else []
    return []


class _Recorder:
    """Records the calls of functions, and tells what is drawn outside of them."""

    def __init__(self, drew: Callable[[], bool]) -> None:
        self.calls: list[DrawingCall] = []
        self.gives_arrays = True
        self._drew = drew
        self._drew_outside = self._is_inside = False

    def is_unchanged(self) -> bool:
        """Whether nothing was drawn outside of the functions so far."""
        self._drew_outside |= not self._is_inside and self._drew()
        return not self._drew_outside

    def run(self, run: Callable[[], Any], functions: set[FunctionType]) -> None:
        """Run ``run``, and record the calls of these."""
        self._drew()
        with replaced(functions, self._call):
            run()
        self.is_unchanged()

    def _call(self, function: FunctionType, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.is_unchanged()
        self._is_inside = True
        result = function(*args, **kwargs)
        self._drew()
        self._is_inside = False
        self.calls.append(DrawingCall(function, args, dict(kwargs)))
        is_array = isinstance(result, np.ndarray) and result.dtype.kind in "biuf"
        self.gives_arrays &= is_array and _is_plain((args, kwargs))
        return result


def _find_function(frame: FrameType | None) -> FunctionType | None:
    outermost: FrameType | None = None
    while frame is not None and _is_plain(_arguments(frame)):
        outermost, frame = frame, frame.f_back
    if outermost is None:
        return None
    found = outermost.f_globals.get(outermost.f_code.co_name)
    return found if isinstance(found, FunctionType) and found.__code__ is outermost.f_code else None


def _arguments(frame: FrameType) -> list[Any]:
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    return [frame.f_locals.get(name) for name in (*code.co_varnames[:count], *code.co_freevars)]


def _is_plain(values: Any) -> bool:
    """Whether these are Python values that are what they are: numbers, texts, and what holds these."""
    leaves = pytree.tree_leaves(values)
    return all(leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype) for leaf in leaves)
