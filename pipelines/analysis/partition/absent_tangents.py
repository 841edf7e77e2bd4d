# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Finds which of a backward's values are absent where some tangents are: those of outputs that the loss does not use.

An absent value is undefined as in autograd, not zero: of the backward of what only such outputs need, eager runs
nothing, so that no slope is multiplied by zero (infinite slopes give NaN) and what is reached that way alone has no
gradient. Source: ``torch/csrc/autograd/engine.cpp``, which runs a node only when one of its gradients is defined, and
adds up the defined ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from retrograd.pipelines.analysis.partition.joint_graph import JointGraph, Op


@dataclass(frozen=True)
class Addition:
    """An op that adds tangents up: without the operand at one place it is the operand at another."""

    keeps: Mapping[int, int]
    reason: str


ADDITIONS: dict[str, Addition] = {
    "torch.aten.add.Tensor": Addition(
        {0: 1, 1: 0}, "gradients of several uses of a value are added up, and an undefined one is left out"
    ),
    "torch.aten.sub.Tensor": Addition(
        {1: 0}, "the same, of the negative; without what is subtracted from, it is subtracted from zeros"
    ),
}


@dataclass(frozen=True)
class AbsentValues:
    """Says what to do where tangents are absent, by the numbers of values and ops.

    ``values`` are absent as well. ``kept`` has for additions the operand that they are without the others. ``zeros``
    are operands, as op and place, that are absent beside others of their op that are there: what is computed of both
    takes zeros in their place.
    """

    values: frozenset[int]
    kept: Mapping[int, int]
    zeros: tuple[tuple[int, int], ...]


def find_absent_values(
    graph: JointGraph, absent: Collection[int], carriers: Collection[int], sums: Collection[int]
) -> AbsentValues:
    """Find which values of a backward are absent without the tangents ``absent``.

    An op of which no operand that a tangent flows into is there gives nothing, whatever it computes: it is part of a
    node of autograd's that eager does not run. Of one that takes both, the rest is told by ``ADDITIONS``; any other op
    (``cat``, ``where``, ``index_put``, a product of two gradients) takes zeros, as autograd gives them to nodes of
    several outputs.

    Args:
        graph: a backward; its arguments include tangents.
        absent: arguments, a subset of ``graph.tangents``.
        carriers: the values that hold tensors: tangents do not flow into sizes.
        sums: the ops of ``ADDITIONS`` that are plain sums, of operands of the result's type and without a factor.
    """
    reached, gone, summed = set(graph.tangents), set(absent), frozenset(sums)
    kept: dict[int, int] = {}
    zeros: list[tuple[int, int]] = []
    for op in graph.ops:
        flowing = reached.intersection(op.operands)
        if not flowing:
            continue
        missing = flowing & gone
        given = [result for result in op.results if result in carriers]
        reached.update(given)
        if missing == flowing and len(given) == len(op.results):
            gone.update(given)
        elif missing:
            operand = _find_kept(op, gone) if op.id in summed else None
            if operand is not None:
                kept[op.id] = operand
            else:
                zeros += [(op.id, place) for place, value in enumerate(op.operands) if value in missing]
    return AbsentValues(frozenset(gone), kept, tuple(zeros))


def _find_kept(op: Op, gone: Collection[int]) -> int | None:
    """The operand that is left of an addition, if the one that is gone can be left out."""
    keeps = ADDITIONS[op.name].keeps
    left = [op.operands[keeps[place]] for place in keeps if op.operands[place] in gone]
    return next((value for value in left if value not in gone), None)
