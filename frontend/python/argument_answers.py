# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Answers a model's questions about the contents of its arguments: ``if mask.all():``, ``n = int(lengths.max())``, or
how many ``x[labels >= 0]`` are; and of buffers of few numbers: ``if not self.started:``.

A trace does not know what is in a tensor. Where it was computed from those alone, by functions that are cheap, the
answer is the one for the tensors that are compiled for; before each call the same is asked of the tensors then, and
another answer is another program. What depends on parameters is not answered.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from retrograd.frontend.python.argument_functions import FunctionsOfArguments, Steps
from retrograd.frontend.python.branch_gradients import with_zero_gradients
from retrograd.frontend.python.python_tables import told_of
from retrograd.frontend.python.sanity_checks import CHEAP
from retrograd.frontend.python.source_locations import place_of_caller
from retrograd.frontend.python.unique_values import unique, unique_consecutive

# More than these, and asking takes longer than it is worth.
_MOST_ANSWERS, _MOST_STEPS, _MOST_NUMBERS = 64, 64, 64
_ALSO_NAMES = """
    __floordiv__ __radd__ __rmul__ __rtruediv__ __setitem__ __truediv__ __xor__ arange argmax argmin argsort
    bitwise_xor broadcast_to bucketize byte cat ceil chunk clamp clamp_max clamp_min concat count_nonzero cummax
    cumprod cumsum diff div expand expand_as fill_ fill_diagonal_ flip floor floor_divide fmod full full_like gather
    index_select interpolate isin linspace logical_xor masked_fill masked_fill_ maximum meshgrid minimum movedim
    narrow new_full new_ones new_zeros nonzero one_hot ones ones_like pad permute prod remainder repeat
    repeat_interleave roll round scatter scatter_add searchsorted sort split stack swapaxes swapdims t
    take_along_dim tensor tensor_split tile to topk transpose tril triu trunc type unbind unflatten unique
    unique_consecutive where zero_ zeros zeros_like
"""
_NAMES = CHEAP | frozenset(_ALSO_NAMES.split())


@dataclass(frozen=True)
class Answer:
    """``value`` is what ``question`` gives for the tensor that ``steps`` compute from the arguments; ``place`` is the
    line of the model that asks."""

    place: str
    value: bool | int | list[Any]
    question: Callable[[Tensor], Any]
    steps: Steps

    def __str__(self) -> str:
        return f"{' '.join(self.place.split())} ({self.value}, asked before each call)"

    def holds(self, arguments: Sequence[Tensor]) -> bool:
        """Whether the answer is the same for these tensors as arguments."""
        return bool(self.question(self.steps.run(arguments)) == self.value)


@dataclass(frozen=True)
class ToldOfArgument:
    """Holds what the model was told of an argument but for its contents, by the name of an attribute or method."""

    number: int
    name: str
    value: Any

    def holds(self, arguments: Sequence[Tensor]) -> bool:
        """Whether these arguments would say the same."""
        return bool(told_of(arguments[self.number], self.name) == self.value)

    def __str__(self) -> str:
        return f"the model asks an argument for {self.name}, which was {self.value}"


class Questions:
    """Asks what a program takes for granted, of ``count`` arguments and of buffers behind them. What depends on buffers
    alone is asked where one of those holds other numbers than last time, which is cheaper to see."""

    def __init__(self, answers: Sequence[Answer | ToldOfArgument], count: int) -> None:
        self._of_buffers = [
            answer
            for answer in answers
            if isinstance(answer, Answer)
            and not answer.steps.constants
            and min(answer.steps.arguments, default=0) >= count
        ]
        self._others = [a for a in answers if a not in self._of_buffers]
        self._places = sorted({place for answer in self._of_buffers for place in answer.steps.arguments})
        self._known: list[Tensor] = []

    def find_other(self, given: Sequence[Tensor]) -> Answer | ToldOfArgument | None:
        """The first whose answer is another one for these tensors."""
        other = next((answer for answer in self._others if not answer.holds(given)), None)
        if other is not None or not self._of_buffers:
            return other
        buffers = [given[place] for place in self._places]
        if self._known and all(map(_is_equal, buffers, self._known)):
            return None
        other = next((answer for answer in self._of_buffers if not answer.holds(given)), None)
        if other is None:
            self._known = [buffer.detach().clone() for buffer in buffers]
        return other


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and one.dtype == other.dtype and torch.equal(one, other)


