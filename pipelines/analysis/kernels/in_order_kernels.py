# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Predicts how the passes for kernels one at a time change a function's kernels: ``bwd-repeat-elementwise`` computes
what is made of an argument anew for each kernel that reads it, ``bwd-split-columns`` has the columns of one tap at a
time in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from retrograd.pipelines.analysis.kernels.kernel_steps import Step, Steps, find_listed
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.op_kinds import OpKind

_JOIN, _PRODUCT = "torch.aten.cat", "torch.aten.mm"
# For computing a tensor again where it is read: an input of so small a part of its bytes may be read besides, and stay
# in memory for longer; of tensors of fewer bytes there is too little to gain for ops that have to be compiled.
SMALL_PART, LEAST_BYTES = 16, 1 << 14
_NAMES = """add.Scalar add.Tensor clamp clamp_max clamp_min clone contiguous div.Scalar div.Tensor eq.Scalar eq.Tensor
    ge.Scalar ge.Tensor gt.Scalar gt.Tensor le.Scalar le.Tensor logical_and logical_not logical_or lt.Scalar lt.Tensor
    maximum minimum mul.Scalar mul.Tensor ne.Scalar ne.Tensor neg relu rsub.Scalar sub.Scalar sub.Tensor
    threshold_backward where.ScalarOther where.ScalarSelf where.self _to_copy"""
_ARITHMETIC = frozenset(f"torch.aten.{name}" for name in _NAMES.split())
_LOOPS = (OpKind.POINTWISE, OpKind.REDUCTION)


@dataclass(frozen=True)
class _Chain:
    """Says from which values arithmetic makes a tensor: an argument, and tensors that are small beside it."""

    source: int
    small: tuple[int, ...]


def order_kernels(graph: JointGraph, formed: Steps, available: Iterable[int]) -> Steps:
    """``formed``, the kernels of a function of the arguments ``available`` as they are side by side, as these passes
    leave them."""
    arguments = frozenset(source for value in available for source in graph.buffers[value])
    sizes = {**formed.bytes, **dict(_find_columns(graph, formed))}
    return _repeat(graph, Steps(formed.steps, sizes), arguments)


def _find_columns(graph: JointGraph, formed: Steps) -> Iterator[tuple[int, int]]:
    """Find values that are joined for a product alone, as its second operand, with the bytes of the largest group of
    their parts: as many are together as have the bytes of the largest part of all."""
    found = {joined: parts for joined, parts in _find_joined(graph, formed) if parts}
    most = max((max(parts) for parts in found.values()), default=0)
    for joined, parts in found.items():
        yield joined, max(sum(parts[i] for i in group) for group in group_parts(parts, most))


def group_parts(sizes: Sequence[int], most: int) -> list[list[int]]:
    """The places of what is joined for a product, in order, as many together as have ``most`` bytes: each group gets a
    product of its own where kernels run one at a time."""
    groups: list[list[int]] = []
    left = 0
    for place, size in enumerate(sizes):
        if not groups or size > left:
            groups.append([])
            left = most
        groups[-1].append(place)
        left -= size
    return groups


def _find_joined(graph: JointGraph, formed: Steps) -> Iterator[tuple[int, list[int]]]:
    """Find values that are joined for a product alone, as its second operand, with the bytes of each part."""
    readers: dict[int, set[int]] = {}
    for step in formed.steps:
        for value in step.reads:
            if value not in step.writes:
                readers.setdefault(value, set()).update(step.writes)
    for op in graph.ops:
        joined = graph.view_root(op.operands[1]) if op.name == _PRODUCT and not op.packed else None
        if joined is None or joined not in formed.bytes or len(readers.get(joined, ())) != 1:
            continue
        producer = graph.values[joined].producer
        if producer is not None and graph.ops[producer].name == _JOIN:
            pieces = find_listed(graph, graph.ops[producer].operands[0])
            yield joined, [graph.values[piece].bytes for piece in pieces]


def _repeat(graph: JointGraph, formed: Steps, arguments: Collection[int]) -> Steps:
    """Have each loop over elements that reads a tensor made of an argument read what that is made of; what other
    kernels read of it they read as before."""
    chains = {v: chain for v in formed.bytes if (chain := _find_chain(graph, v, arguments)) is not None}
    if not chains:
        return formed
    steps = [s if not _is_loop(graph, s) else Step(_replace(s.reads, chains), s.writes) for s in formed.steps]
    gone = chains.keys() - {value for step in steps for value in step.reads}
    sizes = {value: size for value, size in formed.bytes.items() if value not in gone}
    return Steps(tuple(step for step in steps if not step.writes or not gone.issuperset(step.writes)), sizes)


def _replace(reads: Iterable[int], chains: Mapping[int, _Chain]) -> tuple[int, ...]:
    """``reads``, and in place of what is computed anew what that takes."""
    found = [(chains[v].source, *chains[v].small) if v in chains else (v,) for v in reads]
    return tuple(dict.fromkeys(v for values in found for v in values))


def _is_loop(graph: JointGraph, step: Step) -> bool:
    """Whether a kernel is a loop over elements."""
    producers = (graph.values[v].producer for v in step.writes if v < len(graph.values))
    return all(p is not None and graph.ops[p].kind in _LOOPS for p in producers)


def _find_chain(graph: JointGraph, value: int, arguments: Collection[int]) -> _Chain | None:
    """How ``value`` is made, by arithmetic, of one of ``arguments`` that is no larger."""
    whole = graph.values[value].bytes if value < len(graph.values) else 0
    if whole < LEAST_BYTES:
        return None
    sources: set[int] = set()
    small: dict[int, None] = {}
    pending, seen = [value], {value}
    while pending:
        producer = graph.values[pending.pop()].producer
        if producer is None or graph.ops[producer].name not in _ARITHMETIC:
            return None
        for read in graph.buffer_reads[producer]:
            if graph.values[read].bytes * SMALL_PART <= whole:
                small[read] = None
            elif read in arguments:
                sources.add(read)
            elif read not in seen:
                seen.add(read)
                pending.append(read)
    if len(sources) != 1:
        return None
    source = sources.pop()
    return _Chain(source, tuple(small)) if graph.values[source].bytes <= whole else None
