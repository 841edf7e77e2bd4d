# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The nodes of a captured backward, run under a tracer: calls of Python become ops on one chain of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from retrograd.contract.hooks import CUSTOM_BACKWARD, POST, POST_ACCUMULATE, Communicating
from retrograd.frontend.autograd.engine import python_calls as calls
from retrograd.frontend.autograd.engine.hook_calls import HOOK_CALLS
from retrograd.frontend.autograd.engine.python_calls import PythonCall, PythonCalls, Template, find_source
from retrograd.frontend.autograd.hooks.inlined_hooks import InlinedHooks
from retrograd.frontend.autograd.sizes.open_sizes import OpenPlaces
from retrograd.frontend.autograd.sizes.skeleton import Path, leaves_of
from retrograd.frontend.autograd.steps.recorder import OtherLayout, Recorder, opaque_kind
from retrograd.frontend.autograd.steps.resumption import find_firm_places, find_inputs, find_rest
from retrograd.frontend.hooks import hook_ops
from retrograd.frontend.hooks.hook_marks import bucket_of
from retrograd.frontend.python.source_locations import CaptureError

# What gives an element of an argument of the backward, by the argument.
_SOURCES: Mapping[str, Callable[[int], Template]] = {
    "inputs": calls.from_input,
    "hooks": calls.from_hook,
    "packed_data": calls.from_packed,
    "scalars": calls.from_scalar,
}

# The nodes of autograd whose backward asks what was saved whether it requires a gradient, and gives none where it does
# not. Tensors of a trace do not; a gradient that is not needed is left out of the graph.
_LOOK_AT_SAVED = frozenset(("LinalgSolveExBackward0",))


