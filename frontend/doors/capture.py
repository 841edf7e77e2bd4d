# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Capture of a model's joint forward and backward graph, ahead of time.

AOTAutograd's joint export does the tracing, of a function of flat tensors; this file turns what can go wrong into
errors that name the user's lines, and the traced graph into one that the import takes. After
``torch._functorch.aot_autograd.aot_export_joint_with_descriptors``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch._functorch.aot_autograd import JointWithDescriptors, aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from retrograd.contract.roles import JOINT
from retrograd.contract.signature import InputSpec, Signature, StateSpec
from retrograd.frontend.complex_numbers.split import CONSTANTS
from retrograd.frontend.decompositions.convolutions.windows import refusing_written_windows
from retrograd.frontend.decompositions.table import tracing_table
from retrograd.frontend.doors.arguments import check_call, input_specs
from retrograd.frontend.doors.capture_checks import (
    check_counters,
    check_differentiable,
    check_gradients,
    check_memory_of_state,
    check_requiring,
    check_writes,
)
from retrograd.frontend.doors.captured_graph import Captured
from retrograd.frontend.doors.checkpoints import tagged_checkpoints
from retrograd.frontend.doors.deferred_code import deferring_code
from retrograd.frontend.doors.flat_module import TENSOR, FlatModule, state_name
from retrograd.frontend.doors.kept_state import NOTHING_KEPT, Choice, OtherChoiceError
from retrograd.frontend.doors.lasting_state import lasting_state
from retrograd.frontend.doors.outputs import output_specs
from retrograd.frontend.doors.partial_writes import find_partly_written
from retrograd.frontend.doors.reached_inputs import tangents_of_gradients
from retrograd.frontend.doors.signature import dtype_name, dump_tree, type_of
from retrograd.frontend.hooks.pack_hooks import find_open_pair
from retrograd.frontend.hooks.traced_hooks import hooks_as_ops, refuse_other_backward_hooks
from retrograd.frontend.preparation.index_bounds import find_index_bounds
from retrograd.frontend.preparation.prepare import Traced, prepare_copied
from retrograd.frontend.python.argument_answers import AskedArguments
from retrograd.frontend.python.kept_attributes import noting_set
from retrograd.frontend.python.side_effects import refuse_dispatch_modes, refuse_hooks_of_all_modules
from retrograd.frontend.python.source_locations import (
    CaptureError,
    ModelError,
    refuse_backward_writes,
    without_stacks_of_fakes,
)
from retrograd.frontend.python.trace_errors import capture_error, is_about_contents
from retrograd.frontend.sizes.dynamic_shapes import DynamicShapes, OpenSizes, size_oblivious
from retrograd.frontend.sizes.size_expressions import to_shape
from retrograd.frontend.traceable.fake_modes import forget_tensors
from retrograd.frontend.traceable.portable_ops import portable_ops
from retrograd.frontend.verification.as_traced import AsTraced

__all__ = ["CaptureError", "CapturedGraph", "capture_joint"]


@dataclass(frozen=True)
class CapturedGraph:
    """A joint graph: ``graph_module`` holds aten ops with ``val`` and ``desc`` metadata, ``signature`` what they mean
    to the user.

    ``module`` is the flat module that was traced; its parameters and buffers, in the order of ``signature``, then the
    tensor inputs, are the graph's primals. ``joint`` is AOTAutograd's own record, which its runtime wrappers are built
    from. ``sizes`` are those that differ from call to call. ``as_traced`` is the graph before it was prepared.
    """

    graph_module: torch.fx.GraphModule
    joint: JointWithDescriptors
    signature: Signature
    module: FlatModule
    num_forward_outputs: int
    as_traced: AsTraced
    sizes: OpenSizes = field(default_factory=OpenSizes)

    def for_build(self) -> Captured:
        """Return the graph as the build takes it; traces the hooks that pack what is saved."""
        return Captured.of(self.graph_module, JOINT, self.signature)


