# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Arrays that a function of the model's draws from Python's random numbers, as arguments of the compiled program.

SpecAugment masks are such: a function that takes sizes and probabilities draws a mask with numpy and returns it as an
array, which the model makes a tensor of. Each call of the compiled program calls that function first, as eager would
in the middle of it, and takes what it returns as one more argument. It draws the numbers that decide nothing, whatever
they are (``coins.py``), at the same time.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType, FunctionType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from retrograd.frontend.python.coins import COINS, Coin, coin_of
from retrograd.frontend.python.source_locations import CaptureError, is_user_file

DRAWN = "retrograd_drawn"
"""The name of the argument that drawn arrays are given by."""
_REMEDY = "make a tensor of it with torch.tensor first, or pass it as an argument"
_CONVERSIONS = (torch.tensor, torch.as_tensor)
# Modules name a stand-in for as long as a model runs: one model at a time.
_LOCK = threading.RLock()


@dataclass(frozen=True)
class DrawingCall:
    """A call of a function that draws an array: of Python values alone, the same each time. Or of one that draws a
    number, for which ``coin`` stands."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    coin: Coin | None = None

    def draw(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Call the function, and give a copy of its array, if it gives one, as a tensor."""
        drawn = self.function(*self.args, **self.kwargs)
        return () if self.coin is not None else (torch.tensor(drawn, device=device),)


