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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import arg_tree_leaves

from retrograd.frontend.doors.deferred_code import make_graph_module, recompile_when_called
from retrograd.frontend.doors.outputs import hint
from retrograd.frontend.hooks.hook_calls import calls_hooks, hooks_called_once
from retrograd.frontend.layers.random_ops import UNIFORM, draw_seed, find_seed
from retrograd.frontend.libraries.run_as import RUN_AS
from retrograd.frontend.preparation.empty_tensors import gives_unwritten, leaves_unwritten
from retrograd.frontend.preparation.graph_memory import available_bytes, peak_bytes
from retrograd.frontend.python.source_locations import source_place
from retrograd.frontend.verification.as_traced import AsTraced, OtherThanTraced, arguments_of, has_effects
from retrograd.frontend.verification.compared_numbers import find_comparisons
from retrograd.frontend.verification.errors import VerificationError
from retrograd.frontend.verification.first_comparison import tolerance_of
from retrograd.frontend.verification.from_inputs import ForwardRun, Forwards, join, join_traced
from retrograd.frontend.verification.judgement import Difference, allowed_errors, find_difference, reruns, run_precise
from retrograd.frontend.verification.other_roundings import move_all
from retrograd.frontend.verification.rounding import find_tolerances
from retrograd.frontend.verification.unwritten_memory import find_unset

_LOG = logging.getLogger(__name__)
# A collective op that one process of several runs once more waits for ever.
_COLLECTIVE = ("c10d", "_c10d_functional", "symm_mem")
# Of the memory that is free, what a check may take.
SHARE = 0.8

Call = Callable[..., list[Any]]
# Of random number generators, by device; of the CPU's by None.
_States = dict[torch.device | None, Tensor]


@dataclass(frozen=True)
class Others:
    """Other runs of a graph; ``restart`` is called before each, to have random ops draw what they drew."""

    module: GraphModule
    arguments: Sequence[Any]
    restart: Callable[[], None]

    def again(self) -> Iterator[list[Any] | None]:
        """The results with other precision and rounding, as :func:`reruns` has them."""
        for run in reruns(self.module, self.arguments, self.restart):
            yield None if run is None else arg_tree_leaves(run)

    def compare(self, places: Sequence[int]) -> Iterator[Sequence[Any]]:
        """The results at these places, which are no floats: as they are, and as rounding may have them."""
        found = find_comparisons(self.module, places)
        if found is not None:
            self.restart()
            yield from found.run(self.arguments, self._run_otherwise)

    def _run_otherwise(self, head: GraphModule) -> Sequence[Any]:
        """Runs a part of the graph in float64, or from arguments that are off by rounding."""
        self.restart()
        precise = run_precise(head, self.arguments)
        return head(*move_all(self.arguments)) if precise is None else precise

    def move(self) -> Sequence[Any]:
        """All results, from arguments that are off by rounding."""
        self.restart()
        return list(arg_tree_leaves(self.module(*move_all(self.arguments))))

    def find_unset(self, eager: Sequence[Any]) -> list[Tensor | None]:
        """Where the results, which are ``eager``, have memory that no op has written, as kernels leave what is past
        the end of a row: ``None`` for results without."""
        return find_unset(self._run_again, eager)

    def _run_again(self) -> list[Any]:
        self.restart()
        return list(arg_tree_leaves(self.module(*self.arguments)))


def _blank(results: Sequence[Any], unset: Sequence[Tensor | None]) -> list[Any]:
    """The results, with zeros where nothing was set."""
    return [r if mask is None else r.masked_fill(mask, 0) for r, mask in zip(results, unset, strict=True)]


