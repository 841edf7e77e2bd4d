# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A compiled backward at one step: its arguments, and what it calls in Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from retrograd.contract.hooks import CUSTOM_BACKWARD
from retrograd.frontend.autograd.engine.python_calls import Absent, Frame, PythonCall, accumulate_into
from retrograd.frontend.autograd.hooks.packed_values import take_packed
from retrograd.frontend.autograd.tracing.trace import TracedBackward


class Compiled(Protocol):
    """A compiled backward; ``notes`` are to be told with it."""

    @property
    def is_in_order(self) -> bool:
        """Whether hooks and functions are called in the order in which they were captured."""

    @property
    def notes(self) -> Sequence[str]:
        """The hooks and functions that are not compiled, and why."""

    def find_disagreement(self, problem: str | None) -> str | None:
        """Why it is not to be used: what this process found, or why another one does not use it, where it has to."""

    def run(self, arguments: Sequence[torch.Tensor | int], python: Any) -> list[torch.Tensor]:
        """Run it on the tensors and sizes that its graph takes, with a ``PythonSide`` to call."""


def run_compiled(traced: TracedBackward, compiled: Compiled, frame: Frame) -> list[Any]:
    """The results of a backward; its frame is not usable afterwards, and its list of inputs is empty."""
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
    given = compiled.run(arguments, _PythonSide(traced.calls.calls, traced.params, frame, traced.accumulated))
    results = [None if number is None else given[number] for number in traced.results]
    if frame.absent is None:
        return results
    assert traced.capture is not None
    (sources,) = traced.capture.graph.output_node().args
    assert isinstance(sources, (list, tuple))
    pairs = zip(results, sources, strict=True)
    return [r if r is not None and frame.absent.is_there(str(source)) else None for r, source in pairs]


@dataclass(slots=True)
class _PythonSide:
    """The calls of a graph, on this step's frame."""

    calls: Mapping[tuple[str, int], PythonCall]
    params: Sequence[int]
    frame: Frame
    accumulated: Sequence[tuple[int, str]]

    @property
    def collected(self) -> None:
        """Collectives run."""

    def call_hook(self, kind: str, hook: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self.calls[kind, hook](self.frame, values)

    def call_backward(self, function: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self.calls[CUSTOM_BACKWARD, function](self.frame, values)

    def accumulate_grad(self, param: int, gradient: torch.Tensor, owned: bool) -> None:
        if self.frame.absent is not None and not self._is_there(self.frame.absent, param):
            return
        parameter = self.frame.inputs[self.params[param]]
        if owned and parameter.grad is None and gradient.stride() == parameter.stride():
            # As AccumulateGrad takes over a gradient that nobody else has.
            parameter.grad = gradient
        else:
            accumulate_into(parameter, None, gradient)

    def _is_there(self, absent: Absent, param: int) -> bool:
        """Whether any gradient of a parameter is there: of several, which are rare, those that are not are zeros."""
        return any(absent.is_there(source) for number, source in self.accumulated if number == param)

    def final_callbacks(self) -> None:
        """The engine calls them when the backward has returned."""
