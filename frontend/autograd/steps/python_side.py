# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A compiled backward at one step: its arguments, and what it calls in Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import GraphModule, Interpreter

from retrograd.contract.errors import RetrogradError
from retrograd.contract.hooks import CUSTOM_BACKWARD
from retrograd.frontend.autograd.engine.late_hooks import LATE
from retrograd.frontend.autograd.engine.python_calls import (
    Absent,
    Frame,
    PythonCall,
    ZerosForNone,
    accumulate_into,
    check_number,
)
from retrograd.frontend.autograd.hooks.packed_values import take_packed
from retrograd.frontend.autograd.steps.direct_step import ShortPlan
from retrograd.frontend.autograd.tracing.trace import TracedBackward


class Compiled(Protocol):
    """A compiled backward; ``notes`` are to be told with it."""

    @property
    def is_in_order(self) -> bool:
        """Whether hooks and functions are called in the order in which they were captured."""

    @property
    def is_rearranged(self) -> bool:
        """Whether all processes have to run it, or none."""

    @property
    def notes(self) -> Sequence[str]:
        """The hooks and functions that are not compiled, and why."""

    def find_disagreement(self, problem: str | None) -> str | None:
        """Why it is not to be used: what this process found, or why another one does not use it, where it has to."""

    def find_short_plan(self) -> ShortPlan | None:
        """The short way to run it, of which it is to be asked again while it ``may_be_short``."""

    @property
    def may_be_short(self) -> bool:
        """Whether there may come to be a short way to run it."""

    def run(self, arguments: Sequence[torch.Tensor | int], python: Any) -> list[torch.Tensor]:
        """Run it on the tensors and sizes that its graph takes, with a ``PythonSide`` to call."""


FAILURES = (RetrogradError, torch.OutOfMemoryError, MemoryError)
REMEDY = (
    "a compiled backward failed midway: gradients that came before are in .grad, and hooks up to there were called; "
    "set the gradients to None (optimizer.zero_grad()) and repeat the step, which runs eagerly"
)
"""What to do after a failure that eager cannot make good."""


def raised_in_python(error: BaseException) -> bool:
    """Whether an error of a compiled backward comes from a hook or function that it called."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is PythonCall.__call__.__code__:
            return True
        trace = trace.tb_next
    return False


def run_compiled(traced: TracedBackward, compiled: Compiled, frame: Frame) -> list[Any]:
    """The results of a backward; its frame is not usable afterwards, and its list of inputs is empty.

    Where what is compiled fails before anything of it shows, torch runs the graph: the frame's ``failure`` says so.
    """
    if packed := traced.packed:
        frame.packed = take_packed(frame.packed, packed)
    inputs, arguments = frame.inputs, traced.arguments(frame)
    if packed:
        frame.packed = [None if number in packed else value for number, value in enumerate(frame.packed)]
    # What the graph has taken and no call of Python looks at lives until its last use only: the list that it came in
    # is PyTorch's too.
    frame.inputs = {number: inputs[number] for number in traced.kept_inputs}
    inputs.clear()
    frame.find_absent, frame.is_in_order = traced.find_absent, compiled.is_in_order
    if traced.inlined:
        LATE.inline()
    side = _PythonSide(traced.calls.calls, traced.params, frame, traced.accumulated)
    try:
        given = compiled.run(arguments, side)
    except ZerosForNone:
        raise
    except FAILURES as error:
        if raised_in_python(error):
            raise
        # Not the error, whose traceback has the tensors.
        frame.failure = f"{type(error).__name__}: {error}"
        if side.began or traced.inlined or any(argument is None for argument in arguments):
            error.add_note(REMEDY)
            raise
        given = None
    if given is None:
        given = interpret(traced.graph_module, arguments, side)
    results = [None if number is None else given[number] for number in traced.results]
    if frame.absent is None:
        return results
    assert traced.capture is not None
    (sources,) = traced.capture.graph.output_node().args
    assert isinstance(sources, (list, tuple))
    pairs = zip(results, sources, strict=True)
    found = [r if r is not None and frame.absent.is_there(str(source)) else None for r, source in pairs]
    for result in found:
        check_number(result, frame)
    return found


@dataclass(slots=True)
class _PythonSide:
    """The calls of a graph, on this step's frame."""

    calls: Mapping[tuple[str, int], PythonCall]
    params: Sequence[int]
    frame: Frame
    accumulated: Sequence[tuple[int, str]]
    # Whether anything was called or accumulated.
    began: bool = False

    @property
    def collected(self) -> None:
        """Collectives run."""

    def call_hook(self, kind: str, hook: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        self.began = True
        return self.calls[kind, hook](self.frame, values)

    def call_backward(self, function: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        self.began = True
        return self.calls[CUSTOM_BACKWARD, function](self.frame, values)

    def accumulate_grad(self, param: int, gradient: torch.Tensor, owned: bool) -> None:
        self.began = True
        if self.frame.absent is not None:
            if not self._is_there(self.frame.absent, param):
                return
            check_number(gradient, self.frame)
        parameter = self.frame.inputs[self.params[param]]
        is_taken = owned and parameter.grad is None and not LATE.is_changed
        if is_taken and gradient.stride() == parameter.stride():
            # As AccumulateGrad takes over a gradient that nobody else has.
            parameter.grad = gradient
        else:
            accumulate_into(parameter, None, gradient)

    def _is_there(self, absent: Absent, param: int) -> bool:
        """Whether any gradient of a parameter is there: of several, which are rare, those that are not are zeros."""
        return any(absent.is_there(source) for number, source in self.accumulated if number == param)

    def final_callbacks(self) -> None:
        """The engine calls them when the backward has returned."""


def interpret(graph_module: GraphModule, arguments: Sequence[Any], python: Any) -> list[torch.Tensor]:
    """The results of the graph, which calls ``python`` as a compiled backward does."""
    with torch.no_grad():
        return list(_Interpreter(graph_module, python).run(*arguments))


class _Interpreter(Interpreter):
    def __init__(self, graph_module: GraphModule, python: Any) -> None:
        super().__init__(graph_module)
        self._python = python
        self.extra_traceback = False

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        match getattr(target, "_overloadpacket", None):
            case torch.ops.retrograd.create_token:
                return None
            case torch.ops.retrograd.call_hook:
                values, token, kind, number = args
                return self._python.call_hook(kind, number, values), token
            case torch.ops.retrograd.call_backward:
                values, token, number = args
                return self._python.call_backward(number, values), token
            case torch.ops.retrograd.accumulate_grad:
                gradient, token, param = args
                self._python.accumulate_grad(param, gradient, False)
                return token
            case torch.ops.retrograd.final_callbacks:
                return args[0]
        return super().call_function(target, args, kwargs)