@dataclass
class Graph:
    """A traced graph in the place of a compiled function: the same arguments, the same results.

    ``gradients`` says that the results are gradients; ``copied`` are arguments of which a copy is to be given, by the
    names of their nodes; ``fill_in`` makes of the arguments, of which some may be absent, those of the graph.
    ``traced`` is what the graph, or the step that it is half of, was before any pass of ours.
    """

    module: GraphModule
    gradients: bool
    copied: frozenset[str] = frozenset()
    fill_in: Callable[[Sequence[Any]], Sequence[Any]] = tuple
    traced: AsTraced | None = None
    runnable: GraphModule = field(init=False)

    def __post_init__(self) -> None:
        self.runnable = _on_any_strides(self.module)

    def run(self, tensors: Sequence[Any]) -> list[Any]:
        """Run the graph op by op."""
        arguments = self.fill_in(tensors)
        # AOTAutograd traced what autocast does to the ops.
        with torch.no_grad(), torch._C._DisableAutocast():
            results = arg_tree_leaves(self.runnable(*arguments))
        given = {id(a) for a in arguments if isinstance(a, Tensor)}
        return [
            r.clone() if id(r) in given and isinstance(node, Node) and node.name in self.copied else r
            for r, node in zip(results, self.results(), strict=True)
        ]

    def results(self) -> list[Any]:
        """The nodes that are given; what is no node is a constant."""
        (output,) = self.module.graph.find_nodes(op="output")
        return list(arg_tree_leaves(*output.args))

    def find_difference(self, found: Sequence[Any], tensors: Sequence[Any], eager: Sequence[Any]) -> Difference | None:
        """How ``found`` differs from ``eager``, which :meth:`run` gives for ``tensors``; ``None`` where it does not."""
        arguments, before = self.fill_in(tensors), random_states(tensors)
        return self.judge(found, eager, Others(self.runnable, arguments, partial(set_random_states, before)))

    def judge(self, found: Sequence[Any], eager: Sequence[Any], others: Others) -> Difference | None:
        """As :meth:`find_difference`, by ``others``, other runs of the graph."""
        allowed = self.allowed()
        with torch.no_grad(), torch._C._DisableAutocast():
            difference = find_difference(found, eager, allowed, others.again, gradients=self.gradients, first=others)
            # What memory holds that no op has written, NaN or large numbers, would hide what differs elsewhere.
            unset = others.find_unset(eager) if difference is not None or self._allocates() else []
            if all(mask is None for mask in unset):
                return difference
            found, eager = _blank(found, unset), _blank(eager, unset)
            runs = (None if run is None else _blank(run, unset) for run in others.again())
            return find_difference(found, eager, allowed, lambda: runs, gradients=self.gradients)

    def _allocates(self) -> bool:
        """Whether the graph takes memory as it is."""
        return any(gives_unwritten(n.target) or leaves_unwritten(n.target) for n in self.module.graph.nodes)

    def allowed(self) -> list[float]:
        """The relative error that rounding explains of each result."""
        return allowed_errors(self.results(), find_tolerances(self.module.graph, tolerance_of))

    def describe(self, place: int) -> str:
        """A result, with the op that gives it and the user's line."""
        node = self.results()[place]
        if not isinstance(node, Node):
            return f"result {place}"
        at = source_place(node.stack_trace)
        op = str(node.target).removesuffix(".default") if node.op == "call_function" else "an argument"
        return f"{node.name} ({op}{f' at {at}' if at else ''})"


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
        """It passed."""

    def forget(self) -> None:
        """It passed, and is wrong: what it saved led to wrong gradients."""

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
        """It did not: start a repair. ``None`` where there can be none.

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
            if _find_shortage(graph, self.device, tensors) is None:
                before = random_states(tensors)
                graph.run(tensors)
                set_random_states(before)
            return self._check_once(graph, compiled, tensors)

    def _check_once(self, graph: Graph, compiled: Call, tensors: list[Any]) -> list[Any]:
        if (reason := _find_shortage(graph, self.device, tensors)) is not None:
            _LOG.warning("the first call of @%s is not verified: %s", self.name, reason)
            self._settle(compiled, f"not verified: {reason}")
            return compiled(tensors)
        before = random_states(tensors)
        results = run_on_copies(compiled, tensors)
        computed = random_states(tensors)
        try:
            eager, difference = _compare(graph, results, tensors, before)
        except (RuntimeError, NotImplementedError) as error:
            set_random_states(computed)
            reason = f"torch does not run the captured graph: {str(error).partition(chr(10))[0]}"
            _LOG.warning("the first call of @%s is not verified: %s", self.name, reason)
            self._settle(compiled, f"not verified: {reason}")
            return results
        if not graph.gradients:
            self._check_as_traced(graph, tensors, before, eager)
        elif given := self._check_from_inputs(graph, compiled, tensors, results, eager, difference):
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
        fixed = _fix_seed(graph.runnable)
        set_random_states(after)
        self.is_wrong = True
        self.state = f"wrong, runs in torch: {message}"
        self._repair = self.care.repair(Fault(graph, fixed, _copy(graph.fill_in(tensors)), _copy(eager), message))
        if self._repair is None:
            self._stay(graph)
        return eager

    def _check_from_inputs(
        self,
        graph: Graph,
        compiled: Call,
        tensors: Sequence[Any],
        results: list[Any],
        eager: list[Any],
        difference: Difference | None,
    ) -> list[Any] | None:
        """Judge a backward by gradients computed from the forward's arguments: ``eager`` is computed from what the
        compiled forward saved, and is wrong where the halves do not fit together. Returns what is right where that
        decides."""
        run = self.forwards.find(graph.module, tensors)
        checked = _compare_from_inputs(graph, self.device, run, tensors, [results, eager])
        if isinstance(checked, str) or run is None:
            self.forwards.forget()
            self._verified += f", with what the forward saved ({checked})"
            return None
        right, (message, shared) = checked
        if message is None or shared is None:
            self.forwards.forget()
            if message is None and difference is not None and not _is_finite(eager[difference.place]):
                self.care.remember()
                self._settle(compiled, f"{self._verified}, from the inputs")
                return results
            return None
        self.is_wrong = True
        if graph.traced is not None and not _halves_give(graph, self.device, run, tensors, right):
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
        joined = None if run is None else _join_as_traced(graph, run, graph.fill_in(tensors))
        if run is None or joined is None or isinstance(joined, str):
            raise VerificationError(f"the loss was computed before @{self.name} was found wrong; compute it again")
        after = random_states(tensors)
        set_random_states(run.states)
        try:
            return joined[0].run(joined[1])
        finally:
            set_random_states(after)

    def _check_as_traced(self, graph: Graph, tensors: Sequence[Any], before: _States, outputs: Sequence[Any]) -> None:
        """Compare what a forward's graph gives in torch with what the traced one gives, where the two are not seen to
        be the same.

        Raises:
            OtherThanTraced: it differs.
        """
        if graph.traced is None or graph.traced.has_outputs_of(graph.module):
            return
        found = _compare_as_traced(graph, graph.traced, self.device, tensors, before, outputs)
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
        eager, difference = _compare(graph, results, tensors, before)
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


def has_collectives(module: GraphModule) -> bool:
    """Whether other processes take part when a graph runs."""
    return any(getattr(node.target, "namespace", "") in _COLLECTIVE for node in module.graph.nodes)


def _compare(
    graph: Graph, results: list[Any], tensors: Sequence[Any], before: _States
) -> tuple[list[Any], Difference | None]:
    """Run the graph from these states of the random number generators; returns its results, and how ``results`` differ
    from them. As can be seen afterwards, numbers were drawn once."""
    set_random_states(before)
    eager = graph.run(tensors)
    after = random_states(tensors)
    set_random_states(before)
    difference = graph.find_difference(results, tensors, eager)
    set_random_states(after)
    return eager, difference


def _compare_from_inputs(
    graph: Graph, device: torch.device, run: ForwardRun | None, tensors: Sequence[Any], found: Sequence[list[Any]]
) -> tuple[list[Any], list[str | None]] | str:
    """The gradients computed from the forward's arguments, by the graph that was traced if there is one, and how each
    of ``found`` differs from them, in words, where the first one does; or, as one text, why they cannot be computed.
    Random number generators are left as they were."""
    if run is None:
        return "the forward that saved it was not the one checked"
    given = graph.fill_in(tensors)
    joined = _join_as_traced(graph, run, given)
    compared = None if joined is None else _compare_joined(joined, device, run, found)
    if compared is None or isinstance(compared, str):
        compared = _compare_joined(_join_halves(graph, run, given), device, run, found)
    return compared


def _halves_give(graph: Graph, device: torch.device, run: ForwardRun, tensors: Sequence[Any], right: list[Any]) -> bool:
    """Whether the graphs of both halves give these gradients, from the forward's arguments; not where they cannot be
    run."""
    compared = _compare_joined(_join_halves(graph, run, graph.fill_in(tensors)), device, run, [right])
    return not isinstance(compared, str) and compared[1][0] is None


# A graph of the gradients from the forward's arguments, with its arguments; or why there is none.
_Joined = tuple[Graph, Sequence[Any]] | str


def _join_halves(graph: Graph, run: ForwardRun, given: Sequence[Any]) -> _Joined:
    joined = join(run, graph.module, given)
    return joined if isinstance(joined, str) else (Graph(joined[0], True), joined[1])


def _join_as_traced(graph: Graph, run: ForwardRun, given: Sequence[Any]) -> _Joined | None:
    if graph.traced is None:
        return None
    joined = join_traced(run, graph.traced, graph.module, given)
    return joined if isinstance(joined, str) else (Graph(joined[0], True), joined[1])


def _compare_joined(
    joined: _Joined, device: torch.device, run: ForwardRun, found: Sequence[list[Any]]
) -> tuple[list[Any], list[str | None]] | str:
    if isinstance(joined, str):
        return joined
    joint, arguments = joined
    if (reason := _find_shortage(joint, device, arguments)) is not None:
        return f"from the inputs, {reason}"
    after = random_states(arguments)
    messages: list[str | None] = []
    try:
        set_random_states(run.states)
        right = joint.run(arguments)
        for gradients in found:
            if messages == [None]:
                messages.append(None)
                break
            set_random_states(run.states)
            difference = joint.find_difference(gradients, arguments, right)
            messages.append(None if difference is None else f"{joint.describe(difference.place)}: {difference}")
    except (RuntimeError, NotImplementedError) as error:
        return f"torch does not run both halves at once: {str(error).partition(chr(10))[0]}"
    finally:
        set_random_states(after)
    return right, messages


def _compare_as_traced(
    graph: Graph, traced: AsTraced, device: torch.device, tensors: Sequence[Any], before: _States, found: Sequence[Any]
) -> list[str] | str:
    """How the outputs among what a forward's graph gave differ from those of the traced graph, in words, in a list that
    is empty where they do not; or, as one text, why that cannot be told. Random number generators are left as they
    were."""
    reference = Graph(traced.forward(), False)
    if (effect := next(filter(has_effects, reference.module.graph.nodes), None)) is not None:
        return f"{effect.target} has effects"
    placeholders = graph.module.graph.find_nodes(op="placeholder")
    named = dict(zip((node.name for node in placeholders), graph.fill_in(tensors), strict=False))
    arguments = arguments_of(reference.module, named)
    if isinstance(arguments, str):
        return f"{arguments} is no argument"
    if (reason := _find_shortage(reference, device, arguments)) is not None:
        return reason
    after = random_states(tensors)
    try:
        set_random_states(before)
        right = reference.run(arguments)
        set_random_states(before)
        difference = reference.find_difference(found[: len(right)], arguments, right)
    except (RuntimeError, NotImplementedError) as error:
        return f"torch does not run it: {str(error).partition(chr(10))[0]}"
    finally:
        set_random_states(after)
    return [] if difference is None else [f"{reference.describe(difference.place)}: {difference}"]


def _raise(error: Exception, _tensors: Any) -> Any:
    raise error


def _is_finite(value: Any) -> bool:
    return not isinstance(value, Tensor) or bool(value.isfinite().all())


def _on_any_strides(graph_module: GraphModule) -> GraphModule:
    """The graph for arguments of other strides than it was traced with: what compiled code gives is contiguous. Ops
    that were traced as for another device run as libraries compute them on this one, and random numbers are drawn
    there: a seed is the CPU's, which took minutes for the masks of a T5."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    for node in graph.nodes:
        node.target = RUN_AS.get(node.target, node.target)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    device = next((d for d in map(_device_of, graph.nodes) if d is not None and d.type != "cpu"), None)
    for node in graph.find_nodes(op="call_function", target=UNIFORM) if device is not None else ():
        seed = node.args[0]
        with graph.inserting_before(node):
            there = graph.call_function(torch.ops.aten._to_copy.default, (seed,), {"device": device})
        there.meta = dict(seed.meta)
        node.args = (there, *node.args[1:])
    return make_graph_module(graph_module, graph)