def capture_joint(
    stack: contextlib.ExitStack,
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    *,
    as_in_eager: bool = False,
) -> CapturedGraph:
    """Trace ``model(*args, **kwargs)`` and its backward to one graph of aten ops, without running either.

    ``stack`` must stay open for as long as the result is compiled further (AOTAutograd keeps its fake tensors there).
    ``dynamic_shapes`` says which sizes of the arguments are left open, as for ``torch.export.export``.

    The trace says of itself that it compiles. A model that fails then by an error of its own is traced as it runs in
    eager, as all are by ``as_in_eager``: libraries that leave a mask out where they compile may go on to use it.

    Raises:
        CaptureError: the model cannot be traced; names the line of the user's code and the remedy.
    """
    check_call(model, args, kwargs)
    given = (model, args, dict(kwargs or {}), dynamic_shapes)
    if as_in_eager:
        return _capture(stack.enter_context(contextlib.ExitStack()), *given, says_compiling=False)
    with contextlib.ExitStack() as attempt:
        try:
            captured = _capture(attempt, *given, says_compiling=True)
        except ModelError as error:
            attempt.close()
            try:
                captured = _capture(attempt, *given, says_compiling=False)
            except CaptureError as second:
                told = error if isinstance(second, ModelError) else second
                raise told from told.__cause__
        stack.enter_context(attempt.pop_all())
    return captured


