# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The partition that was decided on MLIR, carried out on the captured FX graph as well.

AOTAutograd gets an ordinary forward and backward pair, and its runtime wrappers look after mutated inputs, aliases and
views. Its compiler callbacks return calls of the compiled functions: values are matched by FX name, nothing is imported
a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors
from torch._functorch.partitioners import _extract_fwd_bwd_modules, default_partition

from retrograd.dialects.sizes import evaluate_size
from retrograd.frontend.capture import CapturedGraph, capture_joint
from retrograd.frontend.narrowing import Packer, narrow_graphs, part_names
from retrograd.frontend.outputs import AxisOrder, find_order, hint, is_contiguous, result_strides
from retrograd.frontend.pack_hooks import hidden_hooks
from retrograd.frontend.random_ops import draw_seed, find_seed
from retrograd.frontend.size_expressions import to_expression
from retrograd.frontend.size_nodes import SIZE, SYMBOLIC, find_axis, find_heads

# Strides in elements, or, of a tensor whose sizes differ from call to call, the order of its axes in memory.
Layout: TypeAlias = "tuple[int, ...] | AxisOrder"
Tensors = Sequence[torch.Tensor]
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class CompiledFunction:
    """A compiled function: FX names of its arguments and results, in order, and how to call it on tensors.

    ``copied`` are arguments of which it gives copies, because what they hold is overwritten before the backward.
    ``merged`` are values of the graph that the compiler found to be others', by name: it knows them by the latter.
    ``narrowed`` is how values are saved that are not saved as they are, by name. ``device`` is where its tensors are.
    """

    arguments: tuple[str, ...]
    results: tuple[str, ...]
    copied: frozenset[str]
    call: Callable[[Tensors], Tensors]
    merged: Mapping[str, str] = field(default_factory=dict)
    narrowed: Mapping[str, Packer] = field(default_factory=dict)
    device: torch.device = _CPU


