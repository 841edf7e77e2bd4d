# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Graphs that Dynamo captured: what ``torch.compile(backend="retrograd")`` runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TorchDynamoException
from torch._functorch._aot_autograd.descriptors import (
    SubclassGetAttrAOTInput,
    SubclassSizeAOTInput,
    SubclassStrideAOTInput,
    SyntheticBaseAOTInput,
    ViewBaseAOTInput,
)
from torch._library.fake_class_registry import FakeScriptObject
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, free_unbacked_symbols

from retrograd.contract.roles import BACKWARD, FORWARD, JOINT
from retrograd.frontend.decompositions.convolutions.windows import refusing_written_windows
from retrograd.frontend.decompositions.table import tracing_table
from retrograd.frontend.doors.absent_tangents import leave_out_updates
from retrograd.frontend.doors.call_plan import boxed
from retrograd.frontend.doors.captured_graph import Captured
from retrograd.frontend.doors.deferred_code import deferring_code
from retrograd.frontend.doors.eager_peak import eager_peak_of_graph
from retrograd.frontend.doors.graph_calls import CompiledFunction, graph_caller, size_values
from retrograd.frontend.doors.inner_gradients import heeding_hooks
from retrograd.frontend.doors.recurring_sizes import COMINGS, MOST_SIZES, Compile, RecurringSizes
from retrograd.frontend.doors.second_derivatives import SecondDerivatives
from retrograd.frontend.doors.unseen_modes import telling_modes
from retrograd.frontend.hooks.pack_hooks import find_open_pair, guard_hooks, hidden_hooks, inlined_in
from retrograd.frontend.islands.island_choice import draws_numbers
from retrograd.frontend.layers.random_ops import find_seed
from retrograd.frontend.layers.recurrent_frames import find_long_recurrence
from retrograd.frontend.preparation.fx_partition import keep_residuals, split_joint
from retrograd.frontend.preparation.prepare import Traced, prepare_copied, to_number
from retrograd.frontend.python.source_locations import (
    CaptureError,
    LeftToEagerError,
    refuse_backward_writes,
    shared_memory_error,
    source_place,
)
from retrograd.frontend.sizes.size_nodes import find_symbolic, has_open_sizes
from retrograd.frontend.traceable.portable_ops import portable_ops
from retrograd.frontend.verification.as_traced import AsTraced, OtherThanTraced

_LOG = logging.getLogger(__name__)
aten = torch.ops.aten

# Compiles a captured graph; returns the functions it became, by name.
Build = Callable[[Captured], Mapping[str, CompiledFunction]]


def compile_with_dynamo(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[torch.Tensor | torch.SymInt],
    build: Build,
    *,
    in_budget: bool = False,
) -> Callable[..., Any]:
    """Run a graph of Dynamo's through AOTAutograd, with ``build`` as the compiler of its joint or inference graph;
    ``in_budget`` says that this asks how much memory the graph takes in eager.

    A graph with a recurrent layer that would be a long loop runs in eager, and a warning is logged; as does one that
    has streams of its own, which AOTAutograd takes for a write to a tensor that it cannot trace; one that
    writes to an argument which shares its memory with another: what Dynamo hands from one part of a function to the
    next may be a tensor and a view of it; one that takes objects, as those of tensor parallel models take meshes; and
    one that assigns ``.data`` of an argument in a way that AOTAutograd does not take.

    Raises:
        CaptureError: a size that depends on data.
    """
    left = find_long_recurrence(graph_module) or _find_recorded_stream(graph_module)
    if left is not None:
        _LOG.warning("run in eager: %s", left)
        return graph_module.forward
    if has_open_sizes(example_inputs) and _are_on_cuda(example_inputs):
        return _take_sizes_by_themselves(
            graph_module, example_inputs, partial(compile_with_dynamo, build=build, in_budget=in_budget)
        )
    peak = eager_peak_of_graph(graph_module, example_inputs) if in_budget else None
    try:
        if has_open_sizes(example_inputs):
            try:
                return _compile(graph_module, example_inputs, build, peak)
            except (_Refused, CaptureError) as refused:
                if isinstance(refused, _Refused) and isinstance(refused.error, LeftToEagerError):
                    raise
                _warn_of_one_size(refused)
            except TorchDynamoException:
                raise
            except RuntimeError as error:
                # Of PyTorch's own, which traces some gradients for numbers alone (``affine_grid``'s).
                _warn_of_one_size(error)
            specialize_sizes(example_inputs)
        return _compile(graph_module, example_inputs, build, peak)
    except _Refused as refused:
        if isinstance(refused.error, LeftToEagerError):
            # Behind a semicolon are other doors.
            remedy = refused.error.remedy.partition("; or ")[0]
            _LOG.warning("run in eager: %s; to compile it, %s", refused.error.message, remedy)
            return graph_module.forward
        raise refused.error from refused.error.__cause__


