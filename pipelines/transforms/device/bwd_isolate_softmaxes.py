# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-isolate-softmaxes``: softmaxes along rows that a CPU's vectors do not divide, as kernels that it is good at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from retrograd.dialects import ir
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.barriers import hide_all_from_fusion
from retrograd.pipelines.transforms.helpers.generics import GENERIC, count_inputs, is_elementwise, is_reduced, read_maps

# So many numbers of a row IREE reduces at a time, in kernels for AVX2 too.
_STEP = 16


class BwdIsolateSoftmaxes(ModulePass):
    """Hides the exponentials of a softmax from their sum and from what is divided by it, where 16 does not divide the
    length of its rows.

    IREE makes one op of a softmax, and one kernel of that, whose loops over a row are all of one size: the remainder of
    a row has no vectors, and neither has the rest of it then. On one core with AVX-512, 24 x N x N: of rows of 192 it
    takes 2.0 ns an element, of 196 17.5, of 1000 80; as kernels of their own 3.6 and 4.6.
    """

    description = "Keep softmaxes along uneven rows from becoming one op, for a CPU"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            ops = [view.operation for view in only_block(func, self.name).operations]
            for op in dict.fromkeys(find_exponentials(ops)):
                hide_all_from_fusion(op)


def find_exponentials(ops: Iterable[ir.Operation]) -> Iterator[ir.Operation]:
    """The elementwise ops whose results are exponentials that are summed along uneven rows, and are used once more."""
    for op in ops:
        if op.name != GENERIC or count_inputs(op) != 1 or len(op.results) != 1 or not _sums_rows(op):
            continue
        source = op.operands[0].owner
        if not is_elementwise(source) or _yielded(source) != "math.exp" or not _is_uneven(op.operands[0]):
            continue
        if any(is_elementwise(use.owner) for use in source.results[0].uses):
            yield source


def _sums_rows(op: ir.Operation) -> bool:
    """Whether an op adds up each row of what it reads, in order."""
    reduced, map_ = is_reduced(op), read_maps(op)[0]
    is_along_rows = bool(reduced) and reduced[-1] and not any(reduced[:-1])
    return is_along_rows and map_ == ir.AffineMap.get_identity(map_.n_dims) and _yielded(op) == "arith.addf"


def _is_uneven(value: ir.Value) -> bool:
    type_ = ir.RankedTensorType(value.type)
    return not type_.is_dynamic_dim(type_.rank - 1) and type_.shape[-1] % _STEP != 0


def _yielded(op: ir.Operation) -> str:
    """The name of the op that gives what a body yields; none of an argument."""
    *_, end = (view.operation for view in op.regions[0].blocks[0].operations)
    value = end.operands[0]
    return value.owner.name if isinstance(value, ir.OpResult) else ""
