# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which ops of a graph give what an earlier one gives already.

Local value numbering (J. Cocke and J. T. Schwartz, *Programming languages and their compilers*, 1970): an op's number
is what it does and the numbers of its operands, so that equal chains are found in one walk.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from retrograd.contract.attributes import BWD_PACKED_AS
from retrograd.contract.formats import narrowed_bytes
from retrograd.dialects import ir
from retrograd.pipelines.analysis.layout.tensor_types import element_type
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.op_kinds import REORDERS, RESHAPES, OpKind

# A second run gives other values, or does something besides giving values.
IMPURE = (OpKind.RANDOM, OpKind.OPAQUE)


def find_duplicates(
    graph: JointGraph,
    meanings: Sequence[Hashable | None],
    marks: Sequence[Hashable | None] = (),
    *,
    across_halves: bool = False,
) -> dict[int, int]:
    """For each op whose results an earlier op gives as well, that op.

    Args:
        graph: the function; what it returns stays as it is, since its caller owns each result and may write to it.
        meanings: for each op what it does with its operands (name, attributes, types of its results); ``None`` for one
            that is never merged.
        marks: for each op what was asked of it; one that has a mark is merged into one of the same mark only.
        across_halves: whether an op of the backward may be merged into one that the forward needs, which then has one
            more value to save.
    """
    returned = {*graph.forward_results, *graph.backward_results}
    # For each value the one that it is the same as.
    same = list(range(len(graph.values)))
    first: dict[Hashable, int] = {}
    duplicates: dict[int, int] = {}
    for op in graph.ops:
        if op.kind in IMPURE or meanings[op.id] is None:
            continue
        half = None if across_halves else op.id in graph.forward_ops
        number = (meanings[op.id], half, tuple(graph.form_of(v, same) for v in op.operands))
        mark = marks[op.id] if marks else None
        earlier = first.setdefault((number, mark), op.id) if mark is not None else first.get(number, op.id)
        first.setdefault(number, op.id)
        if earlier != op.id and returned.isdisjoint(op.results):
            duplicates[op.id] = earlier
            for result, original in zip(op.results, graph.ops[earlier].results, strict=True):
                same[result] = original
    return duplicates


def find_reshaped(graph: JointGraph, shapes: Sequence[Hashable | None]) -> dict[int, tuple[int, Hashable | None]]:
    """For each value that holds all that another one holds, in its order: that one, and the shape it has of it, which
    is ``None`` where that is the other's own.

    ``shapes`` are those of the values, ``None`` for what has no fixed shape.
    """
    found: dict[int, tuple[int, Hashable | None]] = {}
    for op in graph.ops:
        if op.name in RESHAPES and shapes[op.results[0]] is not None:
            root, _ = found.get(op.operands[0], (op.operands[0], None))
            shape = shapes[op.results[0]]
            found[op.results[0]] = (root, None if shape == shapes[root] else shape)
    return found


def find_transposed(graph: JointGraph, ranks: Sequence[int | None]) -> dict[int, int]:
    """For each value that is the transpose of a matrix that matrix; ``ranks`` are those of the values."""
    turned = (op for op in graph.ops if op.name in REORDERS and ranks[op.operands[0]] == 2)
    return {op.results[0]: op.operands[0] for op in turned}


def number_repeated(graph: JointGraph, meanings: Sequence[Hashable | None]) -> dict[int, int]:
    """The ops that give the same as others, in whichever half, with equal numbers where they do."""
    found = find_duplicates(graph, meanings, across_halves=True)
    return found | {earlier: earlier for earlier in found.values()}


# The narrower type that an op's results are saved in.
STORED = "bwd.saved_dtype"
# Of an op: its results are kept on the host, where they are saved; always, or where a budget's plan says so.
KEPT_ON_HOST, ALWAYS, MAYBE = "bwd.offload", "always", "maybe"


def stored_bytes(value: ir.OpResult, shape: tuple[int, ...] | None, packed: Mapping[str, int]) -> int | None:
    """Bytes of a result of an op when it is saved in a narrower type, or packed by a function of which ``packed`` has
    the bytes; ``None`` if it is saved as it is."""
    format = stored_format(value, shape)
    return (
        packed.get(packed_as(value))
        if format is None
        else narrowed_bytes(format, shape or (), element_type(value.type))
    )


def stored_format(value: ir.OpResult, shape: tuple[int, ...] | None) -> str | None:
    """The narrower type that a result of an op is saved in; ``None`` where it would take no fewer bytes."""
    if STORED not in value.owner.attributes or shape is None:
        return None
    format = str(ir.StringAttr(value.owner.attributes[STORED]).value)
    return None if narrowed_bytes(format, shape, element_type(value.type)) is None else format


def packed_as(value: ir.OpResult) -> str:
    """The name of the function that packs a result of an op; empty if none does."""
    if BWD_PACKED_AS not in value.owner.attributes:
        return ""
    return str(ir.StringAttr(ir.ArrayAttr(value.owner.attributes[BWD_PACKED_AS])[value.result_number]).value)
