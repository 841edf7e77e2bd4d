# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``convert-torch-collectives-to-bwd``: functional collectives, with the waits for them, become ops of bwd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from retrograd.contract.attributes import BWD_LATE, BWD_RECOMPUTE, BWD_SHAPES, BWD_TURN, BWD_VALUES, Tag
from retrograd.contract.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Collective
from retrograd.contract.roles import JOINT
from retrograd.dialects import builders, ir
from retrograd.pipelines.analysis.partition.read_graph import ReadGraph, operator_name, read_joint
from retrograd.pipelines.infra.functions import functions
from retrograd.pipelines.infra.passes import ModulePass, PassFailure

_NAME = "convert-torch-collectives-to-bwd"
_PREFIX = "torch._c10d_functional."
_WAIT = f"{_PREFIX}wait_tensor"
# What each takes besides the tensor, in order.
_OPERANDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    f"{_PREFIX}all_reduce": (ALL_REDUCE, ("reduction", "group")),
    f"{_PREFIX}all_gather_into_tensor": (ALL_GATHER, ("size", "group")),
    f"{_PREFIX}reduce_scatter_tensor": (REDUCE_SCATTER, ("reduction", "size", "group")),
}
_CONSTANTS = ("torch.constant.str", "torch.constant.int")


class ConvertTorchCollectivesToBwd(ModulePass):
    """Raises ``all_reduce``, ``all_gather_into_tensor`` and ``reduce_scatter_tensor``, each with the ``wait_tensor``
    of what it gives, to one ``bwd.collective``: both are in one half of a step, and nothing in between is saved.

    One that was called in the backward, on what is there in the forward already, is to be repeated and not saved: that
    is what it was called there for. In a checkpointed block none is: what it gave is saved. Each of ``@joint`` has the
    turn in which it was captured, for whatever moves it later on.

    One that something else looks at, or that nobody waits for, stays as it is, and so do other collectives.
    """

    description = "Raise functional collectives, with the waits for them, to bwd.collective"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            for block in func.regions[0].blocks:
                found = [(op, waits) for view in block.operations if (waits := _find_waits(op := view.operation))]
                if found and ir.StringAttr(func.attributes["sym_name"]).value == JOINT:
                    _mark(read_joint(func), [op for op, _ in found])
                for op, waits in found:
                    with op.location, ir.InsertionPoint(op):
                        _convert(op, waits)


def _find_waits(op: ir.Operation) -> list[ir.Operation]:
    """The ops that wait for a collective; none of another op, or where another one looks at it before it is there."""
    if operator_name(op) not in _OPERANDS:
        return []
    users = [use.owner.operation for use in op.results[0].uses]
    return users if all(operator_name(user) == _WAIT for user in users) else []


def _mark(read: ReadGraph, collectives: Sequence[ir.Operation]) -> None:
    """Number the collectives of a joint function, and say of those that the backward repeats that it does."""
    # An op is found no more in a set when its attributes change.
    early = {op for number, op in enumerate(read.ops) if number not in read.graph.tangent_ops}
    repeated = [BWD_LATE in op.attributes and op in early for op in collectives]
    for turn, (op, is_again) in enumerate(zip(collectives, repeated, strict=True)):
        op.attributes[BWD_TURN] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), turn)
        if BWD_RECOMPUTE in op.attributes:
            del op.attributes[BWD_RECOMPUTE]
        if is_again:
            op.attributes[BWD_RECOMPUTE] = ir.StringAttr.get(Tag.MUST.value)


def _convert(op: ir.Operation, waits: Sequence[ir.Operation]) -> None:
    kind, names = _OPERANDS[operator_name(op)]
    if len(op.operands) != 1 + len(names):
        message = f"{_NAME}: {operator_name(op)} takes {len(op.operands)} operands, not {1 + len(names)}"
        raise PassFailure(op, message, "trace it with a release of PyTorch that this project is for")
    given = {name: _constant(op, place) for place, name in enumerate(names, 1)}
    size = given.get("size", 0)
    if not isinstance(size, int):
        message = f"{_NAME}: an operand of {operator_name(op)} is no number"
        raise PassFailure(op, message, "name the size of the group as an integer")
    what = Collective(kind, str(given.get("reduction", "")), size, str(given["group"]))
    value = builders.collective(op.operands[0], what, op.results[0].type)
    for key in (BWD_TURN, BWD_RECOMPUTE):
        if key in op.attributes:
            value.owner.attributes[key] = op.attributes[key]
    for key in (BWD_VALUES, BWD_SHAPES):
        if key in waits[0].attributes:
            value.owner.attributes[key] = waits[0].attributes[key]
    for wait in waits:
        wait.results[0].replace_all_uses_with(value)
        wait.erase()
    constants = [operand.owner for operand in op.operands if isinstance(operand, ir.OpResult)]
    op.erase()
    for constant in dict.fromkeys(constants):
        if constant.name in _CONSTANTS and not any(True for _ in constant.results[0].uses):
            constant.erase()


def _constant(op: ir.Operation, index: int) -> str | int:
    """The value of the constant that an operand is."""
    operand = op.operands[index]
    if isinstance(operand, ir.OpResult) and operand.owner.name in _CONSTANTS:
        value: str | int = operand.owner.attributes["value"].value
        return value
    message = f"{_NAME}: operand {index} of {operator_name(op)} is no constant"
    raise PassFailure(op, message, "groups, their sizes and reductions are known when the graph is traced")