def _device_of(node: Node) -> torch.device | None:
    value = node.meta.get("val")
    return value.device if isinstance(value, Tensor) else None


def _fix_seed(graph_module: GraphModule) -> GraphModule:
    """The graph with a seed, drawn now, as a constant; itself, where it draws none."""
    seed = find_seed(graph_module.graph)
    if seed is None:
        return graph_module
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    fixed = make_graph_module(graph_module, graph)
    fixed.register_buffer("_retrograd_seed", draw_seed())
    node = next(node for node in graph.nodes if node.name == seed.name)
    node.op, node.target, node.args = "get_attr", "_retrograd_seed", ()
    recompile_when_called(fixed)
    return fixed


def _copy(values: Sequence[Any]) -> Any:
    return tuple(v.clone() if isinstance(v, Tensor) else v for v in values)


def _restart_nothing() -> None:
    """Nothing is drawn."""


def run_on_copies(compiled: Call, tensors: Sequence[Any]) -> list[Any]:
    """Run ``compiled`` on copies of its arguments; where it hands one through, its result is the argument itself."""
    # Held until the end: the list may be emptied, and what comes after a tensor may have its id.
    copies = tuple(t.detach().clone() if isinstance(t, Tensor) else t for t in tensors)
    own = {id(copy): given for copy, given in zip(copies, tensors, strict=True) if isinstance(copy, Tensor)}
    return [own.get(id(result), result) if isinstance(result, Tensor) else result for result in compiled([*copies])]


