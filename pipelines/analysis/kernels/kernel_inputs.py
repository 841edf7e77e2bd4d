# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Finds which values the ops of a function read from memory, before it is decided which kernels they run in. What two
ops compute alike, MLIR's ``cse`` computes once."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.op_kinds import OpKind

# For each value those that hold its data; for each op, by its number, those that it reads.
Sources = Sequence[tuple[int, ...]]
Reads = Mapping[int, tuple[int, ...]] | Sequence[tuple[int, ...]]


class KernelInputs(NamedTuple):
    """The ops that do work, in order; for each value those that hold its data in memory, unless it is computed inside
    of a kernel; for each op those that it reads; and for each value that ``work`` reads the ops of it that do."""

    work: list[int]
    sources: Sources
    reads: Reads
    users: Mapping[int, list[int]]


def find_inputs(graph: JointGraph, ops: Sequence[int], available: Collection[int]) -> KernelInputs:
    """Find which values ``ops``, run in this order, read, where the values of ``available`` have storage of their
    own."""
    merged = find_merged(graph, ops)
    free = graph.free_ops
    work = [n for n in ops if n not in merged and n not in free]
    sources, reads = _find_reads(graph, ops, available)
    if merged:
        sources, reads = _merge_reads(graph, merged, sources, reads)
    users: dict[int, list[int]] = {}
    for number in work:
        for source in reads[number]:
            users.setdefault(source, []).append(number)
    return KernelInputs(work, sources, reads, users)


def find_merged(graph: JointGraph, ops: Iterable[int]) -> dict[int, int]:
    """The ops among ``ops`` that an earlier one of them computes the same as, with that one: the two run once, and what
    they give stays until the last use of either."""
    first: dict[tuple[Hashable, ...], int] = {}
    found: dict[int, int] = {}
    values: dict[int, int] = {}
    for number in filter(graph.same.__contains__, ops):
        op = graph.ops[number]
        earlier = first.setdefault((graph.same[number], *(graph.form_of(v, values) for v in op.operands)), number)
        if earlier != number:
            found[number] = earlier
            values.update(zip(op.results, graph.ops[earlier].results, strict=True))
    return found


def _find_reads(graph: JointGraph, ops: Iterable[int], available: Collection[int]) -> tuple[Sources, Reads]:
    views = [v for v in available if graph.buffers[v] != (v,)]
    if not views:
        return graph.buffers, graph.buffer_reads
    found = list(graph.buffers)
    for view in views:
        found[view] = (view,)
    reads = {}
    for number in ops:
        op = graph.ops[number]
        if number not in graph.free_ops:
            reads[number] = (
                tuple(dict.fromkeys(s for v in op.operands for s in found[v])) if graph.buffer_reads[number] else ()
            )
            continue
        taken = op.operands[:1] if op.kind is OpKind.VIEW else op.operands
        held = tuple(dict.fromkeys(s for v in taken for s in found[v]))
        for result in op.results:
            if result not in available:
                found[result] = held
    return found, reads


def _merge_reads(graph: JointGraph, merged: Mapping[int, int], sources: Sources, reads: Reads) -> tuple[Sources, Reads]:
    """``sources`` and ``reads`` where what the ops of ``merged`` give is what the earlier ones gave."""
    values = {
        result: kept
        for number, earlier in merged.items()
        for result, kept in zip(graph.ops[number].results, graph.ops[earlier].results, strict=True)
        if graph.buffers[result] == (result,)
    }
    held = list(sources)
    taken = dict(reads) if isinstance(reads, Mapping) else dict(enumerate(reads))
    for value in values:
        for view in (value, *graph.buffer_views.get(value, ())):
            held[view] = tuple(dict.fromkeys(values.get(v, v) for v in held[view]))
        for reader in graph.buffer_readers.get(value, ()):
            if reader in taken:
                taken[reader] = tuple(dict.fromkeys(values.get(v, v) for v in taken[reader]))
    return held, taken
