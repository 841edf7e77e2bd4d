# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The partition that was decided on MLIR, carried out on the captured FX graph as well.

AOTAutograd gets an ordinary forward and backward pair, and its runtime wrappers look after mutated inputs, aliases and
views. Its compiler callbacks return calls of the compiled functions: values are matched by FX name, nothing is imported
a second time.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch._functorch import aot_autograd
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors
from torch._functorch.partitioners import _extract_fwd_bwd_modules, default_partition
from torch._logging._internal import trace_log

from retrograd.frontend.doors.absent_tangents import UndefinedTangents, ZeroMaker, is_tangent
from retrograd.frontend.doors.call_plan import Tensors, boxed
from retrograd.frontend.doors.capture import CapturedGraph, capture_joint
from retrograd.frontend.doors.deferred_code import deferring_code, recompile_when_called
from retrograd.frontend.doors.graph_calls import (
    CompiledFunction,
    backward_caller,
    fixed_plan,
    graph_caller,
    size_values,
)
from retrograd.frontend.doors.kept_binding import BindingRecord, recording_what_is_needed
from retrograd.frontend.doors.second_derivatives import SecondDerivatives
from retrograd.frontend.doors.unseen_modes import telling_modes
from retrograd.frontend.hooks.hook_calls import calls_hooks, refusing_writes
from retrograd.frontend.hooks.pack_hooks import hidden_hooks
from retrograd.frontend.preparation.narrowing import narrow_graphs, part_names
from retrograd.frontend.sizes.size_nodes import SIZE, SYMBOLIC, find_axis, find_heads, restore_heads


