# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-isolate-arguments``: no call of a compiled function changes the bytes of an argument."""

from __future__ import annotations

from retrograd.dialects import ir
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.barriers import add_barrier, take_behind_barrier, walk
from retrograd.pipelines.transforms.helpers.maker import Maker
from retrograd.pipelines.transforms.helpers.views import view_root

# The operand that each op updates, by number; ops in destination-passing style have theirs last.
_INSERTIONS = {"tensor.insert": 1, "tensor.insert_slice": 1, "tensor.parallel_insert_slice": 1, "tensor.scatter": 1}


class BwdIsolateArguments(ModulePass):
    """Keeps in-place updates away from arguments and from what they read.

    IREE updates a tensor in place where the update is its last use, and an argument counts as a tensor like any other.
    So each argument is used once more at the very end, behind a barrier that survives to the place where this is
    decided: an argument is alive as long as its function runs, and every update of it works on a copy. No op is looked
    at for this.

    An update that reads its own destination through a view (``x[i] += x[:3]``) is a second hazard: the copy that it
    reads is elided too. There the view goes through a barrier and is a tensor of its own.
    """

    description = "Keep compiled functions from writing to their arguments or to what an update reads"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            block = only_block(func, self.name)
            for op in list(walk(block)):
                separate_reads(op)
            keep_arguments(block)


def keep_arguments(block: ir.Block) -> None:
    """Use every tensor argument once more right before the block's terminator."""
    terminator = list(block.operations)[-1].operation
    for argument in block.arguments:
        if _is_tensor(argument):
            add_barrier(argument, Maker.before(terminator))


def separate_reads(op: ir.Operation) -> None:
    """Where ``op`` updates a tensor and reads a view of it, read a copy instead."""
    destinations = find_destinations(op)
    roots = [view_root(op.operands[i]) for i in destinations]
    for i, operand in enumerate(op.operands):
        if i not in destinations and _is_tensor(operand) and view_root(operand) in roots:
            op.operands[i] = take_behind_barrier(operand, op)


def find_destinations(op: ir.Operation) -> list[int]:
    """Numbers of the operands that ``op`` may write to."""
    if op.name in _INSERTIONS:
        return [_INSERTIONS[op.name]]
    if not op.name.startswith(("linalg.", "tm_tensor.", "iree_linalg_ext.")) or not any(map(_is_tensor, op.results)):
        return []
    # Destination-passing style: as many destinations as results, last among the operands.
    return list(range(len(op.operands) - len(op.results), len(op.operands)))


def _is_tensor(value: ir.Value) -> bool:
    return isinstance(value.type, ir.RankedTensorType)
