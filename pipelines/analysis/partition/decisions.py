# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Comparisons of a value with what was chosen of it: their answers hang on the last bit.

The gradient of a maximum goes where an element equals it. Where the maximum is saved and what it is the greatest of is
computed again, by other code or in another order, no element equals it, and the gradient is 0 / 0. Plans save the
answer of such a comparison, a byte for each element, or what is compared where the answer is the backward's alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from retrograd.contract.attributes import ISLAND_OP
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph, Op
from retrograd.pipelines.analysis.partition.op_kinds import OpKind

# Ops whose answer jumps where two values are equal, or one is zero.
_ANSWERS = """argmax argmin eq.Scalar eq.Tensor ge.Scalar ge.Tensor gt.Scalar gt.Tensor hardtanh_backward isclose
    le.Scalar le.Tensor lt.Scalar lt.Tensor ne.Scalar ne.Tensor relu sgn sign threshold_backward"""
ANSWERS = frozenset(f"torch.aten.{name}" for name in _ANSWERS.split())
# Ops that round nothing, as each element that they give is one that they take, or its negative; and differences, which
# are the same in either order.
_CHOICES = """_cdist_forward abs amax amin clamp clamp.Tensor clamp_max clamp_min clone contiguous copy
    index_put index_put.hacked_twin _index_put_impl _unsafe_index_put.hacked_twin linalg_vector_norm masked_fill.Scalar
    masked_fill.Tensor max max.dim max_pool2d max_pool2d_with_indices maximum min min.dim minimum neg relu
    scatter.src scatter.value sort sub.Tensor topk where.ScalarOther where.ScalarSelf
    where.self"""
CHOICES = frozenset(f"torch.aten.{name}" for name in _CHOICES.split())
_EXACT_KINDS = (OpKind.VIEW, OpKind.DATA_MOVEMENT)
# Differences, of which the sign is asked for in place of a comparison.
_DIFFERENCES = frozenset(("torch.aten.sub.Tensor", "torch.aten.add.Tensor"))


@dataclass(frozen=True)
class Decision:
    """An op of the backward that no tangent flows into, or one that takes ``settled``, which none flows into.

    ``settled`` are the values that have to be saved where it would be answered otherwise than the forward would.
    ``compared`` are those that meet.
    """

    settled: tuple[int, ...]
    compared: tuple[int, ...]


def find_decisions(graph: JointGraph) -> tuple[Decision, ...]:
    """The decisions of a backward about values of which one was chosen of another, in order."""
    late = {r for number in graph.tangent_ops for r in graph.ops[number].results} | graph.tangents
    answers = [op for op in graph.ops if op.name in ANSWERS and op.id in graph.backward_ops]
    return tuple(decision for op in answers for decision in _decisions_of(graph, op, late))


def _decisions_of(graph: JointGraph, op: Op, late: Collection[int]) -> Iterator[Decision]:
    tensors = tuple(v for v in op.operands if graph.values[v].is_tensor and v not in late)
    is_late = op.id in graph.tangent_ops
    if len(tensors) > 1 and not is_late and _are_related(graph, tensors):
        yield Decision(op.results, tensors)
    for value in tensors:
        for difference in _find_differences(graph, value):
            compared = tuple(v for v in graph.ops[difference].operands if graph.values[v].is_tensor)
            if _are_related(graph, compared):
                yield Decision((value,) if is_late else op.results, compared)


def _find_differences(graph: JointGraph, value: int) -> Iterator[int]:
    for seen in _walk(graph, value, ()):
        producer = graph.values[seen].producer
        if producer is not None and graph.ops[producer].name in _DIFFERENCES:
            yield producer


def find_torn(graph: JointGraph, saved: Collection[int], backward: Collection[int]) -> frozenset[int]:
    """Find what has to be saved beside ``saved``, for decisions of which a plan would save one side, and compute the
    other one again or save it in a narrower type."""
    found: set[int] = set()
    for decision in find_decisions(graph):
        if not found.issuperset(decision.settled) and _is_torn(graph, decision, saved, backward):
            found.update(decision.settled)
    return frozenset(found.difference(saved))


def _is_torn(graph: JointGraph, decision: Decision, saved: Collection[int], backward: Collection[int]) -> bool:
    shared = _shared(graph, decision.compared)
    ends = [end for value in decision.compared for end in _walk(graph, value, saved) if _is_end(graph, end, saved)]
    again = {_key(graph, end) for end in ends if _is_other(graph, end, saved, backward)} & shared
    kept = (end for end in ends if end in saved)
    return any(again & {_key(graph, v) for v in _walk(graph, value, ())} for value in kept)


def _is_other(graph: JointGraph, value: int, saved: Collection[int], backward: Collection[int]) -> bool:
    """Whether the backward has other digits of a value than the forward."""
    if value in saved:
        return graph.values[value].stored is not None
    return graph.values[value].producer in backward


def _is_end(graph: JointGraph, value: int, saved: Collection[int]) -> bool:
    return value in saved or not _is_exact(graph, value)


def _are_related(graph: JointGraph, values: tuple[int, ...]) -> bool:
    return bool(_shared(graph, values))


def _shared(graph: JointGraph, values: tuple[int, ...]) -> set[tuple[int, int]]:
    """Find what is computed, with rounding, that more than one of ``values`` was chosen of."""
    ends = [{_key(graph, v) for v in _walk(graph, value, ()) if _is_computed(graph, v)} for value in values]
    return {key for i, keys in enumerate(ends) for others in ends[i + 1 :] for key in keys & others}


def _walk(graph: JointGraph, value: int, stop: Collection[int]) -> Iterator[int]:
    """``value`` and what it was chosen of, as far as ``stop``."""
    pending, seen = [value], {value}
    while pending:
        value = pending.pop()
        yield value
        producer = graph.values[value].producer
        if value not in stop and producer is not None and _is_exact(graph, value):
            before = [v for v in graph.ops[producer].operands if v not in seen]
            seen.update(before)
            pending.extend(before)


def _is_exact(graph: JointGraph, value: int) -> bool:
    producer = graph.values[value].producer
    if producer is None:
        return False
    op = graph.ops[producer]
    if op.name == ISLAND_OP:
        # What runs in torch may choose: a median, a maximum by group. A library's products and convolutions do not.
        return not op.flops
    return op.kind in _EXACT_KINDS or op.name in CHOICES or (op.kind is OpKind.CONSTANT and len(op.operands) > 1)


def _is_computed(graph: JointGraph, value: int) -> bool:
    producer = graph.values[value].producer
    if producer is None or _is_exact(graph, value) or not graph.values[value].is_tensor:
        return False
    return graph.ops[producer].kind is not OpKind.CONSTANT


def _key(graph: JointGraph, value: int) -> tuple[int, int]:
    """The same for values that are computed alike."""
    producer = graph.values[value].producer
    if producer is None:
        return -1, value
    return graph.same.get(producer, producer), graph.ops[producer].results.index(value)
