# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Batches of products that are added to one another as they are computed, as ``bwd-accumulate-products`` has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from retrograd.pipelines.analysis.kernels.kernel_inputs import KernelInputs
from retrograd.pipelines.analysis.kernels.kernel_roots import KernelRoots
from retrograd.pipelines.analysis.layout.cpu_products import PRODUCTS
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph, Op
from retrograd.pipelines.analysis.partition.op_kinds import OpKind

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


def repays_isolation(product: int, *others: int) -> bool:
    """Whether what takes a product of so many bytes, and reads ``others`` besides, is to run in a kernel of its own.

    In the product's kernel a packed copy of each of the others is written and read; in one of its own, the product's
    plain result is in place of that. Where both are as large, the copies are in memory along with the result.
    """
    return sum(others) >= product


def find_isolated_products(graph: JointGraph, taken: KernelInputs, kernels: KernelRoots) -> dict[int, list[int]]:
    """Map the last op of a kernel to the products that run right before it, and not in it."""
    found: dict[int, list[int]] = {}
    for number in taken.work:
        op = graph.ops[number]
        if op.name not in PRODUCTS or not op.packed or op.parts > 1 or op.results[0] in kernels.held:
            continue
        users = taken.users.get(op.results[0], ())
        if len(users) != 1 or graph.ops[users[0]].kind is not OpKind.POINTWISE or op.results[0] in graph.read_in_parts:
            continue
        kernel = kernels.roots[users[0]]
        others = kernels.find_reads(kernel) - {op.results[0]}
        sizes = [graph.values[value].bytes for value in others]
        if graph.ops[kernel].kind is OpKind.POINTWISE and repays_isolation(graph.count_bytes(number), *sizes):
            found.setdefault(kernel, []).append(number)
    return found
