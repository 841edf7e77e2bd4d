# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-isolate-constants``: what is computed from nothing and written into twice is two tensors, and one in memory
where it is part of a sum over all."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.dialects import ir
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.barriers import (
    add_barrier,
    hide,
    hide_all_from_fusion,
    hide_zero,
    read_zero,
    take_behind_barrier,
    walk,
)
from retrograd.pipelines.transforms.helpers.fills import create_fill, read_number
from retrograd.pipelines.transforms.helpers.generics import GENERIC, is_reduced, read_inputs, read_maps
from retrograd.pipelines.transforms.helpers.maker import Maker
from retrograd.pipelines.transforms.helpers.views import view_root
from retrograd.pipelines.transforms.linalg.bwd_isolate_arguments import find_destinations

# What IREE copies where it is written into: storage without values, constants, fills (which are no kernels).
_SAFE = ("tensor.empty", "arith.constant", "linalg.fill")
_DIALECTS = ("linalg.", "tensor.", "tm_tensor.")


class BwdIsolateConstants(ModulePass):
    """Puts what is computed without reading any tensor, such as the numbers from 0 to n, behind a barrier where an
    update writes into it; what is one number all over becomes a ``linalg.fill``.

    IREE runs a kernel that reads no buffer once for each user, instead of copying its result
    (``preferCloneToConsumers`` of ``stream.async.dispatch``). Such kernels are the same, its CSE makes them one again,
    and by then updates are in place: both write into one buffer, and the result of either has what the other wrote.
    A fill is no kernel, and cheaper besides.

    What is computed from the places of elements alone is a kernel of its own, too, where it is spread along further
    axes and all is added up, as in ``(p * arange(n)).sum()``: of one kernel IREE makes products of vectors whose shapes
    do not fit (``'vector.contract' op invalid accumulator/result vector shape``, 3.13 on a CPU).

    Barriers on one buffer are no better than none. So that IREE does not find two of these kernels to be the same, each
    adds a zero of its own, which stands behind a barrier. What is no kernel, such as a constant that is inserted into
    another, takes one of them from behind a barrier: IREE would compute it once, as a constant of the program, and not
    see through the barrier in front of the update that it is one. It then writes into memory that is read-only.
    """

    description = "Keep updates of what is computed from nothing from sharing a buffer"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            block = only_block(func, self.name)
            for op in find_summed_numbers(block):
                hide_all_from_fusion(op)
            for value in list(dict.fromkeys(find_written_constants(block))):
                if is_broadcast(value):
                    make_fill(value)
                else:
                    make_unique(value)
                    # Those that write into it copy it.
                    hide(value)


def find_written_constants(block: ir.Block) -> Iterator[ir.OpResult]:
    """The tensors, computed from no other, that some op updates."""
    constants: set[ir.Value] = set()
    for op in walk(block):
        tensors = [o for o in op.operands if isinstance(o.type, ir.RankedTensorType)]
        if (op.name.startswith(_DIALECTS) or op.name == "arith.constant") and constants.issuperset(tensors):
            constants.update(op.results)
        for number in find_destinations(op):
            root = view_root(op.operands[number])
            if isinstance(root, ir.OpResult) and root in constants and root.owner.name not in _SAFE:
                yield root


def find_summed_numbers(block: ir.Block) -> list[ir.Operation]:
    """The ops that compute from the places of elements alone what elementwise ops spread along further axes, if that
    ends in a sum over all axes."""
    found = dict[ir.Operation, None]()
    numbers = set[ir.Value]()
    # For what elementwise ops give, the numbers that were spread on the way.
    spread = dict[ir.Value, list[ir.Operation]]()
    for op in (view.operation for view in block.operations if view.operation.name == GENERIC):
        inputs, reduced = read_inputs(op), is_reduced(op)
        sources = [source for value in inputs for source in spread.get(value, ())]
        if len(reduced) > 1 and all(reduced):
            found.update(dict.fromkeys(sources))
        if any(reduced):
            continue
        if all(value in numbers or read_number(value) is not None for value in inputs) and (inputs or has_index(op)):
            numbers.update(op.results)
        else:
            maps = zip(inputs, read_maps(op), strict=False)
            sources += [value.owner for value, map_ in maps if value in numbers and len(map_.results) < map_.n_dims]
        spread.update((result, sources) for result in op.results)
    return list(found)


def has_index(op: ir.Operation) -> bool:
    """Whether an op computes with the places of the elements that it gives."""
    return any(inner.name == "linalg.index" for inner in walk(op.regions[0].blocks[0]))


def is_broadcast(value: ir.OpResult) -> bool:
    """Whether a tensor is a constant of one number, repeated."""
    op = value.owner
    if op.name != "linalg.generic" or len(op.results) != 1 or len(op.operands) != 2:
        return False
    body = op.regions[0].blocks[0]
    first = next(iter(body.operations)).operation
    return (
        first.name == "linalg.yield"
        and first.operands[0] == body.arguments[0]
        and read_number(op.operands[0]) is not None
    )


def make_fill(value: ir.OpResult) -> None:
    """Have a ``linalg.fill`` give ``value``."""
    op = value.owner
    number = read_number(op.operands[0])
    assert number is not None
    value.replace_all_uses_with(create_fill(number, op.operands[1], Maker.before(op)))
    op.erase()


def make_unique(value: ir.OpResult) -> None:
    """Have the kernel that gives ``value`` add a zero that no other kernel has; what is no kernel has an operand that
    IREE does not take for a constant."""
    op, element = value.owner, ir.RankedTensorType(value.type).element_type
    if op.name != GENERIC or not isinstance(element, (ir.IntegerType, ir.F32Type, ir.F64Type, ir.BF16Type, ir.F16Type)):
        hide_operand(op)
        return
    own = hide_zero(element, Maker.before(op))
    terminator = list(op.regions[0].blocks[0].operations)[-1].operation
    number = value.result_number
    addition = "arith.addi" if isinstance(element, ir.IntegerType) else "arith.addf"
    inside = Maker(ir.InsertionPoint(terminator), op.location)
    zero = read_zero(own, element, inside)
    terminator.operands[number] = inside.value(addition, [terminator.operands[number], zero], element)


def hide_operand(op: ir.Operation) -> None:
    """Have an op take its first operand that it does not write into, if there is one, from behind a barrier."""
    written = {*find_destinations(op)}
    number = next((number for number in range(len(op.operands)) if number not in written), None)
    if number is None:
        return
    operand = op.operands[number]
    if isinstance(operand.type, ir.RankedTensorType):
        op.operands[number] = take_behind_barrier(operand, op)
    else:
        op.operands[number] = add_barrier(operand, Maker.before(op))