@dataclass
class Answers:
    """The answers of one trace. ``functions`` know how its tensors were computed, ``examples`` are the arguments that
    are compiled for, if there are any."""

    functions: FunctionsOfArguments
    examples: Sequence[Tensor] | None
    found: list[Answer] = field(default_factory=list)

    def ask(self, tensor: Tensor, question: Callable[[Tensor], Any]) -> Any:
        """Put ``question`` to ``tensor``; returns truth values or integers. ``None`` where the answer does not depend
        on the arguments alone, is too much work, or is something else."""
        steps = self.functions.find(tensor, _NAMES, _MOST_STEPS)
        if self.examples is None or steps is None or len(self.found) == _MOST_ANSWERS:
            return None
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            value = question(steps.run(self.examples))
        if not _is_plain(value):
            return None
        self.found.append(Answer(place_of_caller().removeprefix(", at "), value, question, steps))
        return value


_OPEN: ContextVar[Answers | None] = ContextVar("answers of the trace", default=None)


@contextmanager
def answering(answers: Answers) -> Iterator[None]:
    """While this is open, questions are answered by ``answers``."""
    token = _OPEN.set(answers)
    try:
        # A tensor of the trace looks into what it wraps, around the modes.
        told = _told(FunctionalTensor.tolist)
        with mock.patch.object(FunctionalTensor, "tolist", told), mock.patch.object(torch, "cond", _cond(torch.cond)):
            yield
    finally:
        _OPEN.reset(token)


def ask(tensor: Tensor, question: Callable[[Tensor], Any]) -> Any:
    """Ask the answers of the trace that is being made; ``None`` where there is none."""
    answers = _OPEN.get()
    return None if answers is None else answers.ask(tensor, question)


def computed(func: Callable[..., Tensor], *args: Any) -> Tensor:
    """``func(*args)``, of which it is known that it was computed so."""
    answers = _OPEN.get()
    with torch.no_grad():
        result = func(*args)
    if answers is not None:
        answers.functions.note(result, func, args, {})
    return result


class AskedArguments(TorchFunctionMode):
    """While it is active, what a model asks of its arguments' contents is answered, where no other mode within knows
    better."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _OPEN.get() is None:
            return func(*args, **kwargs)
        question = bool if func is Tensor.item and _asks_for_truth() else _QUESTIONS.get(func)
        answer = None if question is None or len(args) != 1 or kwargs else ask(args[0], question)
        if answer is not None:
            return answer
        if (made := _MADE.get(func)) is not None and (result := made(*args, **kwargs)) is not None:
            return result
        settle = _SETTLED.get(func)
        if settle is not None:
            args, kwargs = settle(args, kwargs)
        return func(*args, **kwargs)


def _asks_for_truth() -> bool:
    """Whether a tensor of the trace looks at its number for its truth value alone."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame is not None and frame.f_code is FunctionalTensor.__bool__.__code__


def count(tensor: Tensor) -> int:
    """How many elements are set."""
    return int(torch.count_nonzero(tensor))


def _contents(tensor: Tensor) -> Any:
    return None if tensor.is_floating_point() or tensor.is_complex() else tensor.item()


def _list(tensor: Tensor) -> Any:
    return None if tensor.is_floating_point() or tensor.numel() > _MOST_NUMBERS else tensor.tolist()


def _told(tolist: Callable[[FunctionalTensor], Any]) -> Callable[[FunctionalTensor], Any]:
    def told(tensor: FunctionalTensor) -> Any:
        answer = ask(tensor, _list)
        return tolist(tensor) if answer is None else answer

    return told


def _cond(cond: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.cond`` that takes one branch, where the answer is known."""

    def told(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()) -> Any:
        if _LOOKS.get():
            return true_fn(*operands), false_fn(*operands)
        answer = ask(pred, bool) if isinstance(pred, Tensor) else bool(pred)
        if answer is None:
            return cond(pred, true_fn, false_fn, operands)
        taken, left = (true_fn, false_fn) if answer else (false_fn, true_fn)
        return with_zero_gradients(lambda: taken(*operands), lambda: _look(left, operands))

    return told


_LOOKS: ContextVar[bool] = ContextVar("a branch is run for what it depends on", default=False)


def _look(branch: Callable[..., Any], operands: Any) -> Any:
    """Run a branch for the graph of autograd's, whichever branches it takes itself."""
    token = _LOOKS.set(True)
    try:
        return branch(*operands)
    finally:
        _LOOKS.reset(token)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int)


