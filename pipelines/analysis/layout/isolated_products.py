# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products on packed operands whose users run in a kernel of their own, as ``bwd-isolate-products`` has it."""

from __future__ import annotations

from retrograd.pipelines.analysis.kernels.kernel_inputs import KernelInputs
from retrograd.pipelines.analysis.kernels.kernel_roots import KernelRoots
from retrograd.pipelines.analysis.layout.cpu_products import PRODUCTS
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.op_kinds import OpKind


def repays_isolation(product: int, *others: int) -> bool:
    """Whether what takes a product of so many bytes, and reads ``others`` besides, is to run in a kernel of its own.

    In the product's kernel a packed copy of each of the others is written and read; in one of its own, the product's
    plain result is in place of that. Where both are as large, the copies are in memory along with the result.
    """
    return sum(others) >= product


def find_isolated_products(graph: JointGraph, taken: KernelInputs, kernels: KernelRoots) -> dict[int, list[int]]:
    """By the last op of a kernel, the products that run right before it, and not in it."""
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