@dataclass(frozen=True)
class Drawing:
    """All that a model draws: ``calls`` one after the other. ``save`` gives what puts the generators that they draw
    from back to what they are now."""

    calls: tuple[DrawingCall, ...]
    save: Callable[[], Callable[[], None]]

    def draw(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Draw the arrays of a call of the model."""
        return tuple(array for call in self.calls for array in call.draw(device))


class DrawnError(CaptureError):
    """The model draws numbers from Python's generators; where it does so by ``drawing`` alone, it may be captured with
    the arrays as an argument."""

    def __init__(self, message: str, remedy: str, drawing: Drawing | None) -> None:
        super().__init__(message, remedy)
        self.drawing = drawing


class DrawnArray:
    """Stands for an array that was drawn: a tensor can be made of it, and its shape be asked for.

    Anything else would be done by numpy in eager, which no trace shows.
    """

    __slots__ = ("_tensor",)
    __array_ufunc__ = None

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return tuple(self._tensor.shape)

    @property
    def ndim(self) -> int:
        """How many axes the array has."""
        return self._tensor.dim()

    def __len__(self) -> int:
        return len(self._tensor)

    def __getattr__(self, name: str) -> Any:
        raise CaptureError(f"the model asks an array for {name} that was drawn from Python's random numbers", _REMEDY)

    def _refuse(self, *_: Any) -> Any:
        raise CaptureError("the model computes with an array that was drawn from Python's random numbers", _REMEDY)

    __bool__ = __iter__ = __getitem__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __array__ = __contains__ = __hash__ = __int__ = __float__ = __index__ = __invert__ = __neg__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __matmul__ = __rmatmul__ = __pow__ = _refuse
    __setitem__ = __reduce_ex__ = _refuse


def tensor_of(array: DrawnArray) -> torch.Tensor:
    """The tensor that a drawn array is given as."""
    tensor: torch.Tensor = object.__getattribute__(array, "_tensor")
    return tensor


class _Conversions(TorchFunctionMode):
    """Makes tensors of drawn arrays where the model has PyTorch do so."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        if func not in _CONVERSIONS or not args or type(args[0]) is not DrawnArray:
            return func(*args, **given)
        tensor = tensor_of(args[0])
        wanted = {name: given.pop(name) for name in ("dtype", "device") if name in given}
        requires_grad = given.pop("requires_grad", False)
        if given or len(args) > 1 or requires_grad:
            raise CaptureError("the model makes a tensor of a drawn array with options that are not known", _REMEDY)
        wanted = {name: value for name, value in wanted.items() if value is not None}
        return tensor.to(**wanted, copy=True) if wanted else tensor.clone()


class GivenArrays:
    """A model that is given the arrays which it draws, by the name :data:`DRAWN`; without them it draws them itself.

    ``wrapped`` is the model.
    """

    def __init__(self, model: Callable[..., Any], drawing: Drawing) -> None:
        is_module = isinstance(model, torch.nn.Module)
        # As a bound method has it: whose parameters are differentiated.
        self.__self__ = model if is_module else getattr(model, "__self__", None)
        self.__qualname__ = type(model).__name__ if is_module else getattr(model, "__qualname__", repr(model))
        self.wrapped = model
        self._calls = drawing.calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if DRAWN not in kwargs:
            return self.wrapped(*args, **kwargs)
        remaining, arrays = iter(self._calls), iter(kwargs.pop(DRAWN))

        def give(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DrawnArray | Coin:
            call = next(remaining, None)
            if call is None or (call.function, call.args, call.kwargs) != (function, args, kwargs):
                raise CaptureError(
                    f"the model calls {function.__qualname__} otherwise at each call",
                    "call it outside of the model and pass what it gives as an argument",
                )
            return DrawnArray(next(arrays)) if call.coin is None else call.coin

        with replaced({call.function for call in self._calls}, give), _Conversions():
            result = self.wrapped(*args, **kwargs)
        if next(remaining, None) is not None:
            raise CaptureError("the model draws less than it did", "draw outside of the model, and pass it")
        return result


def without_arrays(model: Callable[..., Any]) -> Callable[..., Any]:
    """The model as the user gave it."""
    return model.wrapped if isinstance(model, GivenArrays) else model


@contextmanager
def replaced(
    functions: Collection[Callable[..., Any]],
    give: Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any],
) -> Iterator[None]:
    """Have ``give`` called in place of these functions, wherever modules name them, until the block ends; in other
    threads they are themselves."""
    owner = threading.get_ident()

    def stand_in(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            is_owner = threading.get_ident() == owner
            return give(function, args, kwargs) if is_owner else function(*args, **kwargs)

        return call

    with _LOCK:
        stand_ins = {id(function): stand_in(function) for function in functions}
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


FindFrame = Callable[[Callable[[], Any], Callable[[], bool]], FrameType | None]
"""Runs the first until the second is false, and gives the frame in which it became so, if it did."""


def find_calls(
    run: Callable[[], Any], frame: FrameType | None, find_frame: FindFrame, drew: Callable[[], bool]
) -> tuple[DrawingCall, ...]:
    """The calls that give all the arrays and coins that ``run`` draws, found from the ``frame`` in which some were
    drawn first; none where something is drawn in another way.

    Each call of an array is of the outermost function around a frame that takes Python values alone. ``drew`` says
    whether numbers were drawn since it was last asked.
    """
    calls = _find_from(run, frame, find_frame, drew)
    # The frame may be of a function that gives what it made of a coin.
    return calls or _find_from(run, None, find_frame, drew)


def _find_from(
    run: Callable[[], Any], frame: FrameType | None, find_frame: FindFrame, drew: Callable[[], bool]
) -> tuple[DrawingCall, ...]:
    functions: set[Callable[..., Any]] = set(COINS)
    first = None if frame is None else _find_function(frame)
    functions.update(() if first is None else (first,))
    while True:
        seen = _Recorder(drew)
        frame = find_frame(partial(seen.run, run, functions), seen.is_unchanged)
        if frame is None:
            return tuple(seen.calls) if seen.gives_known else ()
        function = _find_function(frame)
        if function is None or function in functions:
            return ()
        functions.add(function)


class _Recorder:
    """Records the calls of functions, and tells what is drawn outside of them."""

    def __init__(self, drew: Callable[[], bool]) -> None:
        self.calls: list[DrawingCall] = []
        self.gives_known = True
        self._drew = drew
        self._drew_outside = self._is_inside = False

    def is_unchanged(self) -> bool:
        """Whether nothing was drawn outside of the functions so far."""
        self._drew_outside |= not self._is_inside and self._drew()
        return not self._drew_outside

    def run(self, run: Callable[[], Any], functions: Collection[Callable[..., Any]]) -> None:
        """Run ``run``, and record the calls of these."""
        self._drew()
        with replaced(functions, self._call):
            run()
        self.is_unchanged()

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        coin = coin_of(function, args, kwargs) if function in COINS else None
        # Arrays that such a function draws are another's affair.
        if self._is_inside or (function in COINS and coin is None):
            return function(*args, **kwargs)
        self.is_unchanged()
        self._is_inside = True
        try:
            result = function(*args, **kwargs)
        finally:
            self._drew()
            self._is_inside = False
        is_array = type(result) is np.ndarray and result.dtype.kind in "biuf"
        self.calls.append(DrawingCall(function, args, dict(kwargs), coin))
        self.gives_known &= (is_array or coin is not None) and _are_plain((args, kwargs))
        return result


def _find_function(frame: FrameType | None) -> FunctionType | None:
    """The outermost function of a module around a frame, of Python values alone, within the innermost module's call."""
    outermost: FrameType | None = None
    while frame is not None and (is_user_file(frame.f_code.co_filename) or outermost is None):
        is_numpys = frame.f_globals.get("__name__", "").partition(".")[0] == "numpy"
        if not is_numpys and _function_of(frame) is not None and _are_plain(_arguments(frame)):
            outermost = frame
        frame = frame.f_back
    return None if outermost is None else _function_of(outermost)


def _function_of(frame: FrameType) -> FunctionType | None:
    found = frame.f_globals.get(frame.f_code.co_name)
    return found if isinstance(found, FunctionType) and found.__code__ is frame.f_code else None


def _arguments(frame: FrameType) -> list[Any]:
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    return [frame.f_locals.get(name) for name in (*code.co_varnames[:count], *code.co_freevars)]


def _are_plain(values: Any) -> bool:
    """Whether these are Python values that are what they are: numbers, texts, and what holds these."""
    leaves = pytree.tree_leaves(values)
    return all(leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype) for leaf in leaves)
