# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-cse``: what is computed twice is computed once, before it is decided what is saved."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import field

from retrograd.contract.attributes import BWD_INLINE, BWD_VALUES
from retrograd.dialects import ir
from retrograd.pipelines.analysis.partition.read_graph import MARKS, ReadGraph, read_joint, value_names
from retrograd.pipelines.analysis.partition.value_numbering import find_duplicates
from retrograd.pipelines.infra.functions import functions
from retrograd.pipelines.infra.passes import ModulePass, PassFailure

MERGED = "bwd.merged"


class BwdCse(ModulePass):
    """Merges ops that do the same to the same operands, function by function, but for bodies that are to be inlined.

    MLIR's own ``cse`` leaves torch ops alone, which declare no effects; this one goes by their kind. It merges neither
    random ops nor ops it does not know, nor ops of mutable tensors (``!torch.tensor``), nor results of the function,
    nor ops that the user marked differently. What a ``bwd.recompute_barrier`` gives is no other's value, so that a
    chain that is recomputed on purpose stays one.

    By default each half keeps its own: what the backward computes anyway from what is saved anyway would become one
    more value of the forward, which heuristics against recomputation then save. (Merged across the halves, min-cut
    saves 13% more of a transformer block.)

    The names of merged values are kept on the module, as ``bwd.merged = {merged = "kept"}``: the captured graph, from
    which names come, is to be changed in the same way.
    """

    description = "Merge ops that compute the same, before partitioning"

    across_halves: bool = field(
        default=False,
        metadata={"help": "merge ops of the backward into the forward's too: fewer ops, but more values to save"},
    )

    def apply(self, module: ir.Operation) -> None:
        merged = read_merged(module)
        # A body that is to be inlined has names of its own, which may be those of other values elsewhere.
        for func in [func for func in functions(module) if BWD_INLINE not in func.attributes]:
            _check_structure(func)
            merged |= merge_duplicates(read_joint(func), across_halves=self.across_halves)
        if merged:
            module.attributes[MERGED] = ir.DictAttr.get({k: ir.StringAttr.get(v) for k, v in merged.items()})


def merge_duplicates(read: ReadGraph, *, across_halves: bool) -> dict[str, str]:
    """Merge what computes the same; returns for each name that is gone the name of the value in its place."""
    marks = [_op_marks(op) for op in read.ops]
    duplicates = find_duplicates(read.graph, read.meanings, marks, across_halves=across_halves)
    merged: dict[str, str] = {}
    for number, earlier in duplicates.items():
        duplicate, original = read.ops[number], read.ops[earlier]
        names = [
            _join_names(name, kept, merged)
            for name, kept in zip(value_names(duplicate), value_names(original), strict=True)
        ]
        if any(names):
            original.attributes[BWD_VALUES] = ir.ArrayAttr.get([ir.StringAttr.get(n) for n in names])
        for result, kept_result in zip(duplicate.results, original.results, strict=True):
            result.replace_all_uses_with(kept_result)
    for number in reversed(duplicates):
        read.ops[number].erase()
    return merged


def _op_marks(op: ir.Operation) -> Hashable | None:
    return tuple(op.attributes[name] for name in MARKS if name in op.attributes) or None


def _join_names(name: str, kept: str, merged: dict[str, str]) -> str:
    """The name of a merged value: the first one, unless the captured graph has no node of that name."""
    if not name or "." in name or name == kept:
        return kept
    if not kept or "." in kept:
        return name
    merged[name] = kept
    return kept


def _check_structure(func: ir.Operation) -> None:
    if len(func.regions[0].blocks) != 1:
        message = f"bwd-cse: a function of {len(func.regions[0].blocks)} blocks, expected one"
        raise PassFailure(func, message, "capture the graph without control flow")


def read_merged(module: ir.Operation) -> dict[str, str]:
    """Read what ``bwd-cse`` merged in a module: for each name that is gone the name of the value in its place."""
    if MERGED not in module.attributes:
        return {}
    return {a.name: ir.StringAttr(a.attr).value for a in ir.DictAttr(module.attributes[MERGED])}
