# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A traced backward in float64: how far from it the compiled one is, and how far eager is.

Gradients that are zero but for rounding, as that of a bias in front of a batch norm, have no digits in common in any
two runs. What is as near to float64 as eager is right; so is what is as near as the trace with every op rounded another
way, where eager's value is within that too: an inverse of a matrix that is nearly singular, say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Interpreter, Node

from retrograd.contract.hooks import CUSTOM_BACKWARD
from retrograd.frontend.autograd.tracing.trace import TracedBackward
from retrograd.frontend.verification.judgement import SHAKES
from retrograd.frontend.verification.other_roundings import Rounded, is_float, move

# As for the fuzzer's programs: a compiled value may be so many times further from float64 than eager's.
TIMES_EAGERS = 20.0
# How many units of the last place eager may be off, of the largest value of a graph, for that to be rounding.
_UNITS = 100.0
_WIDER = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64}
_WIDER[torch.complex64] = torch.complex128


class NoExactValues(Exception):
    """A graph does not run in float64: it looks at the bits of numbers, draws some, or writes to its inputs."""


class TracedRun(Interpreter):
    """Runs the graph of a traced backward, in which calls of Python give what they gave. ``results`` are those of the
    graph, ``gradients`` what was accumulated, by the number of the input, in order."""

    def __init__(self, traced: TracedBackward, given: Mapping[tuple[str, int], Sequence[torch.Tensor]]) -> None:
        super().__init__(traced.graph_module)
        self._traced, self._given = traced, given
        self.gradients: dict[int, list[torch.Tensor]] = {}
        self.results: list[torch.Tensor] = []
        # The largest norm of the values computed so far.
        self.largest = 0.0

    def compute(self, arguments: Sequence[torch.Tensor | int]) -> None:
        """Run it.

        Raises:
            NoExactValues: it cannot. Besides, whatever fails in float64, such as for want of memory.
        """
        with torch.no_grad():
            self.results = list(self.run(*[self._convert(argument) for argument in arguments]))

    def find(self, index: int | None, place: int) -> torch.Tensor:
        """Find what was accumulated into an input at that place of its gradients, or without an input that result."""
        return self.results[place] if index is None else self.gradients[index][place]

    def run_node(self, n: Node) -> Any:
        if n.op == "call_function":
            _check(n)
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        ours = torch.ops.retrograd
        if target is ours.create_token.default or target is ours.final_callbacks.default:
            return None
        if target is ours.accumulate_grad.default:
            gradient, _, param = args
            self.gradients.setdefault(self._traced.params[param], []).append(gradient)
            return None
        if target is ours.call_hook.default:
            return self._given_by(args[2], args[3]), None
        if target is ours.call_backward.default:
            return self._given_by(CUSTOM_BACKWARD, args[2]), None
        args, kwargs = torch.utils._pytree.tree_map(self._convert, (args, dict(kwargs)))
        result = self._convert(super().call_function(target, args, kwargs))
        if isinstance(result, torch.Tensor) and result.is_floating_point() and not result.is_meta:
            self.largest = max(self.largest, result.nan_to_num(0.0, 0.0, 0.0).norm().item())
        return result

    def _given_by(self, kind: str, number: int) -> list[Any]:
        return [self._convert(tensor) for tensor in self._given[kind, number]]

    def _convert(self, value: Any) -> Any:
        """Give the value in the dtype that this run computes in."""
        return value


class ExactRun(TracedRun):
    """Runs a traced graph as :class:`TracedRun` does, with every number in float64."""

    def _convert(self, value: Any) -> Any:
        return _widen(value)


class OtherRoundings:
    """The same trace a few times, with every op and all arguments rounded another way."""

    def __init__(
        self,
        traced: TracedBackward,
        given: Mapping[tuple[str, int], Sequence[torch.Tensor]],
        arguments: Sequence[torch.Tensor | int],
    ) -> None:
        self._runs = []
        for seed in range(SHAKES):
            generator = torch.Generator().manual_seed(seed)
            moved = [move(argument, generator) if is_float(argument) else argument for argument in arguments]
            run = TracedRun(traced, given)
            with Rounded(seed):
                run.compute(moved)
            self._runs.append(run)

    def explain(self, values: Sequence[torch.Tensor], exact: torch.Tensor, index: int | None, place: int) -> bool:
        """Whether all of the values are within what these runs give, as :meth:`TracedRun.find` finds it."""
        finite = exact.isfinite()
        if not all(torch.equal(finite, value.isfinite()) for value in values):
            return False
        known = [run.find(index, place) for run in self._runs]
        allowed = max(_distance(value, exact, finite & value.isfinite()) for value in known)
        return all(_distance(value, exact, finite) <= TIMES_EAGERS * allowed for value in values)


def _distance(value: torch.Tensor, exact: torch.Tensor, where: torch.Tensor) -> float:
    return float((value.to(exact.dtype) - exact)[where].norm())


def is_of_the_same(eager: torch.Tensor, exact: torch.Tensor, tolerance: float, largest: float) -> bool:
    """Whether rounding explains how far eager's value is from the exact one of a trace, where that has values with
    norms up to ``largest``; otherwise the trace computes something else."""
    finite = exact.isfinite() & eager.isfinite()
    wanted = exact[finite]
    off = (eager.to(wanted.dtype)[finite] - wanted).norm().item()
    return off <= max(tolerance * wanted.norm().item(), _UNITS * torch.finfo(eager.dtype).eps * largest)


def is_as_near_as_eager(mine: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, tolerance: float) -> bool:
    """Whether a value is as near to the exact one as eager's, or but for what rounding explains of its norm."""
    finite = exact.isfinite()
    if not torch.equal(finite, mine.isfinite()):
        return False
    wanted = exact[finite]
    off, allowed = ((given.to(wanted.dtype)[finite] - wanted).norm().item() for given in (mine, eager))
    return off <= max(TIMES_EAGERS * allowed, tolerance * wanted.norm().item())


def _check(node: Node) -> None:
    target: Any = node.target
    if target is torch.ops.aten.view.dtype or target is torch.ops.retrograd.update_input.default:
        raise NoExactValues(str(target))
    if isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags:
        raise NoExactValues(str(target))


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(_WIDER[value.dtype]) if value.dtype in _WIDER else value
    if isinstance(value, (list, tuple)):
        return type(value)([_widen(part) for part in value])
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value
