# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-isolate-gathers``: what a gather reads from is not computed in the gather's kernel."""

from __future__ import annotations

from dataclasses import field

from retrograd.dialects import ir
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.barriers import hide, take_behind_barrier, walk
from retrograd.pipelines.transforms.helpers.generics import GENERIC, is_reduced
from retrograd.pipelines.transforms.helpers.views import SLICE, shares_storage, view_root

_GATHER = "tensor.extract"
_WIDENINGS = frozenset({"arith.extf", "arith.extsi", "arith.extui"})


class BwdIsolateGathers(ModulePass):
    """Puts a barrier behind each elementwise op that computes a tensor which another op gathers from.

    A gather reads its tensor anywhere. IREE copies what widens its operand into the kernels of its uses, a gather too,
    and gathers from gathers among them; on a GPU each thread there computes its own part of the tensor and reads what
    the others have not written yet. (On a CPU each workgroup computes all of it.)

    A widening alone is left where it is: IREE gathers first and widens what was gathered.

    Views that take one element of each row, or every other one, are copied behind a barrier too: IREE gathers vectors
    from memory without gaps alone, and ends in ``LLVM Translation failed`` on others (3.13, on a CPU).

    With ``copies_slices`` slices that have gaps between rows or images are copied too, such as the channels of one of
    several images that were joined: IREE counts the places of vectors that it gathers by the shape of the slice, and
    reads what lies between (3.13, on CUDA; code for a CPU counts right).
    """

    description = "Keep what computes a gather's tensor out of the gather's kernel"

    copies_slices: bool = field(default=False, metadata={"help": "copy slices with gaps, from which a gather reads"})

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            block = only_block(func, self.name)
            for view in list(block.operations):
                isolate_gathers(view.operation, copies_slices=self.copies_slices)


def isolate_gathers(op: ir.Operation, *, copies_slices: bool = False) -> None:
    """Have the gathers in the regions of ``op`` read computed tensors, and slices with gaps, from behind barriers."""
    hidden: dict[ir.Value, ir.Value] = {}
    gathers = [
        inner for region in op.regions for block in region.blocks for inner in walk(block) if inner.name == _GATHER
    ]
    for gather in gathers:
        source = gather.operands[0]
        if source not in hidden and (is_computed(source) or is_spaced(source)):
            hidden[source] = take_behind_barrier(source, op)
        if source in hidden:
            gather.operands[0] = hidden[source]
        elif copies_slices and (slice_ := find_gaps(source)) is not None:
            hide(slice_)


def find_gaps(value: ir.Value) -> ir.OpResult | None:
    """The slice that a tensor is a view or a widening of, if there are gaps between its elements in memory."""
    while isinstance(value, ir.OpResult):
        op = value.owner
        if op.name == SLICE and has_gaps(op):
            return value
        if not shares_storage(op) and not is_widening(op):
            return None
        value = op.operands[0]
    return None


def has_gaps(slice_: ir.Operation) -> bool:
    """Whether elements that follow one another in a slice do not in memory; so where a size is open, but for the first
    axis alone."""
    sizes, steps = _sizes_and_steps(slice_)
    shape = ir.RankedTensorType(slice_.operands[0].type).shape
    cut = [axis for axis, (size, whole) in enumerate(zip(sizes, shape, strict=True)) if size != whole or size < 0]
    return any(step != 1 for step in steps) or any(size != 1 for axis in cut for size in sizes[:axis])


def is_spaced(value: ir.Value) -> bool:
    """Whether elements that are next to each other in a view are not so in memory: of the last axis it takes one, or
    every other one."""
    while isinstance(value, ir.OpResult) and shares_storage(value.owner):
        op = value.owner
        value = op.operands[0]
        if op.name == SLICE:
            sizes, steps = _sizes_and_steps(op)
            if steps[-1] != 1 or (sizes[-1] == 1 and ir.RankedTensorType(value.type).shape[-1] != 1):
                return True
    return False


def _sizes_and_steps(slice_: ir.Operation) -> tuple[list[int], list[int]]:
    """How many elements a slice takes along each axis, and how far apart they are."""
    sizes, steps = (slice_.attributes[name] for name in ("static_sizes", "static_strides"))
    return [*ir.DenseI64ArrayAttr(sizes)], [*ir.DenseI64ArrayAttr(steps)]


def is_computed(value: ir.Value) -> bool:
    """Whether an elementwise op, other than a widening of what is not computed itself, gives ``value``."""
    root = view_root(value)
    if not isinstance(root, ir.OpResult) or root.owner.name != GENERIC:
        return False
    generic = root.owner
    if is_widening(generic):
        return is_computed(generic.operands[0])
    return not any(is_reduced(generic))


def is_widening(op: ir.Operation) -> bool:
    """Whether all that an op does is to widen the elements of its first operand."""
    if op.name != GENERIC:
        return False
    body = [view.operation.name for view in op.regions[0].blocks[0].operations]
    return len(body) == 2 and body[0] in _WIDENINGS
