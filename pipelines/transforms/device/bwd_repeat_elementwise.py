# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-repeat-elementwise``: what is made of an argument by arithmetic is computed anew where it is used later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from retrograd.dialects import ir
from retrograd.pipelines.analysis.kernels.in_order_kernels import LEAST_BYTES, SMALL_PART
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.barriers import add_barrier
from retrograd.pipelines.transforms.helpers.copies import copy_ops
from retrograd.pipelines.transforms.helpers.generics import (
    GENERIC,
    count_bytes,
    is_arithmetic,
    is_elementwise,
    read_inputs,
)
from retrograd.pipelines.transforms.helpers.maker import Maker
from retrograd.pipelines.transforms.helpers.uses import replace_operand
from retrograd.pipelines.transforms.helpers.views import SLICE, is_view

_EMPTY = "tensor.empty"
# Ops that are part of a kernel of what uses them, or none.
_NO_KERNEL = (_EMPTY, SLICE, "arith.constant", "linalg.fill", "util.optimization_barrier")


class BwdRepeatElementwise(ModulePass):
    """Computes a tensor again where it is used after other kernels have run, if it is made of one argument that is no
    larger, element by element and by arithmetic alone; tensors of open sizes, and small ones, stay as they are.

    Arguments are in memory all through a function: reading one again costs what reading that tensor would, which need
    not be in memory meanwhile. Of a batch norm and a ReLU whose input was saved, that is the input less its mean and
    the ReLU's mask: two tensors as large as the input, alive from where the backward recomputes what follows them to
    where it comes to their gradients. A barrier at the beginning of the function, where nothing runs yet, keeps IREE
    from seeing that the copies are one. Source: Briggs, Cooper and Torczon, "Rematerialization", PLDI 1992.
    """

    description = "Compute what is made of an argument by arithmetic anew where it is used later"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            ops = [view.operation for view in only_block(func, self.name).operations]
            places = find_places(ops)
            for op in ops:
                if chain := find_chain(op):
                    repeat(op, chain, places)


@dataclass(frozen=True)
class Chain:
    """The ops that make a tensor of ``source``, an argument, each behind what it reads."""

    source: ir.Value
    ops: tuple[ir.Operation, ...]


@dataclass(frozen=True, order=True)
class Place:
    """Where an op stands: behind how many kernels, and behind how many ops."""

    kernels: int
    ops: int


def find_places(ops: list[ir.Operation]) -> dict[ir.Operation, Place]:
    """The place of each op, counting as kernels those in front of it that no elementwise op takes into its own."""
    places: dict[ir.Operation, Place] = {}
    kernels = 0
    for number, op in enumerate(ops):
        places[op] = Place(kernels, number)
        kernels += not (is_elementwise(op) or is_view(op) or op.name in _NO_KERNEL)
    return places


def find_chain(op: ir.Operation) -> Chain | None:
    """How the result of an elementwise ``op`` is made, by arithmetic, of one argument that is no larger and of tensors
    that are small beside it; ``None`` where it is made otherwise."""
    whole = count_bytes(op.results[0]) if is_elementwise(op) else None
    if whole is None or whole < LEAST_BYTES:
        return None
    found: dict[ir.Operation, None] = {}
    sources: set[ir.Value] = set()
    pending = [(op, False)]
    while pending:
        last, is_ready = pending.pop()
        if is_ready:
            found[last] = None
        elif not is_view(last) and not is_arithmetic(last):
            return None
        elif last not in found:
            pending.append((last, True))
            for value in read_large(last, whole // SMALL_PART):
                if isinstance(value, ir.OpResult):
                    pending.append((value.owner, False))
                else:
                    sources.add(value)
    sizes = [count_bytes(source) for source in sources]
    return (
        Chain(sources.pop(), tuple(found)) if len(sizes) == 1 and sizes[0] is not None and sizes[0] <= whole else None
    )


def read_large(op: ir.Operation, least: int) -> list[ir.Value]:
    """List the values of more than ``least`` bytes, or of an open size, that a view or an elementwise op reads."""
    values = [op.operands[0]] if is_view(op) else read_inputs(op)
    values = [value for value in values if isinstance(value.type, ir.RankedTensorType)]
    return [value for value in values if (size := count_bytes(value)) is None or size > least]


def repeat(op: ir.Operation, chain: Chain, places: Mapping[ir.Operation, Place]) -> None:
    """Give the ``linalg.generic`` ops that use the result of ``op`` a copy of ``chain`` for each number of kernels that
    they stand behind; those behind the fewest keep the result."""
    users = dict.fromkeys(use.owner.operation for use in op.results[0].uses)
    known = sorted((user for user in users if user in places), key=places.__getitem__)
    later: dict[int, list[ir.Operation]] = {}
    for user in known:
        kernels = places[user].kernels
        if kernels > places[known[0]].kernels and user.name == GENERIC:
            later.setdefault(kernels, []).append(user)
    for group in later.values():
        copy = copy_chain(chain, group[0])
        for user in group:
            replace_operand(user, op.results[0], copy)


def copy_chain(chain: Chain, user: ir.Operation) -> ir.Value:
    """The result of a copy of ``chain`` in front of ``user``, its argument taken from behind a barrier."""
    start, here = ir.InsertionPoint.at_block_begin(chain.source.owner), ir.InsertionPoint(user)
    values = {chain.source: add_barrier(chain.source, Maker(start, user.location))}
    return copy_ops(chain.ops, values, here)[-1].results[0]
