# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The shortest way to run a backward that is one function of small tensors: where they begin is all that is asked of
them, at steps that lie as the one before did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import add
from typing import Any, Protocol

import torch

from retrograd.frontend.autograd.engine.python_calls import accumulate_into
from retrograd.frontend.autograd.steps.layouts import Part
from retrograd.frontend.autograd.steps.shared_memory import gather
from retrograd.frontend.autograd.tracing.trace import TracedBackward

_address_of = torch.Tensor.data_ptr


class ShortPlan(Protocol):
    """A plan of one function and accumulations of what it gives."""

    @property
    def call(self) -> Callable[[Sequence[int]], list[torch.Tensor] | None]:
        """Calls the function on arguments that begin at these addresses; gives None where nothing has run."""

    @property
    def taken(self) -> tuple[int, ...]:
        """Which arguments of the plan the function takes."""

    @property
    def accumulations(self) -> tuple[tuple[int, int, bool], ...]:
        """Each as (parameter, result that is accumulated into it, whether nobody else has that result)."""

    @property
    def results(self) -> tuple[int, ...]:
        """The results of the function that are the plan's."""

    def takes(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether arguments of the plan are of the form that it is for."""


class DirectStep:
    """Runs a short plan on inputs that lie as those that it was made with: of the same sizes and strides, which is for
    a guard to say, and at the same distance from the memory that the graph takes."""

    __slots__ = ("_accumulations", "_call", "_distances", "_fits", "_parts", "_results", "_take", "lying")

    def __init__(self, traced: TracedBackward, plan: ShortPlan, inputs: Sequence[torch.Tensor]) -> None:
        numbers = [traced.inputs[place] for place in plan.taken]
        self._call, self._take = plan.call, gather(numbers)
        distances = [traced.lay_out(n, inputs[n]).data_ptr() - inputs[n].data_ptr() for n in numbers]
        self._distances = distances if any(distances) else None
        # Of whose memory more is taken than they are.
        parts = [number for number in numbers if isinstance(traced.layouts.get(number), Part)]
        self._parts = [(n, inputs[n].storage_offset(), inputs[n].untyped_storage().nbytes()) for n in parts]
        pairs = [(traced.params[param], result, owned) for param, result, owned in plan.accumulations]
        self._accumulations = tuple(pairs)
        # Whether results are gradients as they come, where there are none yet.
        self._fits: list[bool] | None = None
        self._results = tuple([None if number is None else plan.results[number] for number in traced.results])
        # Whose strides have to be as they were.
        self.lying = frozenset({*numbers, *[number for number, _, _ in pairs]})

    def run(self, inputs: list[torch.Tensor]) -> list[Any] | None:
        """The results of a step, for whose inputs the guard holds; the list is empty after it. None where it is to run
        in another way: then nothing has run."""
        for number, offset, size in self._parts:
            tensor = inputs[number]
            if tensor.storage_offset() != offset or tensor.untyped_storage().nbytes() != size:
                return None
        addresses = map(_address_of, self._take(inputs))
        given = self._call([*addresses] if self._distances is None else [*map(add, addresses, self._distances)])
        if given is None:
            return None
        into = [(inputs[number], given[result]) for number, result, _ in self._accumulations]
        if self._fits is None:
            # As AccumulateGrad takes over a gradient that nobody else has.
            kinds = zip(into, self._accumulations, strict=True)
            self._fits = [owned and g.stride() == parameter.stride() for (parameter, g), (_, _, owned) in kinds]
        # PyTorch has the list too.
        inputs.clear()
        for (parameter, gradient), fits in zip(into, self._fits):  # noqa: B905 (as many, each time)
            if fits and parameter.grad is None:
                parameter.grad = gradient
            else:
                accumulate_into(parameter, None, gradient)
        return [None if number is None else given[number] for number in self._results]


def find_direct_step(traced: TracedBackward, plan: ShortPlan, inputs: Sequence[torch.Tensor]) -> DirectStep | None:
    """The direct way to run a backward at steps like this one; None where Python has a part in it, or where what the
    graph takes is copied together first."""
    if traced.calls.calls or traced.extras or traced.sizes or traced.inlined or not plan.taken:
        return None
    given = [inputs[number] for number in traced.inputs]
    bases = [traced.lay_out(number, tensor) for number, tensor in zip(traced.inputs, given, strict=True)]
    is_there = all(_memory_of(b) == _memory_of(t) for b, t in zip(bases, given, strict=True))
    return DirectStep(traced, plan, inputs) if is_there and plan.takes(bases) else None


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
