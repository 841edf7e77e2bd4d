# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Checks for ``bwd-partition``: refuses graphs that cannot be split, marks that contradict, plans that lose
something."""

from __future__ import annotations

from dataclasses import replace

from retrograd.contract.attributes import BWD_RECOMPUTE, BWD_SHAPE, BWD_SHAPES, BWD_SIZES, Tag
from retrograd.contract.sizes import find_symbols, parse_shape
from retrograd.dialects import ir
from retrograd.pipelines.analysis.layout.tensor_types import tensor_shape
from retrograd.pipelines.analysis.partition.partition_plan import PartitionPlan, find_unsavable
from retrograd.pipelines.analysis.partition.read_graph import ReadGraph, ShapeReader, read_hints
from retrograd.pipelines.analysis.partition.tags import TagError, resolve_tags
from retrograd.pipelines.infra.passes import PassFailure

# Ops that do something besides giving results.
_OBSERVED = ("bwd.accumulate_grad", "bwd.call_backward", "bwd.call_hook", "bwd.final_callbacks", "bwd.save")


def check_structure(func: ir.Operation) -> None:
    """Refuse what is no straight line of ops.

    Raises:
        PassFailure: the function has no body or several blocks, or an op of it has a region.
    """
    if len(func.regions[0].blocks) != 1:
        message = f"bwd-partition: @joint has {len(func.regions[0].blocks)} blocks, expected one"
        raise PassFailure(func, message, "capture the graph without control flow")
    for view in func.regions[0].blocks[0].operations:
        if any(len(region.blocks) for region in view.operation.regions):
            message = "bwd-partition: an op with a region can be in neither half"
            raise PassFailure(view.operation, message, "capture the graph without control flow")


def check_shapes(func: ir.Operation) -> None:
    """Refuse sizes that nobody could count or pass on.

    Raises:
        PassFailure: an argument or a result of an op has an open size and no expressions for its shape, or ones over
            symbols that the module has no number for; at the op.
    """
    shapes, known = ShapeReader(func), read_hints(func.parent.operation) if func.parent is not None else {}
    block = func.regions[0].blocks[0]
    found = [(func, argument) for argument in block.arguments]
    found += [(view.operation, result) for view in block.operations for result in view.operation.results]
    for op, value in found:
        declared = tensor_shape(value.type) or ()
        if None not in declared:
            continue
        text = shapes.text(value)
        try:
            symbols = find_symbols(parse_shape(text))
        except ValueError as error:
            raise PassFailure(op, f"bwd-partition: {error}", f"write {BWD_SHAPES} as in 'batch, 4 * tokens'") from error
        if len(parse_shape(text)) != len(declared) or not symbols <= known.keys():
            message = (
                f"bwd-partition: of a value of type {value.type}, open sizes are not written in its shape, '{text}'"
            )
            raise PassFailure(
                op, message, f"write all its sizes in {BWD_SHAPE} or {BWD_SHAPES}, over symbols of {BWD_SIZES}"
            )


def check_tags(func: ir.Operation) -> None:
    """Refuse a ``bwd.recompute`` that is none of the tags.

    Raises:
        PassFailure: at the op.
    """
    known = [ir.StringAttr.get(tag.value) for tag in Tag]
    for view in func.regions[0].blocks[0].operations:
        op = view.operation
        if BWD_RECOMPUTE in op.attributes and op.attributes[BWD_RECOMPUTE] not in known:
            message = f"bwd-partition: {BWD_RECOMPUTE} is {op.attributes[BWD_RECOMPUTE]}"
            raise PassFailure(op, message, f"it is one of {', '.join(map(str, known))}")


def resolve_marks(read: ReadGraph) -> ReadGraph:
    """``read`` with what the user asked for on the ops that it is about.

    Raises:
        PassFailure: marks contradict each other; at the op.
    """
    try:
        return replace(read, graph=resolve_tags(read.graph))
    except TagError as error:
        raise PassFailure(read.ops[error.op], f"bwd-partition: {error.message}", error.remedy) from error


def check_plan(func: ir.Operation, read: ReadGraph, plan: PartitionPlan) -> None:
    """Refuse a plan that would lose something or give other results.

    Raises:
        PassFailure: a result of the forward depends on a tangent, a value that is no tensor would have to be saved, or
            neither half runs an op that the user can observe.
    """
    graph = read.graph
    if graph.tangents.intersection(graph.forward_results) or graph.forward_ops & graph.tangent_ops:
        message = "bwd-partition: a result of the forward depends on a tangent"
        raise PassFailure(func, message, 'mark it with bwd.role = "grad" if it belongs to the backward')
    unsavable = find_unsavable(graph, plan)
    if unsavable is not None:
        raise PassFailure(
            read.ops[unsavable],
            "bwd-partition: the backward needs a result that is no tensor, so not saved, of what must not run twice",
            "give the backward a tensor or a constant in its place",
        )
    for op in graph.ops:
        if op.name in _OBSERVED and op.id not in plan.forward and op.id not in plan.backward:
            message = "bwd-partition: no result of @joint depends on this op, so that neither half would run it"
            raise PassFailure(read.ops[op.id], message, "lower it first, or return what it gives")