class AtenInterpreter(torch.fx.Interpreter):
    """Runs the capture on fake tensors under a tracer."""

    def __init__(
        self,
        recorded: Recorder,
        hooks: InlinedHooks,
        sizes: Sequence[int],
        scalars: Sequence[float],
        places: OpenPlaces | None,
    ) -> None:
        super().__init__(recorded.module)
        self._places = places
        # What calls give, where sizes are open: by node, and the shapes by kind and number.
        self.declared: Mapping[str, list[torch.Tensor]] = {}
        self.given: dict[tuple[str, int], list[Sequence[int | torch.SymInt]]] = {}
        # The gradients that are accumulated, in order: of which parameter, by what node of the capture.
        self.accumulated: list[tuple[int, str]] = []
        # The inputs, by number, that a call takes as they are, and those that the capture needs if it has to go on by
        # itself after a call.
        self._taken: dict[tuple[str, int], set[int]] = {}
        self._kept_for: dict[tuple[str, int], frozenset[int]] = {}
        self.recorded, self._recorder, self._hooks = recorded.results, recorded, hooks
        self._communicates, self._frees = recorded.communication, recorded.freeing
        self._sizes, self._scalars = list(sizes), list(scalars)
        self.extra_traceback = False
        # What a call goes on with may have been used for the last time before it.
        self.garbage_collect_values = False
        self.calls = PythonCalls()
        # By kind and number, as calls are known: those that start communication, and those that may free parameters.
        self.communication: list[Communicating] = []
        self.freeing: list[tuple[str, int]] = []
        # What calls of Python take from the inputs, and not from the graph.
        self.kept_inputs: set[int] = set()
        self.params: list[int] = []
        self.result_numbers: list[int | None] = []
        self._results: list[torch.Tensor] = []

    def trace(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """The backward's results that are tensors."""
        self.calls.calls.clear()
        self.communication.clear()
        self.freeing.clear()
        self.accumulated.clear()
        self._taken.clear()
        self._kept_for.clear()
        self.params.clear()
        self.result_numbers.clear()
        self._results = []
        self._token = hook_ops.create_token()
        nothing = _Placeholders()
        self._hooks.start(inputs)
        own = list(inputs[: len(inputs) - len(self._hooks.extras)])
        results = self.run(own, self._sizes, self._scalars, nothing, nothing)
        self._let_go_inputs()
        for result in results:
            self.result_numbers.append(None if result is None else len(self._results))
            if result is not None:
                self._results.append(result)
        return self._results

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.target is calls.accumulate_into:
            return self._accumulate(n)
        if n.target is calls.final_callbacks:
            self._token = hook_ops.final_callbacks(self._token)
            return None
        kind = opaque_kind(n)
        if n.name in self._hooks.calls:
            return self._call_inlined(n, str(kind))
        self._hooks.check_reads(n)
        return super().run_node(n) if kind is None else self._call(n, kind)

    def fetch_args_kwargs_from_env(self, n: torch.fx.Node) -> tuple[Any, Any]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return (args, kwargs) if self._places is None else self._places.fill(n, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if getattr(target, "__name__", None) in _LOOK_AT_SAVED:
            args = torch.utils._pytree.tree_map(_that_requires_grad, args)
        return super().call_function(target, args, kwargs)

    def _accumulate(self, node: torch.fx.Node) -> None:
        gradient = self.env[node.args[2]] if isinstance(node.args[2], torch.fx.Node) else None
        if gradient is None:
            return
        if gradient.layout is not torch.strided:
            raise CaptureError(f"a gradient has layout {gradient.layout}", "use dense gradients")
        place, index = find_source(node.args[0])
        if place != "inputs":
            raise CaptureError("a gradient is accumulated into a tensor that is no leaf", "report it")
        if not self._hooks.take_gradient(node.name, index, gradient):
            self._accumulate_into(index, gradient)
            self.accumulated.append((self.params.index(index), str(node.args[2])))

    def _accumulate_into(self, index: int, gradient: torch.Tensor) -> None:
        if index not in self.params:
            self.params.append(index)
        self._token = hook_ops.accumulate_grad(gradient, self._token, self.params.index(index))

    def _next_number(self, kind: str) -> int:
        """Hooks have numbers, and custom functions."""
        kinds = [k for k, _ in self.calls.calls]
        if kind == CUSTOM_BACKWARD:
            return kinds.count(kind)
        return len(kinds) - kinds.count(CUSTOM_BACKWARD) + len(self._hooks.tapes)

    def _call_inlined(self, node: torch.fx.Node, kind: str) -> Any:
        if self._places is not None:
            (_, *args), kwargs = self.fetch_args_kwargs_from_env(node)
            if self._hooks.is_open(node.name, self.env, args):
                return self._hooks.run_open(node.name, self.env, args, kwargs, self._places.sizes)
        number = self._next_number(kind)
        given, self._token, gradient = self._hooks.call(node.name, kind, number, self.env, self._token)
        if gradient is not None:
            self._accumulate_into(find_source(node.args[1])[1], gradient)
        recorded = self.recorded[node.name]
        if not isinstance(recorded, (tuple, list)):
            return given[0] if given else None
        remaining = iter(given)
        return tuple(None if leaf is None else next(remaining) for leaf in recorded)

    def _call(self, node: torch.fx.Node, kind: str) -> Any:
        values: list[torch.Tensor] = []
        sources: list[tuple[str, Path]] = []
        slots = {} if self._places is None else self._places.open_slots(node)
        taken: set[int] = set()
        arguments = tuple(
            self._template(a, values, (0, place), slots, sources, taken) for place, a in enumerate(node.args)
        )
        recorded = self.recorded[node.name]
        single = not isinstance(recorded, (tuple, list))
        leaves = leaves_of(recorded)
        for leaf in leaves:
            if leaf is not None and not (isinstance(leaf, torch.Tensor) and leaf.is_meta):
                raise CaptureError(f"{node.name} gives a {_kind_of(leaf)}", "give dense tensors or None")
        present = tuple(leaf is not None for leaf in leaves)
        number = self._next_number(kind)
        results = tuple(leaf for leaf in leaves if leaf is not None)
        function: Any = node.target
        if "hook_type" in node.kwargs:
            function = HOOK_CALLS[str(node.kwargs["hook_type"])]
        elif node.kwargs:
            function = partial(function, **node.kwargs)
        if kind == POST_ACCUMULATE:
            present, results = (False,), ()
            function = _without_result(function)
            if find_source(node.args[1])[1] not in self.params:
                # Its parameter gets no gradient; eager calls it nevertheless.
                kind = POST
        label = f"{kind} hook {number}" if kind != CUSTOM_BACKWARD else f"the backward of custom function {number}"
        call = PythonCall(kind, number, function, arguments, present, single, node.name, label, results)
        if firm := find_firm_places(node, leaves, self._recorder):
            call = replace(call, firm=firm, rest=self._find_rest(node, values, sources))
            self._kept_for[kind, number] = find_inputs(node)
        call = replace(call, sources=tuple(sources))
        self.calls.calls[kind, number] = call
        self._taken[kind, number] = taken
        if node.name in self._communicates:
            bucket = bucket_of(self._communicates[node.name])
            self.communication.append(Communicating(kind, number, bucket))
        if node.name in self._frees:
            self.freeing.append((kind, number))
        declared = self.calls.declarations()
        if self._places is not None:
            declared[kind, number] = self.declared[node.name] if results else ()
            self.given[kind, number] = [tuple(t.shape) for t in declared[kind, number]]
        with hook_ops.declared_results(declared):
            if kind == CUSTOM_BACKWARD:
                given, self._token = hook_ops.call_backward(values, self._token, number)
            else:
                given, self._token = hook_ops.call_hook(values, self._token, kind, number)
        remaining = iter(given)
        filled = [next(remaining) if p else None for p in present]
        return filled[0] if single else tuple(filled)

    def _template(
        self,
        argument: Any,
        values: list[torch.Tensor],
        path: Path,
        slots: Mapping[Path, int],
        sources: list[tuple[str, Path]],
        taken: set[int],
    ) -> Template:
        if path in slots:
            return calls.from_slot(slots[path])
        if isinstance(argument, (list, tuple)):
            parts = [
                self._template(part, values, (*path, place), slots, sources, taken)
                for place, part in enumerate(argument)
            ]
            return calls.sequence(parts)
        if not isinstance(argument, torch.fx.Node):
            return calls.constant(argument)
        place, index = find_source(argument)
        if place is not None:
            if place == "inputs":
                taken.add(index)
            return _SOURCES[place](index)
        return _value_template(self.env[argument], values, argument.name, sources)

    def _find_rest(self, node: torch.fx.Node, values: list[torch.Tensor], sources: list[tuple[str, Path]]) -> Template:
        """Makes a template of what the capture goes on with after a node; adds the tensors in it to ``values``, and
        where they come from to ``sources``."""
        rest = find_rest(node)
        if any(isinstance(leaf, torch.SymInt) for o in rest for leaf in torch.utils._pytree.tree_leaves(self.env[o])):
            raise CaptureError(
                f"{node.name} gave no gradient, and a size is needed behind it, which cannot be handed on", "report it"
            )
        return calls.sequence([_value_template(self.env[other], values, other.name, sources) for other in rest])

    def _let_go_inputs(self) -> None:
        """Have calls let go the inputs that nothing in Python looks at after them: what they take, and what the capture
        needs where it has to go on by itself after one."""
        later = set(self.params)
        for key, call in reversed(self.calls.calls.items()):
            kept = self._taken.get(key, set()) | self._kept_for.get(key, set())
            self.calls.calls[key] = replace(call, lets_go=tuple(sorted(kept - later)))
            later |= kept
        self.kept_inputs = later


def _value_template(
    value: Any, values: list[torch.Tensor], name: str, sources: list[tuple[str, Path]], place: Path = ()
) -> Template:
    """Make a template that yields ``value`` at each step, what the node ``name`` gave at a place; adds tensors in it to
    ``values``, and where they come from to ``sources``."""
    if isinstance(value, torch.Tensor):
        values.append(value)
        sources.append((name, place))
        return calls.from_value(len(values) - 1)
    if isinstance(value, (list, tuple)):
        parts = [_value_template(part, values, name, sources, (*place, n)) for n, part in enumerate(value)]
        return calls.sequence(parts)
    return calls.constant(value)


class _Placeholders:
    """Stands for a list whose elements are not looked at while tracing."""

    def __getitem__(self, index: int) -> None:
        return None


def _that_requires_grad(value: Any) -> Any:
    is_number = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return value.detach().requires_grad_() if is_number else value


def _without_result(function: Any) -> Any:
    def call(*args: Any) -> None:
        function(*args)

    return call


def _kind_of(leaf: Any) -> str:
    return str(leaf) if isinstance(leaf, OtherLayout) else type(leaf).__name__
