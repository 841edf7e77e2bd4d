# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From a captured backward to a graph of aten ops, in which calls of Python stay whole.

The capture calls autograd nodes as functions; run once more on fake tensors, these give their aten ops. Hooks and
custom functions become ops of ``frontend/hooks/hook_ops.py`` on one chain of tokens, in eager's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.contract.hooks import number_of_hook
from retrograd.contract.roles import BACKWARD, PARAM, SAVED
from retrograd.frontend.autograd.engine.python_calls import Frame, PythonCalls
from retrograd.frontend.autograd.hooks.hook_inlining import Finder
from retrograd.frontend.autograd.hooks.inlined_hooks import InlinedHooks
from retrograd.frontend.autograd.hooks.packed_values import PackedLeaf
from retrograd.frontend.autograd.sizes.open_numbers import take_floats
from retrograd.frontend.autograd.sizes.open_sizes import OpenPlaces, OpenSizes, SizeGuard
from retrograd.frontend.autograd.steps.absent_gradients import AbsentGradients
from retrograd.frontend.autograd.steps.layouts import Expanded, Layout, Permuted, find_layout
from retrograd.frontend.autograd.steps.recorder import Recorder, find_borrowed
from retrograd.frontend.autograd.steps.shared_memory import Shared, find_merged
from retrograd.frontend.autograd.tracing.aten_interpreter import AtenInterpreter
from retrograd.frontend.decompositions.table import tracing_table
from retrograd.frontend.doors.captured_graph import Captured
from retrograd.frontend.doors.deferred_code import deferring_code
from retrograd.frontend.doors.port_roles import RuntimeInput, describe_results
from retrograd.frontend.preparation.prepare import Traced, prepare
from retrograd.frontend.python.source_locations import CaptureError, without_stacks_of_fakes
from retrograd.frontend.python.trace_errors import capture_error
from retrograd.frontend.sizes.dynamic_shapes import size_oblivious
from retrograd.frontend.sizes.size_expressions import to_size
from retrograd.frontend.sizes.size_nodes import SIZE, find_heads
from retrograd.frontend.traceable.portable_ops import portable_ops


