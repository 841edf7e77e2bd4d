# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The first call of a compiled function checks itself: it runs on copies of its arguments, the graph that it was
compiled from runs in torch on the arguments themselves, and what both give is compared.

A function that gives something else than the graph is not used: the graph takes its place, in torch, and makes way for
what a repair gives, once that has passed the same check. The graph itself is compared with the one that was traced, its
outputs at the forward's call and its gradients at the backward's; where it computes something else, whoever called is
told to leave the step to eager.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule

from retrograd.frontend.hooks.hook_calls import calls_hooks, hooks_called_once
from retrograd.frontend.verification.as_traced import OtherThanTraced
from retrograd.frontend.verification.errors import VerificationError
from retrograd.frontend.verification.from_inputs import Forwards
from retrograd.frontend.verification.halves_comparison import (
    compare_as_traced,
    compare_from_inputs,
    compare_results,
    halves_give,
    join_as_traced,
)
from retrograd.frontend.verification.judgement import Difference
from retrograd.frontend.verification.loss_scale import are_finite, make_smaller
from retrograd.frontend.verification.random_states import RandomStates, random_states, set_random_states
from retrograd.frontend.verification.reference_graph import Graph, Others, find_shortage, fix_seed, has_collectives

_LOG = logging.getLogger(__name__)

Call = Callable[..., list[Any]]


@dataclass(frozen=True)
class Fault:
    """A call on which a compiled function was wrong: copies of the graph's arguments, what it gave, in words where they
    part. ``fixed`` is the graph with the seed of this call in it, which draws none."""

    graph: Graph
    fixed: GraphModule
    arguments: tuple[Any, ...]
    eager: tuple[Any, ...]
    message: str

    def find_difference(self, found: Sequence[Any]) -> Difference | None:
        """How these results for ``arguments`` differ from what the graph gave; draws no random numbers."""
        return self.graph.judge(found, self.eager, Others(self.fixed, self.arguments, _restart_nothing))


class Repair(Protocol):
    """Mends a fault, beside the training."""

    @property
    def is_done(self) -> bool:
        """Whether there is a result."""

    def result(self) -> Call | None:
        """Wait, and say so to the user; returns what to call from now on, or ``None`` where the graph is to stay."""


class Care(Protocol):
    """Decides what happens after a function's check."""

    def is_known(self) -> bool:
        """Whether the function passed the check before."""

    def remember(self) -> None:
        """Note that a function passed its check."""

    def forget(self) -> None:
        """Forget that a function passed: what it saved led to wrong gradients."""

    def refuse(self, message: str) -> None:
        """Both halves are wrong together, and stay in torch.

        Raises:
            VerificationError: a fault is an error.
        """

    def leave(self, message: str) -> None:
        """Leave the step to eager: the compiled graph is another one than was traced.

        Raises:
            VerificationError: a fault is an error.
        """

    def repair(self, fault: Fault) -> Repair | None:
        """Start the repair of a function that did not pass. ``None`` where there can be none.

        Raises:
            VerificationError: a fault is an error.
        """


