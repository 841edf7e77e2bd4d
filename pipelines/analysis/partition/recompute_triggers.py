# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Values whose first use in a backward sets off the recomputation of others."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import zip_longest

from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.partition_plan import PartitionPlan


def find_triggers(graph: JointGraph, plan: PartitionPlan, checkpoints: Collection[int], most: int) -> list[int]:
    """Of ``checkpoints``, values that the forward hands from one part to the next, at most ``most`` that cut off what
    something in the backward of ``plan`` has computed anew when it first uses it: the most bytes first.

    Where a block of layers is recomputed, its result is often wanted first, by the gradient of the weight that it is
    multiplied with: all of the block is computed there and waits, while the backward is still at the layers behind it.
    With one value saved, what is in front of it is computed where the backward comes to it. No price per byte tells
    this: what is saved costs bytes and spares next to no recomputation.
    """
    before: dict[int, int] = {}
    for chain in _find_chains(graph, plan):
        done, values = 0, graph.values
        for op, following in zip_longest(chain, chain[1:]):
            made = [r for r in graph.ops[op].results if graph.view_root(r) == r]
            # Of what one kernel makes of another's result, one is enough.
            further = () if following is None else graph.ops[following].results
            if not any(f in checkpoints and values[f].bytes == values[r].bytes for f in further for r in made):
                before.update((r, done) for r in made if r in checkpoints and done > values[r].bytes)
            done += sum(values[r].bytes for r in made)
    return sorted(before, key=lambda value: (-before[value], value))[:most]


def _find_chains(graph: JointGraph, plan: PartitionPlan) -> Iterator[list[int]]:
    """For each use of what is computed anew, in the backward's order, the ops that run for it and did not run before,
    in program order."""
    anew = {op for op in plan.backward if op not in graph.tangent_ops}
    saved, done = frozenset(plan.saved), set[int]()
    for number in plan.backward:
        if number in anew:
            continue
        for operand in graph.ops[number].operands:
            chain: list[int] = []
            pending = [operand]
            while pending:
                value = pending.pop()
                op = graph.values[value].producer
                if value in saved or op is None or op not in anew or op in done:
                    continue
                done.add(op)
                chain.append(op)
                pending.extend(graph.ops[op].operands)
            if chain:
                yield sorted(chain)