def _capture(
    stack: contextlib.ExitStack,
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    *,
    says_compiling: bool,
    counts: bool = False,
    choice: Choice = NOTHING_KEPT,
    requiring: Collection[int] = (),
) -> CapturedGraph:
    leaves, in_spec = pytree.tree_flatten((tuple(args), kwargs))
    flat = FlatModule(model, in_spec, leaves, says_compiling, choice)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    tensors = tuple(t.detach().requires_grad_() if i in requiring else t for i, t in enumerate(tensors))
    leaves = _replaced(leaves, tensors)
    flat.keep_examples(tensors, counts)
    inputs = input_specs(*pytree.tree_unflatten(leaves, in_spec))
    flat.constants = {i.name: leaf for i, leaf in zip(inputs, leaves, strict=True) if i.type is None}
    check_differentiable(flat, tensors)
    check_memory_of_state(flat.model)
    refuse_other_backward_hooks(flat.model)
    refuse_dispatch_modes()
    refuse_hooks_of_all_modules()
    names = [i.name for i in inputs if i.type is not None]
    shapes = None if dynamic_shapes is None else DynamicShapes.read(model, args, kwargs, dynamic_shapes, names)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=None if shapes is None else ShapeEnv())
    stack.callback(forget_tensors, mode)
    stack.enter_context(torch._guards.tracing(torch._guards.TracingContext(mode)))
    if shapes is not None:
        stack.enter_context(size_oblivious())
        tensors = shapes.make_tensors(mode, tensors)
    given = (stack, model, args, kwargs, dynamic_shapes)
    try:
        joint = _trace(stack, flat, tensors)
    except OtherChoiceError as found:
        stack.close()
        return _capture(*given, says_compiling=says_compiling, counts=counts, choice=found.choice, requiring=requiring)
    flat.note_backward()
    flat.leave_to_hooks()
    kept = _take_out_kept(flat)
    if kept is not None:
        raise kept
    graph_module = joint.graph_module
    refuse_backward_writes(graph_module.graph)
    check_requiring(flat, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
    other = _reconsider(flat, joint)
    if other is not None or flat.requiring or (flat.changes and not counts):
        stack.close()
        counts, choice, requiring = counts or bool(flat.changes), other or choice, {*requiring, *flat.requiring}
        return _capture(*given, says_compiling=says_compiling, counts=counts, choice=choice, requiring=requiring)
    check_gradients(graph_module)
    graph_module.meta.setdefault(CONSTANTS, []).extend(flat.read)
    sizes = OpenSizes() if shapes is None else shapes.find_sizes()
    copied = prepare_copied(Traced(graph_module, sizes.names, find_open_pair(), is_joint=True))
    metadata = joint._aot_state.fw_metadata
    check_writes(metadata, len(joint.params_spec) + len(joint.buffers_spec) + len(tensors))
    inputs = _open_inputs(inputs, tensors, sizes)
    signature = _signature(flat, joint, inputs, sizes)
    first = len(signature.primals) - len(tensors)
    signature = replace(signature, requiring=tuple(first + i for i in sorted(requiring)))
    behind = tangents_of_gradients(
        copied, graph_module.graph.output_node().meta["desc"], metadata.num_forward, flat.reached
    )
    as_traced = AsTraced(copied, metadata.num_forward, behind=behind)
    return CapturedGraph(graph_module, joint, signature, flat, metadata.num_forward, as_traced, sizes)


def _reconsider(flat: FlatModule, joint: JointWithDescriptors) -> Choice | None:
    """Say what another trace has to take, if anything else, of what the model sets its attributes to."""
    if not flat.kept.attributes:
        return None
    placeholders = joint.graph_module.graph.find_nodes(op="placeholder")
    state = dict(zip((*joint.params_spec, *joint.buffers_spec), placeholders, strict=False))
    constants = {id(t) for t in (*find_constants(joint.graph_module), *flat.read)}
    return flat.kept.reconsider(constants, {state_name(name) for name, node in state.items() if not node.users})


def _trace(stack: contextlib.ExitStack, flat: FlatModule, tensors: tuple[torch.Tensor, ...]) -> JointWithDescriptors:
    """AOTAutograd's joint export; whatever it raises becomes an error that names the user's line."""
    flat.tracing = True
    try:
        with (
            fx_traceback.preserve_node_meta(),
            AskedArguments(),
            portable_ops(),
            hooks_as_ops(flat.model, flat.hook_calls),
            tagged_checkpoints(partial(noting_set, flat.model, flat.kept.set_in_blocks)),
            without_stacks_of_fakes(),
            lasting_state(flat, lambda: flat.backward.is_watching),
            deferring_code(),
            contextlib.ExitStack() as ends,
        ):
            ends.callback(flat.end_backward)
            return aot_export_joint_with_descriptors(
                stack, flat, tensors, decompositions=refusing_written_windows(tracing_table())
            )
    except Exception as error:
        kept = _take_out_kept(flat)
        if isinstance(error, CaptureError):
            raise
        # The next of several traces fails somewhere where it meets what the one before has left in a cache.
        raise (kept if kept is not None and not is_about_contents(error) else capture_error(error)) from error
    finally:
        flat.backward.stop()
        flat.tracing = False


def _take_out_kept(flat: FlatModule) -> CaptureError | None:
    """Take what the user's program holds of a trace out of what holds it, and give the refusal."""
    if flat.hooks_graph:
        flat.made.note_of_backward()
    return flat.made.take_out_kept(flat.parts())


def _replaced(leaves: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The leaves, with these in the place of their tensors."""
    remaining = iter(tensors)
    return [next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _open_inputs(
    inputs: Sequence[InputSpec], tensors: Sequence[torch.Tensor], sizes: OpenSizes
) -> tuple[InputSpec, ...]:
    """The inputs, with what their shapes are in terms of the open sizes."""
    remaining = iter(tensors)
    return tuple(
        i if i.type is None else replace(i, type=replace(i.type, shape=to_shape(next(remaining), sizes.names)))
        for i in inputs
    )


def _signature(
    flat: FlatModule, joint: JointWithDescriptors, inputs: tuple[InputSpec, ...], sizes: OpenSizes
) -> Signature:
    if flat.out_spec is None:
        raise AssertionError("the tracer did not call the model")
    metadata = joint._aot_state.fw_metadata
    is_tensor = [leaf is TENSOR for leaf in flat.out_leaves]
    mutated = tuple(i for i, info in enumerate(metadata.input_info) if info.mutates_data)
    signature = Signature(
        params=_state_specs(joint.params_spec, dict(flat.named_parameters(remove_duplicate=False))),
        buffers=_state_specs(joint.buffers_spec, dict(flat.named_buffers(remove_duplicate=False))),
        inputs=inputs,
        outputs=output_specs(joint.graph_module, metadata, is_tensor, flat.out_leaves, flat.out_names, sizes.names),
        in_tree=dump_tree(flat.in_spec),
        out_tree=dump_tree(flat.out_spec),
        mutated=mutated,
        autocast=_autocast(),
        training={} if flat.model is None else {path: m.training for path, m in flat.model.named_modules()},
        sizes=sizes.sizes,
        conditions=sizes.conditions,
        partly_written=find_partly_written(joint.graph_module.graph, mutated),
        indices=find_index_bounds(joint.graph_module.graph),
        kept=flat.kept.specs(),
    )
    check_counters(flat, signature)
    return signature


def _autocast() -> dict[str, str]:
    """The dtype of ``torch.autocast`` for each type of device that it is on for."""
    devices = ("cpu", "cuda")
    return {d: dtype_name(torch.get_autocast_dtype(d)) for d in devices if torch.is_autocast_enabled(d)}


def _state_specs(names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> tuple[StateSpec, ...]:
    return tuple(StateSpec(state_name(name), type_of(tensors[name])) for name in names)


def find_constants(graph_module: torch.fx.GraphModule) -> list[torch.Tensor]:
    """Tensors that a graph reads and that are neither parameters, buffers nor arguments: the user's own, not copies."""
    values = [getattr(graph_module, str(node.target)) for node in graph_module.graph.find_nodes(op="get_attr")]
    values += graph_module.meta.get(CONSTANTS, [])
    return list({id(v): v for v in values if isinstance(v, torch.Tensor)}.values())