_QUESTIONS: dict[Callable[..., Any], Callable[[Tensor], Any]] = {
    Tensor.__bool__: bool,
    Tensor.__int__: int,
    Tensor.__index__: _contents,
    Tensor.item: _contents,
    Tensor.tolist: _list,
}


Call = tuple[Sequence[Any], Mapping[str, Any]]


def _number(value: Any) -> Any:
    """The number in a tensor, if it can be told, and those in a tuple of them."""
    if type(value) in (tuple, list):
        return type(value)(map(_number, value))
    if not isinstance(value, Tensor) or value.dim():
        return value
    told = ask(value, _contents)
    return value if told is None else told


def _settle_numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    return tuple(map(_number, args)), kwargs


def _settle_all_but_first(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    return (*args[:1], *map(_number, args[1:])), {name: _number(value) for name, value in kwargs.items()}


def _bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor | None:
    """``torch.bincount`` of as many classes as there are; ``None`` where that cannot be told."""
    size = ask(input, lambda x: max(minlength, int(x.max()) + 1 if x.numel() else 0))
    if size is None:
        return None
    if weights is None:
        weights = torch.ones_like(input, dtype=torch.int64)
    elif weights.dtype is not torch.float32:
        weights = weights.double()
    return weights.detach().new_zeros(size).scatter_add(0, input.long(), weights.detach())


def _equal(input: Any, other: Any) -> bool | None:
    """``torch.equal`` of tensors of one shape; ``None`` where that cannot be told."""
    if not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return None
    if input.shape != other.shape:
        return False
    answer: bool | None = ask(computed(Tensor.eq, input, other), lambda found: bool(found.all()))
    return answer


def _settle_slices(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """The ends of slices as numbers."""
    keys = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not any(isinstance(key, slice) for key in keys):
        return args, kwargs
    settled = tuple(
        slice(*(_number(end) for end in (key.start, key.stop, key.step))) if isinstance(key, slice) else key
        for key in keys
    )
    return (args[0], settled if isinstance(args[1], tuple) else settled[0], *args[2:]), kwargs


def _settle_repeats(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """``output_size`` of ``repeat_interleave`` by a tensor of repeats, their sum."""
    given = dict(zip(("input", "repeats", "dim"), args, strict=False)) | dict(kwargs)
    repeats = given.get("repeats")
    if not isinstance(repeats, Tensor) or given.get("output_size") is not None:
        return args, kwargs
    size = ask(repeats, _sum_for(given["input"], given.get("dim")))
    return (args, kwargs) if size is None else (args, {**kwargs, "output_size": size})


def _sum_for(repeated: Tensor, dim: int | None) -> Callable[[Tensor], int]:
    length = repeated.numel() if dim is None else repeated.shape[dim]
    return lambda repeats: int(repeats.expand(length).sum())


# What takes nothing but numbers behind its first argument.
_SIZED = (
    *(F.interpolate, F.pad, torch.reshape, torch.split, torch.tile),
    *(Tensor.expand, Tensor.new_empty, Tensor.new_full, Tensor.new_ones, Tensor.new_zeros, Tensor.repeat),
    *(Tensor.reshape, Tensor.split, Tensor.tile, Tensor.unflatten, Tensor.view),
)
# What gives tensors of a size that is an answer; None where it cannot be told.
_MADE: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.bincount: _bincount,
    Tensor.bincount: _bincount,
    torch.equal: _equal,
    Tensor.equal: _equal,
    torch.unique: partial(unique, ask),
    Tensor.unique: partial(unique, ask),
    torch.unique_consecutive: partial(unique_consecutive, ask),
    Tensor.unique_consecutive: partial(unique_consecutive, ask),
}
_SETTLED: dict[Callable[..., Any], Callable[[Sequence[Any], Mapping[str, Any]], Call]] = {
    torch.arange: _settle_numbers,
    torch.narrow: _settle_all_but_first,
    Tensor.narrow: _settle_all_but_first,
    Tensor.__getitem__: _settle_slices,
    Tensor.__setitem__: _settle_slices,
    torch.repeat_interleave: _settle_repeats,
    Tensor.repeat_interleave: _settle_repeats,
    **dict.fromkeys((torch.empty, torch.full, torch.ones, torch.rand, torch.randn, torch.zeros), _settle_numbers),
    **dict.fromkeys(_SIZED, _settle_all_but_first),
}
