# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A compiled backward is rehearsed once before it is used: on the tensors of the run that was recorded, whose gradients
it has to give. Hooks and functions are not called again; they give what they gave."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch

from retrograd.contract.hooks import CUSTOM_BACKWARD
from retrograd.frontend.autograd.hooks.hook_tape import waits_of
from retrograd.frontend.autograd.steps.float64_reference import (
    ExactRun,
    OtherRoundings,
    is_as_near_as_eager,
    is_of_the_same,
)
from retrograd.frontend.autograd.steps.recorder import Recorder
from retrograd.frontend.autograd.tracing.trace import TracedBackward
from retrograd.frontend.verification.distances import norms_of_finite
from retrograd.frontend.verification.loss_scale import are_finite
from retrograd.frontend.verification.rounding import find_tolerances

_LOG = logging.getLogger("retrograd")
# The most that a gradient may be off, relative to its norm. Rounding of sums alone is far below.
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
_LEAST = 1e-6


@dataclass(frozen=True)
class _Doubt:
    """A gradient that is not as recorded: of which input, which of its gradients, and how it differs."""

    index: int
    place: int
    gradient: torch.Tensor
    error: str


class Rehearsal:
    """Stands for the Python side of a backward; compares the gradients instead of accumulating them, each as it comes:
    to keep those that are right would take the memory of all parameters."""

    def __init__(self, traced: TracedBackward, recorded: Recorder) -> None:
        self._traced, self._recorded = traced, recorded
        self._updated: list[tuple[torch.Tensor, torch.Tensor]] = []
        # How many gradients came, by the number of the input.
        self._counts: Counter[int] = Counter()
        self._doubts: list[_Doubt] = []
        self._arguments: list[torch.Tensor | int] = []
        graph = traced.graph_module.graph
        tolerances = find_tolerances(graph, _tolerance_of)
        self._allowed = max(tolerances.values(), default=0.0)
        self._allowed_gradients: dict[int, float] = {}
        for node in graph.find_nodes(op="call_function", target=torch.ops.retrograd.accumulate_grad.default):
            gradient, _, param = node.args
            index = traced.params[param]
            self._allowed_gradients[index] = max(self._allowed_gradients.get(index, 0.0), tolerances[gradient])

    def restore(self, arguments: Sequence[torch.Tensor | int]) -> list[torch.Tensor | int] | None:
        """The arguments as they were before hooks that are part of the graph wrote to them, or gave back their memory;
        None where others wrote to them."""
        before = {
            id(call.tape.tensors[n]): (call.tape.tensors[n], call.tape.before[n].clone())
            for call in reversed(self._recorded.watched.values())
            for n in call.updates
        }
        restored = [a if isinstance(a, int) else _restored(a, before) for a in arguments]
        for place, number in enumerate(self._traced.inputs):
            if number in self._recorded.freed:
                restored[place] = self._traced.lay_out(number, self._recorded.freed[number])
        # Sizes come last.
        lost = [
            number
            for number, argument, own in zip(self._traced.inputs, arguments, restored, strict=False)
            if number in self._recorded.written and own is argument
        ]
        self._updated = list(before.values()) if self._recorded.inlined else []
        self._arguments = list(restored)
        return None if lost else restored

    @cached_property
    def collected(self) -> Mapping[str, torch.Tensor]:
        """The results of collectives, of hooks that are part of the graph, in the recorded run: other processes may not
        rehearse at this moment."""
        found: dict[str, torch.Tensor] = {}
        for function, node in self._traced.inlined.items():
            given = self._recorded.inlined[node].tape.collected
            found |= {f"{function}.{name}": t for name, t in zip(waits_of(len(given)), given, strict=True)}
        return found

    def call_hook(self, kind: str, hook: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return what the hook gave in the recorded run."""
        return self._given(kind, hook)

    def call_backward(self, function: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return what the function gave in the recorded run."""
        return self._given(CUSTOM_BACKWARD, function)

    def accumulate_grad(self, param: int, gradient: torch.Tensor, owned: bool) -> None:
        """Compare the gradient with the one that was recorded."""
        index = self._traced.params[param]
        place, expected = self._counts[index], self._recorded.gradients.get(index, [])
        self._counts[index] += 1
        if place < len(expected):
            error = _error(gradient, expected[place], self._allowed_gradients.get(index, 0.0))
            if error is not None:
                self._doubts.append(_Doubt(index, place, gradient, error))

    def final_callbacks(self) -> None:
        """Nothing."""

    def _given(self, kind: str, number: int) -> list[torch.Tensor]:
        call = self._traced.calls.calls[kind, number]
        if not call.results:
            return []
        given = self._recorded.given[call.node]
        return [tensor.clone() for tensor in ([given] if call.single else given) if tensor is not None]

    def find_difference(self, results: Sequence[torch.Tensor]) -> str | None:
        """Where the gradients, or these results, are not those recorded."""
        for index, expected in self._recorded.gradients.items():
            if self._counts[index] != len(expected):
                return f"input {index} gets {self._counts[index]} gradients instead of {len(expected)}"
        for doubt in self._doubts:
            index, eager = doubt.index, self._recorded.gradients[doubt.index][doubt.place]
            allowed = self._allowed_gradients.get(index, 0.0)
            if not self._is_rounding(doubt.gradient, eager, allowed, index, doubt.place):
                return f"the gradient of input {index}, of shape {list(eager.shape)}, {doubt.error}"
        for after, mine in self._updated:
            if (error := _error(mine, after, self._allowed)) is not None:
                return f"what a hook writes to a tensor of shape {list(after.shape)} {error}"
        for number, result in enumerate(self._traced.results):
            if result is None:
                continue
            mine, eager = results[result], self._recorded.outputs[number]
            error = _error(mine, eager, self._allowed)
            if error is not None and not self._is_rounding(mine, eager, self._allowed, None, result):
                return f"result {number} {error}"
        return None

    @property
    def tells_nothing(self) -> bool:
        """Whether gradients of the recorded run are infinite or none, as those of a loss that is scaled up may be."""
        recorded = [*chain.from_iterable(self._recorded.gradients.values()), *self._recorded.outputs]
        return not are_finite(recorded)

    def _is_rounding(
        self, mine: torch.Tensor, eager: torch.Tensor, allowed: float, index: int | None, place: int
    ) -> bool:
        """Whether a value that differs from eager's is as near to float64's: of what is accumulated into an input, or
        of the results. Both are of one trace, so that eager's has to be what it computes."""
        exact = self._exact
        if exact is None or mine.shape != eager.shape or mine.dtype != eager.dtype:
            return False
        wanted = exact.find(index, place)
        tolerance = max(_tolerance_of(eager.dtype), allowed)
        same = is_of_the_same(eager, wanted, tolerance, exact.largest)
        if same and is_as_near_as_eager(mine, eager, wanted, tolerance):
            return True
        return self._other_roundings is not None and self._other_roundings.explain([mine, eager], wanted, index, place)

    @cached_property
    def _exact(self) -> ExactRun | None:
        """The backward in float64; None where it cannot be computed."""
        run = ExactRun(self._traced, self._all_given())
        try:
            run.compute(self._arguments)
        except Exception as error:  # noqa: BLE001 (then eager's values are all there is to compare with)
            _LOG.info("no float64 to compare with: %s: %s", type(error).__name__, error)
            return None
        return run

    @cached_property
    def _other_roundings(self) -> OtherRoundings | None:
        """The backward with other roundings; None where there is no memory for it, say."""
        try:
            return OtherRoundings(self._traced, self._all_given(), self._arguments)
        except Exception as error:  # noqa: BLE001 (then float64 is all there is to compare with)
            _LOG.info("no other roundings to compare with: %s: %s", type(error).__name__, error)
            return None

    def _all_given(self) -> dict[tuple[str, int], list[torch.Tensor]]:
        return {key: self._given(*key) for key in self._traced.calls.calls}


def _restored(argument: torch.Tensor, before: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The tensor as it was: itself, or a part of the copy of what it shares memory with."""
    if id(argument) in before:
        return before[id(argument)][1]
    for owner, copy in before.values():
        if owner.untyped_storage().data_ptr() == argument.untyped_storage().data_ptr():
            offset = argument.storage_offset() - owner.storage_offset()
            return copy.as_strided(argument.size(), argument.stride(), offset)
    return argument


def _tolerance_of(dtype: torch.dtype) -> float:
    return _TOLERANCE.get(dtype, 1e-1) if dtype.is_floating_point else 0.0


def _error(mine: torch.Tensor, eager: torch.Tensor, allowed: float) -> str | None:
    if mine.shape != eager.shape or mine.dtype != eager.dtype:
        return f"is {mine.dtype} {list(mine.shape)} instead of {eager.dtype} {list(eager.shape)}"
    if not eager.dtype.is_floating_point:
        return None if torch.equal(mine, eager) else "differs from eager's"
    tolerance = max(_tolerance_of(eager.dtype), allowed)
    norms = norms_of_finite(mine, eager)
    if norms is None:
        wide, expected = mine.to(torch.float64), eager.to(torch.float64)
        finite = expected.isfinite()
        if not torch.equal(finite, wide.isfinite()):
            return "is finite where eager's is not, or the other way round"
        norms = (wide - expected)[finite].norm().item(), expected[finite].norm().item()
    off, norm = norms
    return None if off <= tolerance * norm + _LEAST else f"is off by {off:.2g}, where eager's has norm {norm:.2g}"