def _find_shortage(graph: Graph, device: torch.device, tensors: Sequence[Any]) -> str | None:
    """Why memory does not suffice for a check, if it does not: for copies of the arguments, the results of both, and
    what the graph needs in between."""
    available = available_bytes(device)
    if available is None:
        return None
    given = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
    placeholders = graph.module.graph.find_nodes(op="placeholder")
    traced = sum(_bytes_of(node) for node in placeholders)
    results = sum(_bytes_of(node) for node in graph.results() if isinstance(node, Node))
    # Open sizes may be larger than those of the trace.
    needed = int((peak_bytes(graph.module) + results) * max(1.0, given / traced if traced else 1.0)) + given
    if needed <= SHARE * available:
        return None
    return f"it would take {needed >> 20} MiB beside the step, and {available >> 20} MiB are free"


def _bytes_of(node: Node) -> int:
    value = node.meta.get("val")
    return hint(value.numel()) * value.element_size() if isinstance(value, Tensor) else 0


def random_states(tensors: Sequence[Any]) -> _States:
    """The states of torch's random number generators: the CPU's, and those of devices that tensors are on."""
    devices = {t.device for t in tensors if isinstance(t, Tensor) and t.is_cuda}
    return {None: torch.get_rng_state(), **{device: torch.cuda.get_rng_state(device) for device in devices}}


def set_random_states(states: _States) -> None:
    """Give torch's random number generators states that they had."""
    for device, state in states.items():
        if device is None:
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)