def _find_recorded_stream(graph_module: torch.fx.GraphModule) -> str | None:
    """Find a tensor that is noted to be used on another stream; says where."""
    for node in graph_module.graph.find_nodes(op="call_method", target="record_stream"):
        place = source_place(node.meta.get("stack_trace"))
        return f"a tensor is recorded for another stream{f' at {place}' if place else ''}, which no graph holds"
    return None


def _take_sizes_by_themselves(
    graph_module: torch.fx.GraphModule, inputs: Sequence[Any], compile_fixed: Compile
) -> RecurringSizes:
    _LOG.warning(
        "sizes are open, for which code on CUDA is slow: sizes that come %d times are compiled for by themselves, up "
        "to %d of them, and others run in eager; to have more of it compiled, pad to a few sizes",
        COMINGS,
        MOST_SIZES,
    )
    return RecurringSizes(graph_module, inputs, compile_fixed)


def _warn_of_one_size(error: Exception) -> None:
    _LOG.warning("not compiled for more than one size: %s", str(error).strip().partition("\n")[0])


class _Refused(Exception):
    """``error`` is why a traced graph could not be compiled; other exceptions are Dynamo's own affair."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _refuse_assigned_data(graph_module: torch.fx.GraphModule, error: AssertionError) -> None:
    """Raise ``_Refused`` where an argument's ``.data`` is assigned, which explains what AOTAutograd says of a graph.

    To copy instead would be seen through whatever else has the old memory, and leave what has the new one apart.
    """
    for node in graph_module.graph.nodes:
        if node.target is torch.Tensor.set_ and node.args[0].op in ("placeholder", "get_attr"):
            place = source_place(node.meta.get("stack_trace"))
            where = f" at {place}" if place else ""
            message = f".data of an argument or parameter is assigned{where}"
            raise _Refused(LeftToEagerError(message, "copy to it by copy_() under torch.no_grad()")) from error


def _refuse_arguments(traced: torch.fx.GraphModule) -> None:
    """Raise where an argument is what compiled functions have no place for: an object, or the memory that others share.

    What follows would be refused for its open sizes, which are not the cause.
    """
    for node in traced.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, FakeScriptObject):
            kind = type(value.real_obj).__name__
            remedy = "compile the parts of the model that have plain tensors alone"
            raise LeftToEagerError(f"the graph takes a {kind}, as DTensors do", remedy)
        if isinstance(node.meta.get("desc"), SubclassGetAttrAOTInput | SubclassSizeAOTInput | SubclassStrideAOTInput):
            remedy = "compile the parts of the model that have plain tensors alone"
            raise LeftToEagerError("the graph takes a tensor of a class of its own, as nested ones are", remedy)
        if isinstance(node.meta.get("desc"), SyntheticBaseAOTInput | ViewBaseAOTInput):
            raise shared_memory_error()


def _compile(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[torch.Tensor | torch.SymInt],
    build: Build,
    eager_peak: int | None,
) -> Callable[..., Any]:
    _check_sizes(example_inputs)
    pair = find_open_pair()
    guard_hooks(pair)
    functions: dict[str, CompiledFunction] = {}
    own = any(True for _ in (*graph_module.parameters(), *graph_module.buffers()))
    derivatives = SecondDerivatives("a graph of torch.compile's", None if own else graph_module)
    outputs: list[int] = []
    as_traced: list[AsTraced] = []
    sizes: dict[str, torch.SymInt] = {}

    def compile_traced(traced: torch.fx.GraphModule, name: str, count: int) -> Mapping[str, CompiledFunction]:
        try:
            _refuse_arguments(traced)
            refuse_backward_writes(traced.graph)
            copied = prepare_copied(Traced(traced, _find_sizes(traced), pair, is_joint=name == JOINT, is_dynamo=True))
            as_traced.append(AsTraced(copied, count))
            sizes.update(size_values(traced))
            return build(replace(Captured.of(traced, name, is_part=True), eager_peak=eager_peak))
        except (RuntimeError, ValueError) as error:
            raise _Refused(error) from error

    def partition(joint: torch.fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_options: Any) -> Any:
        if find_seed(joint.graph) is not None or draws_numbers(joint):
            # Drawn once more, they would be others.
            derivatives.eager = None
        leave_out_updates(joint, num_fwd_outputs, example_inputs)
        functions.update(compile_traced(joint, JOINT, num_fwd_outputs))
        outputs.append(num_fwd_outputs)
        return split_joint(joint, functions[BACKWARD], num_fwd_outputs)

    def compile_forward(traced: torch.fx.GraphModule, _inputs: Any) -> Any:
        return boxed(graph_caller(traced, functions[FORWARD], restride=outputs[-1], sizes=sizes, traced=as_traced[-1]))

    def compile_backward(traced: torch.fx.GraphModule, _inputs: Any) -> Any:
        keep_residuals()
        call = graph_caller(traced, functions[BACKWARD], restride=0, sizes=sizes, traced=as_traced.pop())
        return boxed(telling_modes(call))

    def compile_inference(traced: torch.fx.GraphModule, _inputs: Any) -> Any:
        (output,) = traced.graph.find_nodes(op="output")
        count = len(torch.utils._pytree.arg_tree_leaves(*output.args))
        function = compile_traced(traced, FORWARD, count)[FORWARD]
        return boxed(graph_caller(traced, function, restride=count, sizes=sizes, traced=as_traced.pop()))

    compiler = aot_autograd(
        fw_compiler=compile_forward,
        bw_compiler=compile_backward,
        inference_compiler=compile_inference,
        partition_fn=partition,
        decompositions=refusing_written_windows(_table_for(graph_module)),
    )
    # AOTAutograd's cache keeps what compilers return, and ours return calls of a program loaded in this process. It
    # would not see the options either; the executables have a cache of their own.
    uncached = torch._functorch.config.patch(enable_autograd_cache=False)
    with derivatives.open(), portable_ops(), hidden_hooks(), deferring_code(), uncached:
        try:
            compiled: Callable[..., Any] = compiler(graph_module, example_inputs)
        except AssertionError as error:
            _refuse_assigned_data(graph_module, error)
            raise
    compiled = taking_numbers(compiled, graph_module, example_inputs)
    compiled = heeding_hooks(_left_to_eager(compiled, graph_module.forward), graph_module)
    return compiled if pair is None else inlined_in(compiled)


def _table_for(graph_module: torch.fx.GraphModule) -> dict[Any, Callable[..., Any]]:
    """The table to trace a graph by. Beside a scan, what detaches stays as it is: PyTorch keeps what a step returns,
    detached, for the gradient, and takes a copy of it in place of that op for the copy which the step returns."""
    table = tracing_table()
    if any(node.target is torch.ops.higher_order.scan for node in graph_module.graph.nodes):
        for op in (aten.detach.default, aten.alias_copy.default):
            table.pop(op, None)
    return table


def _left_to_eager(compiled: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
    """``compiled``, and ``eager`` once it was found to be another graph than the traced one."""
    is_wrong = False

    def run(*arguments: Any) -> Any:
        nonlocal is_wrong
        if not is_wrong:
            try:
                return compiled(*arguments)
            except OtherThanTraced:
                is_wrong = True
        return eager(*arguments)

    return run


def specialize_sizes(inputs: Sequence[Any]) -> None:
    """Fix the symbolic sizes of a graph's inputs at those of this call.

    To ask for a symbol's number adds a guard: Dynamo captures again for another one, and counts and limits that as any
    recompilation.
    """
    # By name before the guards: a number is all that is left of them after.
    symbols = {str(value): value for value in find_symbolic(inputs) if value.node.expr.is_symbol}
    for value in find_symbolic(inputs):
        to_number(value)
    if symbols:
        _LOG.warning(
            "compiling for the sizes %s; another size compiles again, up to torch._dynamo.config.recompile_limit times",
            ", ".join(f"{name} = {to_number(value)}" for name, value in symbols.items()),
        )


def _are_on_cuda(inputs: Sequence[Any]) -> bool:
    return any(isinstance(value, Tensor) and value.device.type == "cuda" for value in inputs)


def _check_sizes(inputs: Sequence[Any]) -> None:
    """Fix numbers that are no sizes (Dynamo makes symbols of floats too).

    Raises:
        CaptureError: a size that depends on the data.
    """
    for value in find_symbolic(inputs):
        try:
            if isinstance(value, torch.SymInt) and not free_unbacked_symbols(value):
                continue
            to_number(value)
        except GuardOnDataDependentSymNode as error:
            raise CaptureError(
                f"a size depends on the data: {error}", "leave the op that gives it outside of the compiled function"
            ) from error


def _find_sizes(traced: torch.fx.GraphModule) -> dict[sympy.Symbol, str]:
    """The open sizes of a graph's arguments, which have no names of their own."""
    names: dict[sympy.Symbol, str] = {}
    for node in traced.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else [value]:
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                names.setdefault(size.node.expr, str(size.node.expr))
    return names


def taking_numbers(
    call: Callable[..., Any], graph_module: torch.fx.GraphModule, examples: Sequence[Any]
) -> Callable[..., Any]:
    """``call``, which is given numbers of Python's, as ``random.random()``, in the dtypes that they were captured in:
    Dynamo captures them as tensors of the default dtype, and calls with float64."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    dtypes = {
        place: example.dtype
        for place, (node, example) in enumerate(zip(placeholders, examples, strict=True))
        if isinstance(example, Tensor) and getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False)
    }
    if not dtypes:
        return call

    def run(*arguments: Any) -> Any:
        given = [*arguments]
        for place, dtype in dtypes.items():
            given[place] = given[place].to(dtype)
        return call(*given)

    return run
