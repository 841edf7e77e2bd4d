# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-copy-updated``: a tensor that is updated is read by nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from retrograd.dialects import ir
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.helpers.barriers import walk
from retrograd.pipelines.transforms.helpers.generics import is_elementwise, read_maps
from retrograd.pipelines.transforms.helpers.maker import Maker
from retrograd.pipelines.transforms.helpers.slices import Number, compute_index, read_shape, take_slice
from retrograd.pipelines.transforms.helpers.views import SLICE, is_view, view_root
from retrograd.pipelines.transforms.linalg.bwd_isolate_arguments import find_destinations

_INSERT = "tensor.insert_slice"
# Ops with destinations that IREE has a kernel write to; those of linalg get tensors of their own.
_IN_PLACE = ("tm_tensor.", "iree_linalg_ext.")
# What nobody reads before it is updated, or what IREE makes anew for every use.
_FRESH = ("arith.constant", "linalg.fill", "tensor.empty", "tensor.splat")
_REGION = ("static_offsets", "static_sizes", "static_strides")
_OPEN = ir.ShapedType.get_dynamic_size()


class BwdCopyUpdated(ModulePass):
    """Has an op that updates a tensor work on a copy of it, where something else reads the tensor.

    IREE updates a tensor in place at its last use, and looks at the order of ops for what is the last. But it runs side
    by side, or in another order, what does not depend on each other: a kernel that writes to the tensor before one that
    reads it as it was, and what computes a slice right where the slice belongs, before others have read what is there.

    Nothing is copied for ``x[i] += y``: of the slice that is updated alone, each element is read where it is written.
    The same holds where all that is read lies beside the slice, as with ``x[i] = f(x[i - 1])``, and for arguments,
    which ``bwd-isolate-arguments`` keeps alive.
    """

    description = "Copy a tensor before it is updated, where something else reads it"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            copies: Counter[ir.Value] = Counter()
            for op in list(walk(only_block(func, self.name))):
                for number in find_updated(op):
                    value = op.operands[number]
                    if is_read_elsewhere(value, op):
                        op.operands[number] = copy(value, op, copies[value])
                        copies[value] += 1


def find_updated(op: ir.Operation) -> Sequence[int]:
    """Numbers of the operands that IREE may update in place.

    Raises:
        PassFailure: the op has fewer operands than it has destinations.
    """
    if op.name != _INSERT and not op.name.startswith(_IN_PLACE):
        return ()
    destinations = find_destinations(op)
    if len(destinations) > len(op.operands):
        raise PassFailure(op, "bwd-copy-updated: fewer operands than results", "give each result a destination")
    return destinations


def is_read_elsewhere(value: ir.Value, op: ir.Operation) -> bool:
    """Whether anything but ``op`` reads what ``op`` writes to as ``value``, in its storage as it was before."""
    root = view_root(value)
    if not isinstance(root, ir.OpResult) or root.owner.name in _FRESH:
        return False
    return any(not is_harmless(read, value, op) for read in reads(root, op))


def reads(value: ir.Value, op: ir.Operation) -> Iterator[ir.Operation]:
    """All that uses ``value`` or a view of it, less ``op``; a slice counts as what reads it."""
    for use in value.uses:
        user = use.owner
        if user == op or user.name == "tensor.dim":
            continue
        if is_view(user):
            if use.operand_number == 0:
                yield from reads(user.results[0], op)
        else:
            yield user


def is_harmless(read: ir.Operation, value: ir.Value, op: ir.Operation) -> bool:
    """Whether ``read`` reads a slice of ``value`` that ``op`` does not write to, or element by element for it."""
    if read.name != SLICE or op.name != _INSERT or read.operands[0] != value:
        return False
    ours, theirs = region_of(op), region_of(read)
    if ours is None or theirs is None:
        return False
    return are_apart(ours, theirs) or (ours == theirs and leads_to(read.results[0], op))


Region = tuple[tuple[int, int, int], ...]
"""Of each axis the first index, the number of indices and the step between them."""


def region_of(op: ir.Operation) -> Region | None:
    """Read the region that a slice covers; ``None`` if that is open."""
    columns = [list(ir.DenseI64ArrayAttr(op.attributes[name])) for name in _REGION]
    if any(number == _OPEN for column in columns for number in column):
        return None
    return tuple(zip(*columns, strict=True))


def are_apart(one: Region, other: Region) -> bool:
    """Whether two regions have no element in common, as their bounds on some axis tell."""
    return any(
        begin + (size - 1) * step < other_begin or other_begin + (other_size - 1) * other_step < begin
        for (begin, size, step), (other_begin, other_size, other_step) in zip(one, other, strict=True)
    )


def leads_to(value: ir.Value, op: ir.Operation) -> bool:
    """Whether ``value`` is what ``op`` inserts, or goes into that and nothing else, each element into the one that is
    in its place."""
    while value != op.operands[0]:
        uses = list(value.uses)
        if len(uses) != 1:
            return False
        user, number = uses[0].owner, uses[0].operand_number
        is_updated = user.name == _INSERT and number == 1
        if not (is_view(user) or is_updated or reads_in_place(user, number)):
            return False
        value = user.results[0]
    return True


def reads_in_place(op: ir.Operation, number: int) -> bool:
    """Whether ``op`` computes each element of its result from the one in the same place of operand ``number``."""
    if not is_elementwise(op):
        return False
    shape, map_ = ir.RankedTensorType(op.operands[number].type).shape, read_maps(op)[number]
    indices = [str(expression) for expression in map_.results]
    return len(indices) == map_.n_dims and all(
        index == f"d{axis}" or (index == "0" and size == 1)
        for axis, (index, size) in enumerate(zip(indices, shape, strict=True))
    )


def copy(value: ir.Value, op: ir.Operation, number: int) -> ir.Value:
    """A tensor of its own with the elements of ``value``, made before ``op``, the ``number``-th one of that value.

    It is put together from two pieces. A copy as a whole IREE would replace by ``value``, and two that are cut in the
    same place by one.
    """
    type_, make = ir.RankedTensorType(value.type), Maker.before(op)
    axis = next((axis for axis, size in enumerate(type_.shape) if size != 1), None)
    if axis is None:
        element = make.value("tensor.extract", [value, *[make.index(0)] * type_.rank], type_.element_type)
        return make.value("tensor.from_elements", [element], type_)
    attributes = {"dim": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), axis)}
    return make.value("tensor.concat", cut(value, axis, number, op), type_, attributes)


def cut(value: ir.Value, axis: int, number: int, op: ir.Operation) -> list[ir.Value]:
    """``value`` in two pieces, along an axis of a size other than 1."""
    shape = read_shape(value, op)
    size = shape[axis]
    first: Number
    rest: Number
    if isinstance(size, int):
        first = number % (size - 1) + 1 if size else 0
        rest = size - first
    else:
        parts = Maker.before(op).index(number + 2)
        first = compute_index("arith.divui", size, parts, op)
        rest = compute_index("arith.subi", size, first, op)
    start: list[Number] = [0] * len(shape)
    behind = [*start[:axis], first, *start[axis + 1 :]]
    return [
        take_slice(value, start, [*shape[:axis], first, *shape[axis + 1 :]], op),
        take_slice(value, behind, [*shape[:axis], rest, *shape[axis + 1 :]], op),
    ]
