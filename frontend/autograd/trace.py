# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From a captured backward to a graph of aten ops, in which calls of Python stay whole.

The capture calls autograd nodes as functions; run once more on fake tensors, these give their aten ops. Hooks and
custom functions become ops of ``frontend/hook_ops.py`` on one chain of tokens, in eager's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend import hook_ops
from retrograd.frontend.autograd import python_calls as calls
from retrograd.frontend.autograd.hook_inlining import Finder
from retrograd.frontend.autograd.inlined_hooks import InlinedHooks
from retrograd.frontend.autograd.python_calls import Frame, PythonCall, PythonCalls, Template, find_source
from retrograd.frontend.autograd.recorder import Recorder, opaque_kind
from retrograd.frontend.capture import portable_ops
from retrograd.frontend.decompositions import decomposition_table
from retrograd.frontend.empty_tensors import fill_empty_tensors
from retrograd.frontend.importer import RuntimeInput, describe_results
from retrograd.frontend.matrix_checks import drop_settled_checks
from retrograd.frontend.source import CaptureError, capture_error


@dataclass(frozen=True)
class TracedBackward:
    """A backward as aten ops: ``graph_module`` takes the inputs whose numbers ``inputs`` lists, and accumulates into
    those that ``params`` lists.

    ``calls`` are what its opaque ops stand for; ``results`` says which of the backward's results are results of the
    graph (by number), and which are None; ``communication`` are the numbers of the hooks that start some;
    ``kept_inputs`` are those that calls look at themselves. Inputs are followed by ``extras``, tensors that hooks read
    which are part of the graph; ``bodies`` are the graphs of these hooks, by the name of the function. Nothing in the
    graph depends on how the inputs are numbered, so that a backward whose gradients are there already, and are inputs
    too, has the same graph as one whose are not.
    """

    graph_module: torch.fx.GraphModule
    inputs: tuple[int, ...]
    params: tuple[int, ...]
    calls: PythonCalls
    results: tuple[int | None, ...]
    communication: tuple[int, ...] = ()
    kept_inputs: frozenset[int] = frozenset()
    extras: tuple[Finder, ...] = ()
    bodies: Mapping[str, torch.fx.GraphModule] = field(default_factory=dict)

    def arguments(self, frame: Frame) -> list[torch.Tensor]:
        """The tensors that the graph takes, at one step."""
        given = [*frame.inputs, *[find(frame) for find in self.extras]] if self.extras else frame.inputs
        return [given[number] for number in self.inputs]

    def release(self, frame: Frame) -> None:
        """Forget what the graph has taken and no call of Python looks at, so that it lives until its last use only."""
        inputs: Any = frame.inputs
        for number in range(len(inputs)):
            if number not in self.kept_inputs:
                inputs[number] = None


def trace_backward(
    recorded: Recorder, inputs: Sequence[torch.Tensor], sizes: Sequence[int], scalars: Sequence[float]
) -> TracedBackward:
    """Trace a backward that was recorded on these inputs. Their shapes, the sizes and the scalars are compiled in.

    Raises:
        CaptureError: it holds something that no graph of tensors can; says what.
    """
    hooks = InlinedHooks(recorded, inputs)
    inputs = [*inputs, *[tensor for tensor, _ in hooks.extras]]
    for tensor in inputs:
        _check_input(tensor)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    interpreter = _AtenInterpreter(recorded, hooks, sizes, scalars)
    try:
        # Not the inputs themselves: one that stands for a Python number would be traced as that number.
        like = [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device) for t in inputs]
        with torch.no_grad(), portable_ops(), mode:
            fake = [mode.from_tensor(t, static_shapes=True) for t in like]
            graph_module = make_fx(
                dispatch_functionalize(interpreter.trace), decomposition_table(), tracing_mode="fake"
            )(*fake)
    except CaptureError:
        raise
    except Exception as error:
        raise capture_error(error) from error
    drop_settled_checks(graph_module)
    fill_empty_tensors(graph_module)
    used = _describe_values(graph_module, interpreter.params)
    params, results = tuple(interpreter.params), tuple(interpreter.result_numbers)
    return TracedBackward(
        graph_module,
        used,
        params,
        interpreter.calls,
        results,
        tuple(interpreter.communication),
        frozenset(interpreter.kept_inputs).union(params),
        tuple([find for _, find in hooks.extras]),
        hooks.bodies(),
    )