@dataclass
class FirstCall:
    """Calls a compiled function, whose first call is checked; ``state`` says in words how that went. ``forwards`` is
    shared by the two halves of a step."""

    name: str
    device: torch.device
    compiled: Call
    graph: Graph | None
    care: Care
    forwards: Forwards = field(default_factory=Forwards)
    state: str = "not called yet"
    is_wrong: bool = False
    _is_known: bool = False
    _verified: str = "verified by its first call"
    _current: Call | None = None
    _repair: Repair | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self._is_known = self.care.is_known()
        if not self._is_known:
            return
        self.state = "verified, by an earlier program from the cache"
        if self.graph is None or self.graph.gradients:
            self.forwards.is_settled = True
            self._settle(self.compiled, self.state)

    @property
    def is_settled(self) -> bool:
        """Whether the compiled function is called from now on, and nothing is compared."""
        return self._current is self.compiled or (self._is_known and self.forwards.is_settled)

    def __call__(self, tensors: list[Any]) -> list[Any]:
        """Call the function, or, where it is wrong, the graph; the list of arguments may be emptied."""
        current = self._current
        if current is not None:
            return current(tensors)
        return self._first(tensors)

    def _first(self, tensors: list[Any]) -> list[Any]:
        graph = self.graph
        # Who traces holds the settings of PyTorch's, for which a check may wait: he does not wait for the check.
        if graph is None or any(isinstance(t, FakeTensor) for t in tensors):
            # Traced once more, by compiled autograd say: nothing is computed.
            return self.compiled(tensors)
        with self._lock:
            if self._current is not None:
                return self._current(tensors)
            if has_collectives(graph.module):
                # Processes that differ in whether they compare would wait for each other, or take each other's numbers.
                self.forwards.is_settled = True
                self.forwards.forget()
                self._settle(self.compiled, "not verified: other processes would wait for its collective ops")
                return self.compiled(tensors)
            if self._is_known:
                return self._call_known(graph, tensors)
            if self._repair is None:
                return self._check(graph, self.compiled, tensors)
            if self._repair.is_done:
                return self._check_repaired(graph, self._repair.result(), tensors)
        return graph.run(tensors)

    def _call_known(self, graph: Graph, tensors: list[Any]) -> list[Any]:
        """Call a forward that passed before. Its arguments are kept for its backward's first call, unless that passed
        too: an earlier program may have ended between the two."""
        self._settle(self.compiled, self.state)
        if self.forwards.is_settled:
            return self.compiled(tensors)
        given, before = [*tensors], random_states(tensors)
        results = self.compiled(tensors)
        self.forwards.keep(graph.module, given, before, results, partial(self._replace, graph))
        return results

    def _check(self, graph: Graph, compiled: Call, tensors: list[Any]) -> list[Any]:
        if not calls_hooks(graph.module.graph):
            return self._check_once(graph, compiled, tensors)
        with hooks_called_once():
            # By what torch computes, which no fault is in; what runs after that takes what they gave.
            if find_shortage(graph, self.device, tensors) is None:
                before = random_states(tensors)
                graph.run(tensors)
                set_random_states(before)
            return self._check_once(graph, compiled, tensors)

    def _check_once(self, graph: Graph, compiled: Call, tensors: list[Any]) -> list[Any]:
        if (reason := find_shortage(graph, self.device, tensors)) is not None:
            _LOG.warning("the first call of @%s is not verified: %s", self.name, reason)
            self._settle(compiled, f"not verified: {reason}")
            return compiled(tensors)
        before = random_states(tensors)
        results = run_on_copies(compiled, tensors)
        if given := self._check_smaller(graph, compiled, tensors, results, before, results):
            return given
        computed = random_states(tensors)
        try:
            eager, difference = compare_results(graph, results, tensors, before)
        except (RuntimeError, NotImplementedError) as error:
            set_random_states(computed)
            reason = f"torch does not run the captured graph: {str(error).partition(chr(10))[0]}"
            _LOG.warning("the first call of @%s is not verified: %s", self.name, reason)
            self._settle(compiled, f"not verified: {reason}")
            return results
        if not graph.gradients:
            self._check_as_traced(graph, tensors, before, eager)
        elif given := (
            self._check_smaller(graph, compiled, tensors, results, before, eager)
            or self._check_from_inputs(graph, compiled, tensors, results, eager, difference, before)
        ):
            return given
        if difference is None:
            self.care.remember()
            self._settle(compiled, self._verified)
            if not graph.gradients:
                self.forwards.keep(graph.module, tensors, before, results, partial(self._replace, graph))
            return results
        message = f"{graph.describe(difference.place)}: {difference}"
        after = random_states(tensors)
        set_random_states(before)
        fixed = fix_seed(graph.runnable)
        set_random_states(after)
        self.is_wrong = True
        self.state = f"wrong, runs in torch: {message}"
        self._repair = self.care.repair(Fault(graph, fixed, _copy(graph.fill_in(tensors)), _copy(eager), message))
        if self._repair is None:
            self._stay(graph)
        return eager

    def _check_smaller(
        self,
        graph: Graph,
        compiled: Call,
        tensors: Sequence[Any],
        results: list[Any],
        before: RandomStates,
        told: Sequence[Any],
    ) -> list[Any] | None:
        """Judge a backward by smaller tangents where these gave infinite numbers, ``told``; returns what is right for
        the tangents that are. ``None`` where numbers are finite, or tangents cannot be made smaller."""
        if not graph.gradients or are_finite(told) or (smaller := make_smaller(graph.module, tensors)) is None:
            return None
        after = random_states(tensors)
        set_random_states(before)
        given = self._check_once(graph, compiled, smaller.arguments)
        set_random_states(after)
        return results if self._current is compiled else smaller.enlarge(given)

    def _check_from_inputs(
        self,
        graph: Graph,
        compiled: Call,
        tensors: Sequence[Any],
        results: list[Any],
        eager: list[Any],
        difference: Difference | None,
        before: RandomStates,
    ) -> list[Any] | None:
        """Judge a backward by gradients computed from the forward's arguments: ``eager`` is computed from what the
        compiled forward saved, and is wrong where the halves do not fit together. Returns what is right where that
        decides."""
        run = self.forwards.find(graph.module, tensors)
        checked = compare_from_inputs(graph, self.device, run, tensors, [results, eager])
        if isinstance(checked, str) or run is None:
            self.forwards.forget()
            self._verified += f", with what the forward saved ({checked})"
            return None
        right, (message, shared) = checked
        if given := self._check_smaller(graph, compiled, tensors, results, before, right):
            return given
        if message is None or shared is None:
            self.forwards.forget()
            if message is None and difference is not None and not are_finite([eager[difference.place]]):
                self.care.remember()
                self._settle(compiled, f"{self._verified}, from the inputs")
                return results
            return None
        self.is_wrong = True
        if graph.traced is not None and not halves_give(graph, self.device, run, tensors, right):
            self._leave(message)
            run.replace(message)
            # Who keeps the loss may ask for its gradients again.
            self._current = partial(self._run_from_inputs, graph)
            return right
        self.forwards.forget()
        self.state = f"wrong together with the forward, both run in torch: {message}"
        self.care.refuse(message)
        run.replace(None)
        self._stay(graph)
        return right

    def _run_from_inputs(self, graph: Graph, tensors: Sequence[Any]) -> list[Any]:
        """The gradients by the graph that was traced, of the one call whose arguments are known.

        Raises:
            VerificationError: it is another call, whose forward computed what is wrong.
        """
        run = self.forwards.find(graph.module, tensors)
        joined = None if run is None else join_as_traced(graph, run, graph.fill_in(tensors))
        if run is None or joined is None or isinstance(joined, str):
            raise VerificationError(f"the loss was computed before @{self.name} was found wrong; compute it again")
        after = random_states(tensors)
        set_random_states(run.states)
        try:
            return joined[0].run(joined[1])
        finally:
            set_random_states(after)

    def _check_as_traced(
        self, graph: Graph, tensors: Sequence[Any], before: RandomStates, outputs: Sequence[Any]
    ) -> None:
        """Compare what a forward's graph gives in torch with what the traced one gives, where the two are not seen to
        be the same.

        Raises:
            OtherThanTraced: it differs.
        """
        if graph.traced is None or graph.traced.has_outputs_of(graph.module):
            return
        found = compare_as_traced(graph, graph.traced, self.device, tensors, before, outputs)
        if isinstance(found, str):
            _LOG.info("@%s is not compared with the graph as it was traced: %s", self.name, found)
            self._verified += f", by the graph as it was prepared ({found})"
        elif found:
            self.is_wrong = True
            self._leave(found[0])
            self._current = partial(_raise, OtherThanTraced(found[0]))
            self._current(())

    def _leave(self, message: str) -> None:
        self.state = f"another graph than the traced one, the step runs in eager: {message}"
        self._repair = None
        self.care.leave(message)

    def _replace(self, graph: Graph, message: str | None) -> None:
        """Replace a forward whose results lead to wrong gradients: the graph runs in torch, or nothing where that is
        wrong."""
        self.is_wrong = True
        self.state = "gives what the backward's gradients are wrong with, runs in torch"
        self.care.forget()
        self._stay(graph)
        if message is not None:
            self.state = "is of another graph than the traced one, the step runs in eager"
            self._current = partial(_raise, OtherThanTraced(message))

    def _check_repaired(self, graph: Graph, repaired: Call | None, tensors: Sequence[Any]) -> list[Any]:
        if repaired is None:
            self._stay(graph)
            return graph.run(tensors)
        before = random_states(tensors)
        results = run_on_copies(repaired, tensors)
        eager, difference = compare_results(graph, results, tensors, before)
        is_told = not graph.gradients or are_finite([*results, *eager])
        if not is_told and (smaller := make_smaller(graph.module, tensors)) is not None:
            after = random_states(tensors)
            set_random_states(before)
            self._check_repaired(graph, repaired, smaller.arguments)
            set_random_states(after)
            return eager
        if difference is not None:
            self._stay(graph)
            return eager
        self._settle(repaired, f"{self.state.replace('wrong, runs in torch', 'was wrong')}; compiled otherwise since")
        return results

    def _stay(self, graph: Graph) -> None:
        self._repair, self._current = None, graph.run

    def _settle(self, current: Call, state: str) -> None:
        self._current, self.state = current, state
        # Its nodes, and what they know of the trace, are needed no longer.
        self.graph, self._repair = None, None


def _raise(error: Exception, _tensors: Any) -> Any:
    raise error


def _copy(values: Sequence[Any]) -> Any:
    return tuple(v.clone() if isinstance(v, Tensor) else v for v in values)


def _restart_nothing() -> None:
    """Do nothing, since nothing is drawn."""


def run_on_copies(compiled: Call, tensors: Sequence[Any]) -> list[Any]:
    """Run ``compiled`` on copies of its arguments; where it hands one through, its result is the argument itself."""
    # Held until the end: the list may be emptied, and what comes after a tensor may have its id.
    copies = tuple(t.detach().clone() if isinstance(t, Tensor) else t for t in tensors)
    own = {id(copy): given for copy, given in zip(copies, tensors, strict=True) if isinstance(copy, Tensor)}
    return [own.get(id(result), result) if isinstance(result, Tensor) else result for result in compiled([*copies])]