def bind(
    captured: CapturedGraph, forward: CompiledFunction, backward: CompiledFunction
) -> Callable[[Tensors], Tensors]:
    """A differentiable function of the graph's primals (params, buffers, tensor inputs) that gives the model's tensor
    outputs.

    Must be called while the stack that the graph was captured in is open.
    """

    def partition(joint: torch.fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_options: Any) -> Any:
        return split_joint(joint, backward, num_fwd_outputs)

    def compile_forward(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        return make_boxed_func(graph_caller(gm, forward, restride=captured.num_forward_outputs, sizes=sizes))

    def compile_backward(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        keep_residuals()
        return make_boxed_func(graph_caller(gm, backward, restride=0, sizes=sizes))

    sizes = size_values(captured.graph_module)
    return _wrap(captured, partition, compile_forward, compile_backward)


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
    captured: CapturedGraph, partition: Callable[..., Any], compile_forward: Any, compile_backward: Any
) -> Callable[[Tensors], Tensors]:
    with hidden_hooks():
        wrapped = aot_compile_joint_with_descriptors(
            captured.joint, partition_fn=partition, fw_compiler=compile_forward, bw_compiler=compile_backward
        )

    def call(tensors: Tensors) -> Tensors:
        if torch.is_grad_enabled():
            return wrapped(*tensors)
        # AOTAutograd records its calls in any mode: there is nothing to record where no argument requires grad.
        detached = [t.detach() if t.requires_grad else t for t in tensors]
        given = {id(d): t for d, t in zip(detached, tensors, strict=True)}
        return [given.get(id(output), output) for output in wrapped(*detached)]

    return call


def keep_residuals() -> None:
    """Tell AOTAutograd that no residual is overwritten, so that a backward may run twice (``retain_graph=True``).

    For its compiler callbacks, while it compiles.
    """
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def split_joint(
    joint: torch.fx.GraphModule, backward: CompiledFunction, num_forward_outputs: int
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """The forward and backward of ``joint`` that save what the compiled backward takes; merges values in ``joint``."""
    nodes = {node.name: node for node in joint.graph.nodes}
    for name, kept in backward.merged.items():
        nodes[name].replace_all_uses_with(nodes[kept])
    whole = part_names(backward.narrowed)
    names = dict.fromkeys(whole.get(name, name) for name in backward.arguments if not name.startswith("tangents"))
    # A size that only shapes are written in terms of need be no node of the graph.
    found = [nodes[name] for name in names if name in nodes]
    sizes = [node for node in found if SIZE in node.meta]
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
    """Have the forward save those of ``sizes`` that no tensor has which the backward takes: PyTorch leaves out what no
    op of the backward takes, though shapes are written in terms of it.

    Numbers are last among what a forward saves, and first among what its backward takes.
    """
    taken = backward_graph.graph.find_nodes(op="placeholder")
    (output,) = forward_graph.graph.find_nodes(op="output")
    for size in sizes:
        value = size.meta["val"]
        if size.name in {node.name for node in taken} or find_axis(taken, value.node.expr) is not None:
            continue
        numbers = sum(isinstance(node.meta.get("val"), SYMBOLIC) for node in taken)
        with backward_graph.graph.inserting_before(taken[numbers]):
            placeholder = backward_graph.graph.placeholder(size.name)
        placeholder.meta = dict(size.meta)
        taken.insert(numbers, placeholder)
        head = next(node for node in forward_graph.graph.nodes if node.name == size.name)
        output.args = ((*output.args[0], head),)
    forward_graph.recompile()
    backward_graph.recompile()


def graph_caller(
    graph_module: torch.fx.GraphModule,
    function: CompiledFunction,
    *,
    restride: int,
    sizes: Mapping[str, torch.SymInt] | None = None,
) -> Callable[..., list[Any]]:
    """A function with the graph's signature that runs ``function``; the first ``restride`` results get the strides of
    the trace. ``sizes`` are the open sizes of the whole trace, by the names of their nodes."""
    places, more = _argument_places(graph_module.graph, function.device, sizes or {})
    (output,) = graph_module.graph.find_nodes(op="output")
    nodes = torch.utils._pytree.arg_tree_leaves(*output.args)
    taken = [places[name] for name in function.arguments]
    index = {name: i for i, name in enumerate(function.results)}
    # Each result of the graph: an argument handed through, or a result of the compiled function.
    handed = {name: place for name, place in places.items() if name not in function.copied}
    through = [handed.get(node.name) if isinstance(node, torch.fx.Node) else None for node in nodes]
    numbers = [_number_expression(node, sizes or {}) for node in nodes]
    computed = [
        index[n.name] if isinstance(n, torch.fx.Node) and n.name not in handed and number is None else None
        for n, number in zip(nodes, numbers, strict=True)
    ]
    heads = {name: places[name] for name in sizes or {} if name in places}
    # None where there is no gradient, or a size that the graph was specialized on.
    constants = [None if isinstance(node, torch.fx.Node) else node for node in nodes]
    strides = [_strides_of(node) if i < restride else None for i, node in enumerate(nodes)]

    def call(*tensors: Any) -> list[Any]:
        if more:
            tensors = (*tensors, *[read(tensors) for read in more])
        results = function.call([tensors[i] for i in taken])
        out: list[Any] = []
        for argument, result, stride, constant, number in zip(
            through, computed, strides, constants, numbers, strict=True
        ):
            if argument is not None:
                out.append(tensors[argument])
            elif number is not None:
                out.append(evaluate_size(number, {name: tensors[place] for name, place in heads.items()}))
            else:
                out.append(constant if result is None else _with_strides(results[result], stride))
        return out

    return call


def _argument_places(
    graph: torch.fx.Graph, device: torch.device, sizes: Mapping[str, torch.SymInt]
) -> tuple[dict[str, int], list[Callable[[Sequence[Any]], Any]]]:
    """Where among the arguments of a call each named value stands; and what a seed and sizes, which follow them, are
    drawn or read with at each call."""
    placeholders = graph.find_nodes(op="placeholder")
    places = {node.name: i for i, node in enumerate(placeholders)}
    more: list[Callable[[Sequence[Any]], Any]] = []
    seed = find_seed(graph)
    if seed is not None:
        places[seed.name] = len(places)
        more.append(lambda _: draw_seed().to(device))
    for name, size in sizes.items():
        if name not in places and (place := find_axis(placeholders, size.node.expr)) is not None:
            places[name] = len(places)
            more.append(partial(_read_size, *place))
    return places, more


def size_values(graph_module: torch.fx.GraphModule) -> dict[str, torch.SymInt]:
    """The open sizes of a traced graph by the names of their nodes."""
    return {node.name: node.meta["val"] for node in find_heads(graph_module.graph)}


def _number_expression(node: Any, sizes: Mapping[str, torch.SymInt]) -> Any:
    """A result that is a number of sizes, as an expression over the names of their nodes."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if not isinstance(value, torch.SymInt):
        return None
    return to_expression(value.node.expr, {size.node.expr: name for name, size in sizes.items()})


def _read_size(argument: int, axis: int, tensors: Sequence[torch.Tensor]) -> int:
    return tensors[argument].shape[axis]


def _strides_of(node: Any) -> Layout | None:
    """The layout to restore, where it is not what a compiled function gives."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or is_contiguous(value):
        return None
    strides = result_strides(value)
    if all(isinstance(stride, int) for stride in strides):
        return tuple(hint(stride) for stride in strides)
    return find_order(strides)


def _with_strides(tensor: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    if layout is None:
        return tensor
    if isinstance(layout, AxisOrder):
        return layout.apply(tensor)
    once = tensor[tuple(slice(None) if step else slice(1) for step in layout)]
    copy = torch.empty_strided(once.shape, layout, dtype=tensor.dtype, device=tensor.device).copy_(once)
    return copy.expand(tensor.shape)