@dataclass(frozen=True, kw_only=True)
class TracedBackward:
    """A backward as aten ops: ``captured`` is what is built of it. Its graph takes the inputs whose numbers ``inputs``
    lists, and accumulates into those that ``params`` lists.

    ``calls`` are what its opaque ops stand for; ``results`` says which of the backward's results are results of the
    graph (by number), and which are None; ``kept_inputs`` are those that calls look at themselves. Inputs are followed
    by ``extras``, tensors that hooks read which are part of the graph. The open ``sizes``, if any, come last, and
    ``guard`` says what they may be. Of inputs that are not contiguous, by number, it takes what their ``layouts`` say.
    In the place of inputs that are ``merged`` with another one, by number, it takes that one.
    ``inlined`` are the nodes of the capture that those hooks are, by the names of their functions.
    Nothing in the graph depends on how the inputs are numbered, so that a backward whose gradients are there already,
    and are inputs too, has the same graph as one whose are not.
    """

    captured: Captured
    inputs: tuple[int, ...]
    params: tuple[int, ...]
    calls: PythonCalls
    results: tuple[int | None, ...]
    kept_inputs: frozenset[int] = frozenset()
    extras: tuple[Finder, ...] = ()
    guard: SizeGuard | None = None
    sizes: tuple[str, ...] = ()
    layouts: Mapping[int, Layout] = field(default_factory=dict)
    merged: Mapping[int, int] = field(default_factory=dict)
    inlined: Mapping[str, str] = field(default_factory=dict)
    # The capture that was recorded, which values its nodes gave, and the gradients that are accumulated, in order: into
    # which of ``params``, by which node.
    capture: torch.fx.GraphModule | None = field(default=None, repr=False)
    present: Mapping[str, Any] = field(default_factory=dict, repr=False)
    accumulated: tuple[tuple[int, str], ...] = ()

    def find_absent(self) -> AbsentGradients:
        """Begin to tell gradients that are None at a step.

        Raises:
            RuntimeError: hooks are part of the graph, which would be called with None.
        """
        assert self.capture is not None
        if self.inlined:
            raise RuntimeError(
                "a hook or a custom function gave None for a gradient that it gave when the backward was compiled, "
                "with marked hooks as part of it; return zeros instead of None, or leave these hooks unmarked"
            )
        return AbsentGradients(self.capture.graph, self.present)

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The graph of what is built."""
        return self.captured.graph_module

    @cached_property
    def packed(self) -> frozenset[int]:
        """The numbers of the packed values that hooks which are part of the graph unpack."""
        return frozenset([find.index for find in self.extras if isinstance(find, PackedLeaf)])

    def lay_out(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """Bring an input to the form that the graph takes."""
        layout = self.layouts.get(number)
        return tensor if layout is None else layout.base(tensor)

    @cached_property
    def _laid_out(self) -> tuple[tuple[int, Layout], ...]:
        """Which of the tensors that the graph takes are brought to another form, by their places."""
        return tuple([(place, self.layouts[n]) for place, n in enumerate(self.inputs) if n in self.layouts])

    def arguments(self, frame: Frame) -> list[torch.Tensor | int]:
        """The tensors that the graph takes, at one step, and the sizes."""
        given = [*frame.inputs, *[find(frame) for find in self.extras]] if self.extras else frame.inputs
        tensors = [given[number] for number in self.inputs]
        for place, layout in self._laid_out:
            tensors[place] = layout.base(tensors[place])
        return [*tensors, *[frame.sizes[name] for name in self.sizes]] if self.sizes else tensors


def trace_backward(
    recorded: Recorder,
    inputs: Sequence[torch.Tensor],
    sizes: Sequence[int],
    scalars: Sequence[float],
    places: OpenPlaces | None = None,
    shared: Shared = (),
) -> TracedBackward:
    """Trace a backward that was recorded on these inputs. Their shapes, the sizes and the scalars are compiled in, but
    for those that ``places`` leaves open; those that are ``shared`` memory are taken once, where none are.

    Raises:
        CaptureError: it holds something that no graph of tensors can; says what.
    """
    hooks = InlinedHooks(recorded, inputs)
    inputs = [*inputs, *[tensor for tensor, _ in hooks.extras]]
    for tensor in inputs:
        _check_input(tensor)
    interpreter = AtenInterpreter(recorded, hooks, sizes, scalars, places)
    # What a hook that is part of the graph writes to is an argument itself. What has no memory has no views either.
    lasting = [] if recorded.inlined else [n for n in range(len(inputs)) if n not in recorded.may_free]
    found = {number: find_layout(inputs[number]) for number in lasting}
    # Where sizes are open, a part of memory would be another at each step.
    # What is expanded is so at the steps of the key alone, which says how what is ``shared`` lies.
    fixed = {part[0] for part in shared if places is None}
    layouts = {
        n: how
        for n, how in found.items()
        if how and (isinstance(how, Permuted) or (n in fixed if isinstance(how, Expanded) else places is None))
    }
    merged: dict[int, int] = {}
    try:
        with without_stacks_of_fakes():
            if places is None:
                bases = [layouts[number].base(t) if number in layouts else t for number, t in enumerate(inputs)]
                merged = find_merged([part[0] for part in shared if part[0] in found], inputs, bases)
                graph_module = _trace_fixed(interpreter, bases, layouts, merged)
            else:
                graph_module = _trace_open(interpreter, inputs, places, layouts)
        guard, names = (None, {}) if places is None else _find_sizes(graph_module, interpreter, places.sizes)
    except CaptureError:
        raise
    except Exception as error:
        raise capture_error(error) from error
    _check_layouts(graph_module)
    borrowed, placeholders = find_borrowed(inputs), graph_module.graph.find_nodes(op="placeholder")
    borrowed |= {merged[number] for number in borrowed if number in merged}
    inlined = [number_of_hook(name) for name in hooks.bodies()]
    written = [node for number, node in enumerate(placeholders) if number in borrowed]
    prepare(Traced(graph_module, names, written=written, inlined=inlined, freeing=interpreter.freeing))
    used = _describe_values(graph_module, interpreter.params)
    params, results = tuple(interpreter.params), tuple(interpreter.result_numbers)
    communication = tuple(interpreter.communication)
    # What goes on after a call by itself takes it that all before it has run.
    in_order = any(call.rest is not None for call in interpreter.calls.calls.values())
    captured = Captured(
        graph_module, BACKWARD, as_it_ran=True, bodies=hooks.bodies(), communication=communication, in_order=in_order
    )
    return TracedBackward(
        captured=captured,
        inputs=used,
        params=params,
        calls=interpreter.calls,
        results=results,
        kept_inputs=frozenset(interpreter.kept_inputs),
        extras=(*[find for _, find in hooks.extras], *(() if places is None else places.sizes.finders())),
        guard=guard,
        sizes=tuple([node.meta[SIZE] for node in find_heads(graph_module.graph)]),
        layouts=layouts,
        merged=merged,
        inlined=dict(hooks.nodes),
        capture=recorded.capture,
        present=recorded.present,
        accumulated=tuple(interpreter.accumulated),
    )


def _trace_fixed(
    interpreter: AtenInterpreter,
    bases: Sequence[torch.Tensor],
    layouts: Mapping[int, Layout],
    merged: Mapping[int, int],
) -> torch.fx.GraphModule:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # Not the inputs themselves: one that stands for a Python number would be traced as that number.
    like = [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device) for t in bases]

    def trace(*arguments: torch.Tensor) -> list[torch.Tensor]:
        taken = [arguments[merged[n]].view(a.shape) if n in merged else a for n, a in enumerate(arguments)]
        return interpreter.trace(*_view_all(layouts, taken))

    with torch.no_grad(), portable_ops(), deferring_code(), mode:
        fake = [mode.from_tensor(t, static_shapes=True) for t in like]
        traced = make_fx(dispatch_functionalize(trace), tracing_table(), tracing_mode="fake")(*fake)
    return traced


def _view_all(layouts: Mapping[int, Layout], bases: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [layouts[number].view(t) if number in layouts else t for number, t in enumerate(bases)]


def _trace_open(
    interpreter: AtenInterpreter, inputs: Sequence[torch.Tensor], places: OpenPlaces, layouts: Mapping[int, Layout]
) -> torch.fx.GraphModule:
    """The graph takes the open sizes after the inputs."""
    sizes = places.sizes
    shapes = dict(zip(places.skeleton.inputs, sizes.shapes, strict=True))
    with (
        torch.no_grad(),
        portable_ops(),
        deferring_code(),
        sizes.mode,
        size_oblivious(),
        enable_python_dispatcher(),
    ):
        fake = [sizes.like(t, shapes.get(number, tuple(t.shape))) for number, t in enumerate(inputs)]
        bases = [layouts[number].base(t) if number in layouts else t for number, t in enumerate(fake)]
        interpreter.declared = places.declare(interpreter.recorded)

        def trace(*arguments: Any) -> list[torch.Tensor]:
            return interpreter.trace(*_view_all(layouts, arguments[: len(fake)]))

        function = dispatch_functionalize(trace)
        return make_fx(function, tracing_table(), tracing_mode="real")(*bases, *sizes.floats, *sizes.integers)


def _find_sizes(
    graph_module: torch.fx.GraphModule, interpreter: AtenInterpreter, sizes: OpenSizes
) -> tuple[SizeGuard, dict[sympy.Symbol, str]]:
    """Find the conditions on the open sizes, and the names of those that are whole numbers; tells the calls the shapes
    that they are to return. Floats become tensors."""
    names = sizes.names()
    guard = sizes.guard(names)
    integers = {symbol.node.expr for symbol in sizes.integers}
    known = {symbol: name for symbol, name in names.items() if name in guard.names and symbol in integers}
    take_floats(graph_module, sizes.mode)
    for key, call in interpreter.calls.calls.items():
        shapes = tuple([tuple([to_size(n, known) for n in shape]) for shape in interpreter.given[key]])
        interpreter.calls.calls[key] = replace(call, shapes=shapes)
    return guard, known


def _check_input(tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise CaptureError(f"a tensor of the backward is a {type(tensor).__name__}", "use plain tensors")
    if tensor.layout is not torch.strided:
        raise CaptureError(f"a tensor of the backward has layout {tensor.layout}", "use dense tensors")


def _check_layouts(graph_module: torch.fx.GraphModule) -> None:
    for node in graph_module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise CaptureError(f"{node.target} gives a tensor of layout {value.layout}", "use dense gradients")


def _describe_values(graph_module: torch.fx.GraphModule, params: Sequence[int]) -> tuple[int, ...]:
    """Take out inputs that are not used, and write on the others and on the results what they are."""
    graph = graph_module.graph
    graph.eliminate_dead_code()
    used: list[int] = []
    for index, node in enumerate(graph.find_nodes(op="placeholder")):
        if SIZE in node.meta:
            node._rename(f"size_{node.meta[SIZE]}")
            continue
        if not node.users:
            graph.erase_node(node)
            continue
        name = f"input_{len(used)}"
        used.append(index)
        node._rename(name)
        node.meta["desc"] = RuntimeInput(PARAM if index in params else SAVED, name)
    describe_results(graph_module, "result.")
    return tuple(used)
