# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-isolate-loops``: what a loop carries is updated in its place."""

from __future__ import annotations

from retrograd.dialects import ir
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.helpers.barriers import add_barrier, walk
from retrograd.pipelines.transforms.helpers.maker import Maker

_LOOP = "scf.for"
_BOUNDS = 3  # first, end, step
_TOPOLOGY = "stream.topology"
# A device reaches its own memory: said of the one that a module has, by the name that iree-compile gives it.
_OWN_MEMORY = (
    "#hal.device.topology<links = [(@__device_0 -> @__device_0 = {unified_memory = true, transparent_access = true})]>"
)


class BwdIsolateLoops(ModulePass):
    """Has loops over tensors update in place what they carry from step to step, in a module for one device.

    IREE does not follow which device a loop's tensors are on. It would take each over from an unknown one, a copy of
    the whole tensor at each step, unless it knows that the device reads its own memory. (Without that, the forward of
    an LSTM of 256, 64 steps of 16 sequences, took 2.5 times as long, its backward 1.3 times: measured side by side, on
    a busy machine.) And it makes one of two empty tensors of one type, a barrier behind each or not: then two loops, or
    one loop's two results, write into one buffer. Here the first size of each is a number that IREE cannot know, of a
    barrier of its own.
    """

    description = "Have loops update in place what they carry"

    def apply(self, module: ir.Operation) -> None:
        loops = [op for f in functions(module) for op in walk(only_block(f, self.name)) if op.name == _LOOP]
        for loop in loops:
            for number in range(len(loop.results)):
                if _is_empty(loop.operands[_BOUNDS + number]):
                    give_own_storage(loop, number)
        if not loops:
            return
        if _TOPOLOGY in module.attributes:
            message = f"bwd-isolate-loops: the module has a {_TOPOLOGY} already"
            raise PassFailure(module, message, "run the pass once")
        module.attributes[_TOPOLOGY] = ir.Attribute.parse(_OWN_MEMORY)


def give_own_storage(loop: ir.Operation, number: int) -> None:
    """Have the ``number``-th tensor that a loop carries, empty at first, start as one that is no other's.

    Raises:
        PassFailure: a step does more with it than to insert slices, or its first size is open.
    """
    make = Maker.before(loop)
    given = loop.results[number]
    old = ir.RankedTensorType(given.type)
    inserts = find_inserts(loop, number)
    if inserts is None or not old.rank or any(old.is_dynamic_dim(axis) for axis in range(old.rank)):
        message = f"bwd-isolate-loops: {old} that a loop starts with is empty, and is not only inserted into"
        raise PassFailure(loop, message, "start with values, such as zeros")
    open_size = ir.ShapedType.get_dynamic_size()
    type_ = ir.RankedTensorType.get([open_size, *old.shape[1:]], old.element_type, loc=loop.location)
    loop.operands[_BOUNDS + number] = make.empty(type_, [add_barrier(make.index(old.shape[0]), make)])
    for value in (loop.regions[0].blocks[0].arguments[1 + number], *(op.results[0] for op in inserts), given):
        value.set_type(type_)
    cast = Maker.after(loop).value("tensor.cast", [given], old)
    given.replace_all_uses_except(cast, cast.owner.operation)


def find_inserts(loop: ir.Operation, number: int) -> list[ir.Operation] | None:
    """The ops by which a step inserts into what it carries as ``number``; ``None`` if there is anything else to it."""
    block = loop.regions[0].blocks[0]
    value: ir.Value = block.arguments[1 + number]
    inserts: list[ir.Operation] = []
    while True:
        uses = list(value.uses)
        if len(uses) != 1:
            return None
        user = uses[0].owner.operation
        if user.name == "scf.yield":
            return inserts if uses[0].operand_number == number else None
        if user.name != "tensor.insert_slice" or uses[0].operand_number != 1:
            return None
        inserts.append(user)
        value = user.results[0]


def _is_empty(value: ir.Value) -> bool:
    return isinstance(value, ir.OpResult) and value.owner.name == "tensor.empty"
