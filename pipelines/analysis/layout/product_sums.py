# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Batches of products that are added to one another as they are computed, as ``bwd-accumulate-products`` has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from retrograd.pipelines.analysis.partition.joint_graph import JointGraph, Op

_PRODUCT, _SUM = "torch.aten.bmm", "torch.aten.add.Tensor"


@dataclass(frozen=True)
class ProductSums:
    """``into``: by a product that starts at another value, in its place in memory, that value and the op that would
    add it; ``terms``: all products of such sums."""

    into: dict[int, tuple[int, int]] = field(default_factory=dict)
    terms: set[int] = field(default_factory=set)


def find_product_sums(
    graph: JointGraph,
    ops: Sequence[int],
    reads: Mapping[int, tuple[int, ...]] | Sequence[tuple[int, ...]],
    users: Mapping[int, Sequence[int]],
    held: Iterable[int],
) -> ProductSums:
    """The sums among ``ops``, run in this order, which read the values of ``reads`` that ``users`` use; of values that
    are ``held`` in memory anyway none is such a term."""
    sums, kept = ProductSums(), frozenset(held)
    # By each value that is one product, or a sum of some, the product that gives it.
    last: dict[int, int] = {}
    places = {number: place for place, number in enumerate(ops)}
    for number in ops:
        op = graph.ops[number]
        if is_plain_product(op):
            last[op.results[0]] = number
        elif op.name == _SUM and len(reads[number]) == 2:
            terms = reads[number]
            if not all(v in last and users.get(v) == [number] and v not in kept for v in terms):
                continue
            first, second = sorted(terms, key=lambda value: places[last[value]])
            if last[second] not in sums.into:
                sums.into[last[second]] = (first, number)
                sums.terms.update((last[first], last[second]))
                last[op.results[0]] = last[second]
    return sums


def is_plain_product(op: Op) -> bool:
    """Whether an op is a batch of products whose operands are read as they are, in one kernel."""
    return op.name == _PRODUCT and op.parts == 1 and not op.packed