def _check_input(tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise CaptureError(f"a tensor of the backward is a {type(tensor).__name__}", "use plain tensors")
    if tensor.layout is not torch.strided:
        raise CaptureError(f"a tensor of the backward has layout {tensor.layout}", "use dense tensors")


class _AtenInterpreter(torch.fx.Interpreter):
    """Runs the capture on fake tensors under a tracer."""

    def __init__(self, recorded: Recorder, hooks: InlinedHooks, sizes: Sequence[int], scalars: Sequence[float]) -> None:
        super().__init__(recorded.module)
        self._recorded, self._communicates, self._hooks = recorded.results, recorded.communication, hooks
        self._sizes, self._scalars = list(sizes), list(scalars)
        self.extra_traceback = False
        self.calls = PythonCalls()
        self.communication: list[int] = []
        # What calls of Python take from the inputs, and not from the graph.
        self.kept_inputs: set[int] = set()
        self.params: list[int] = []
        self.result_numbers: list[int | None] = []
        self._results: list[torch.Tensor] = []

    def trace(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """The backward's results that are tensors."""
        self.calls.calls.clear()
        self.communication.clear()
        self.params.clear()
        self.result_numbers.clear()
        self._results = []
        self._token = hook_ops.create_token()
        nothing = _Placeholders()
        self._hooks.start(inputs)
        own = list(inputs[: len(inputs) - len(self._hooks.extras)])
        results = self.run(own, self._sizes, self._scalars, nothing, nothing)
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

    def _accumulate_into(self, index: int, gradient: torch.Tensor) -> None:
        if index not in self.params:
            self.params.append(index)
        self._token = hook_ops.accumulate_grad(gradient, self._token, self.params.index(index))

    def _next_number(self, kind: str) -> int:
        """Hooks have numbers, and custom functions."""
        kinds = [k for k, _ in self.calls.calls]
        if kind == hook_ops.BACKWARD:
            return kinds.count(kind)
        return len(kinds) - kinds.count(hook_ops.BACKWARD) + len(self._hooks.tapes)

    def _call_inlined(self, node: torch.fx.Node, kind: str) -> Any:
        number = self._next_number(kind)
        given, self._token, gradient = self._hooks.call(node.name, kind, number, self.env, self._token)
        if gradient is not None:
            self._accumulate_into(find_source(node.args[1])[1], gradient)
        recorded = self._recorded[node.name]
        if not isinstance(recorded, (tuple, list)):
            return given[0] if given else None
        remaining = iter(given)
        return tuple(None if leaf is None else next(remaining) for leaf in recorded)

    def _call(self, node: torch.fx.Node, kind: str) -> Any:
        values: list[torch.Tensor] = []
        arguments = tuple(self._template(argument, values) for argument in node.args)
        recorded = self._recorded[node.name]
        single = not isinstance(recorded, (tuple, list))
        leaves = [recorded] if single else list(recorded)
        for leaf in leaves:
            if leaf is not None and not (isinstance(leaf, torch.Tensor) and leaf.is_meta):
                raise CaptureError(f"{node.name} gives a {_kind_of(leaf)}", "give dense tensors or None")
        present = tuple(leaf is not None for leaf in leaves)
        number = self._next_number(kind)
        results = tuple(leaf for leaf in leaves if leaf is not None)
        function: Any = node.target
        if node.kwargs:
            function = partial(calls.call_user_hook, hook_type=str(node.kwargs["hook_type"]))
        if kind == "post_acc_grad":
            present, results = (False,), ()
            function = _without_result(function)
        label = f"{kind} hook {number}" if kind != hook_ops.BACKWARD else f"the backward of custom function {number}"
        call = PythonCall(kind, number, function, arguments, present, single, node.name, label, results)
        self.calls.calls[kind, number] = call
        if node.name in self._communicates:
            self.communication.append(number)
        with hook_ops.declared_results(self.calls.declarations()):
            if kind == hook_ops.BACKWARD:
                given, self._token = hook_ops.call_backward(values, self._token, number)
            else:
                given, self._token = hook_ops.call_hook(values, self._token, kind, number)
        remaining = iter(given)
        filled = [next(remaining) if p else None for p in present]
        return filled[0] if single else tuple(filled)

    def _template(self, argument: Any, values: list[torch.Tensor]) -> Template:
        if isinstance(argument, (list, tuple)):
            return calls.sequence([self._template(part, values) for part in argument])
        if not isinstance(argument, torch.fx.Node):
            return calls.constant(argument)
        place, index = find_source(argument)
        if place is not None:
            if place == "inputs":
                self.kept_inputs.add(index)
            return {"inputs": calls.from_input, "hooks": calls.from_hook, "packed_data": calls.from_packed}[place](
                index
            )
        return _value_template(self.env[argument], values)


def _value_template(value: Any, values: list[torch.Tensor]) -> Template:
    """What gives ``value`` at each step; tensors in it are added to ``values``."""
    if isinstance(value, torch.Tensor):
        values.append(value)
        return calls.from_value(len(values) - 1)
    if isinstance(value, (list, tuple)):
        return calls.sequence([_value_template(part, values) for part in value])
    return calls.constant(value)


class _Placeholders:
    """Stands for a list whose elements are not looked at while tracing."""

    def __getitem__(self, index: int) -> None:
        return None


def _without_result(function: Any) -> Any:
    def call(*args: Any) -> None:
        function(*args)

    return call


def _kind_of(leaf: Any) -> str:
    return f"tensor of layout {leaf.layout}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__


def _describe_values(graph_module: torch.fx.GraphModule, params: Sequence[int]) -> tuple[int, ...]:
    """Take out inputs that are not used, and write on the others and on the results what they are."""
    graph = graph_module.graph
    graph.eliminate_dead_code()
    used: list[int] = []
    for index, node in enumerate(graph.find_nodes(op="placeholder")):
        if not node.users:
            graph.erase_node(node)
            continue
        name = f"input_{len(used)}"
        used.append(index)
        node._rename(name)
        node.meta["desc"] = RuntimeInput("param" if index in params else "saved", name)
    describe_results(graph_module, "result.")
    return tuple(used)