def bind(
    captured: CapturedGraph, forward: CompiledFunction, backward: CompiledFunction, record: BindingRecord | None = None
) -> Callable[[Tensors], Tensors]:
    """A differentiable function of the graph's primals (params, buffers, tensor inputs) that gives the model's tensor
    outputs. What another process needs to make the same is written to ``record``.

    Must be called while the stack that the graph was captured in is open.
    """

    def partition(joint: torch.fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_options: Any) -> Any:
        halves = split_joint(joint, backward, num_fwd_outputs, sizes)
        undefined.fill_in = ZeroMaker(halves[1].graph, backward.device, sizes).filler()
        return halves

    def compile_forward(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        if record is not None:
            record.forward = fixed_plan(gm, forward, captured.num_forward_outputs)
        return boxed(graph_caller(gm, forward, restride=captured.num_forward_outputs, sizes=sizes, traced=traced))

    def compile_backward(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        keep_residuals()
        if record is not None:
            record.backward = fixed_plan(gm, backward, 0)
        call = backward_caller(gm, backward, sizes, undefined.may_be_undefined, traced)
        if calls_hooks(gm.graph):
            inputs = {n.name for n in captured.graph_module.graph.find_nodes(op="placeholder") if not is_tangent(n)}
            call = refusing_writes(call, gm.graph, inputs)
        return boxed(telling_modes(call))

    sizes, undefined, traced = size_values(captured.graph_module), UndefinedTangents(), captured.as_traced
    whole = undefined.open() if backward.without is not None else nullcontext()
    with SecondDerivatives(captured.module.name).open(), whole:
        return _wrap(captured, partition, compile_forward, compile_backward, record)


def bind_traced(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    backward: CompiledFunction | None = None,
    dynamic_shapes: Any = None,
) -> Callable[[Tensors], Tensors]:
    """As :func:`bind`, with the traced graph itself, op by op: what a program is compared with that eager is no measure
    of.

    The model in eager draws other random numbers; the trace draws a seed as the compiled program does, and its random
    ops are functions of it. Where ``backward`` takes values in narrower types, the trace is cut where the program is,
    and rounds as it does; else as PyTorch cuts it. Traced anew, since a capture can be bound once.
    """

    def partition(joint: torch.fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        if backward is not None and backward.narrowed:
            return split_joint(joint, backward, num_fwd_outputs)
        return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)

    def interpret(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        keep_residuals()
        return make_boxed_func(gm)

    with ExitStack() as stack:
        return _wrap(capture_joint(stack, model, args, kwargs, dynamic_shapes), partition, interpret, interpret)


def _wrap(
    captured: CapturedGraph,
    partition: Callable[..., Any],
    compile_forward: Any,
    compile_backward: Any,
    record: BindingRecord | None = None,
) -> Callable[[Tensors], Tensors]:
    _leave_unread_logs_out(captured)
    recording = nullcontext() if record is None else record.open()
    with hidden_hooks(), deferring_code(), _flat_functions() as found, recording:
        wrapped = aot_compile_joint_with_descriptors(
            captured.joint, partition_fn=partition, fw_compiler=compile_forward, bw_compiler=compile_backward
        )
    spec = captured.joint.out_spec
    is_flat = spec is not None and spec.type in (list, tuple) and spec.num_nodes == spec.num_leaves + 1
    # The graph as it was traced checks first calls. AOTAutograd copies to what is written, read or not.
    unread = _find_unread(captured.graph_module) & _find_unread(captured.as_traced.module)
    unread -= {*captured.signature.mutated, *_find_differentiated(captured)}
    if found and is_flat:
        if record is not None:
            record.unread = frozenset(unread)
        return recording_what_is_needed(found[-1], unread)
    if record is not None:
        # What flattens its results is in no record.
        record.forward = None
    return recording_what_is_needed(lambda tensors: wrapped(*tensors), unread)


def _find_unread(graph_module: torch.fx.GraphModule) -> set[int]:
    """The places of arguments that neither half reads nor gives: of a model of several towers, the parameters of those
    that a step leaves out. Autograd would visit each of them in each backward, to find that it has no gradient."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    return {place for place, node in enumerate(placeholders) if not node.users and not is_tangent(node)}


def _find_differentiated(captured: CapturedGraph) -> set[int]:
    """The places of arguments that have a gradient: one without elements has, and nothing reads it."""
    results: Any = captured.graph_module.graph.output_node().args[0]
    return {place for place, given in enumerate(results[captured.num_forward_outputs :]) if given is not None}


@contextmanager
def _flat_functions() -> Iterator[list[Callable[[list[torch.Tensor]], Tensors]]]:
    """Gathers what AOTAutograd compiles meanwhile, as it is before it is wrapped in what flattens its arguments: for
    tensors in a list that is half a microsecond for each. Empty where PyTorch does it otherwise."""
    found: list[Callable[[list[torch.Tensor]], Tensors]] = []
    compile_flat = getattr(aot_autograd, "aot_stage2_compile", None)

    def gather(*args: Any, **kwargs: Any) -> Any:
        assert compile_flat is not None
        compiled = compile_flat(*args, **kwargs)
        found.append(compiled[0])
        return compiled

    with mock.patch.object(aot_autograd, "aot_stage2_compile", gather) if compile_flat else nullcontext():
        yield found


def _leave_unread_logs_out(captured: CapturedGraph) -> None:
    """Have AOTAutograd write no graphs out as text where no log takes them: for an MLP's three that took 4% of the time
    of compiling it, the tools' not counted."""
    logs = (graph_compile.aot_joint_log, graph_compile.aot_graphs_log)
    if not trace_log.handlers and not any(log.isEnabledFor(logging.INFO) for log in logs):
        state = captured.joint._aot_state
        state.aot_config = dataclasses.replace(state.aot_config, enable_log=False)


def keep_residuals() -> None:
    """Tell AOTAutograd that no residual is overwritten, so that a backward may run twice (``retain_graph=True``). For
    its compiler callbacks, while it compiles."""
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def split_joint(
    joint: torch.fx.GraphModule,
    backward: CompiledFunction,
    num_forward_outputs: int,
    open_sizes: Mapping[str, torch.SymInt] | None = None,
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """The forward and backward of ``joint`` that save what the compiled backward takes; merges values in ``joint``.
    Where tangents may be absent, all ``open_sizes`` are at hand in the backward: zeros may have any of them."""
    if backward.without is not None:
        restore_heads(joint.graph, open_sizes or {})
    nodes = {node.name: node for node in joint.graph.nodes}
    for name, kept in backward.merged.items():
        nodes[name].replace_all_uses_with(nodes[kept])
    whole = part_names(backward.narrowed)
    names = dict.fromkeys(whole.get(name, name) for name in backward.arguments if not name.startswith("tangents"))
    # A size that only shapes are written in terms of need be no node of the graph.
    found = [nodes[name] for name in names if name in nodes]
    sizes = [node for node in found if SIZE in node.meta] if backward.without is None else find_heads(joint.graph)
    saved = [node for node in found if SIZE not in node.meta]
    # A list of its own: what is not an operand in the backward is taken out of it.
    forward_graph, backward_graph = _extract_fwd_bwd_modules(
        joint, saved, [*sizes], num_fwd_outputs=num_forward_outputs
    )
    _hand_over(forward_graph, backward_graph, sizes)
    narrow_graphs(forward_graph, backward_graph, backward.narrowed, num_forward_outputs)
    return forward_graph, backward_graph


def _hand_over(
    forward_graph: torch.fx.GraphModule, backward_graph: torch.fx.GraphModule, sizes: Sequence[torch.fx.Node]
) -> None:
    """Have the forward save those of ``sizes`` that no tensor has which the backward takes for certain: tangents may be
    absent. PyTorch leaves out what no op of the backward takes, though shapes are written in terms of it.

    Numbers are last among what a forward saves, and first among what its backward takes.
    """
    taken = backward_graph.graph.find_nodes(op="placeholder")
    (output,) = forward_graph.graph.find_nodes(op="output")
    for size in sizes:
        value = size.meta["val"]
        there = [node for node in taken if not is_tangent(node)]
        if size.name in {node.name for node in there} or find_axis(there, value.node.expr) is not None:
            continue
        numbers = sum(isinstance(node.meta.get("val"), SYMBOLIC) for node in taken)
        with backward_graph.graph.inserting_before(taken[numbers]):
            placeholder = backward_graph.graph.placeholder(size.name)
        placeholder.meta = dict(size.meta)
        taken.insert(numbers, placeholder)
        restore_heads(forward_graph.graph, {size.name: value})
        head = next(node for node in forward_graph.graph.nodes if node.name == size.name)
        output.args = ((*output.args[0], head),)
    recompile_when_called(forward_graph)
    recompile_when_called(backward_graph)
