# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-inline-hooks``: hooks whose tensor code was traced become part of the graph."""

from __future__ import annotations

from collections.abc import Sequence

from retrograd.contract.attributes import BWD_INLINE, BWD_VALUES
from retrograd.contract.hooks import PACK, UNPACK, name_of_hook
from retrograd.dialects import builders, ir
from retrograd.pipelines.analysis.partition.read_graph import function_type, read_joint, value_names
from retrograd.pipelines.infra.functions import find_function, functions
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.helpers.copies import copy_ops
from retrograd.pipelines.transforms.helpers.hook_reader import COLLECTIVE_OP, TUPLE, UNTUPLE

CALL = "bwd.call_hook"
_BUNDLES = (TUPLE, "torch.constant.none")


class BwdInlineHooks(ModulePass):
    """Replaces each ``bwd.call_hook {hook = N}`` by the body of ``@hook_N``, where that is marked ``bwd.inline``.

    The call leaves the chain of tokens: what precedes it precedes what follows it. The body of an unpack hook goes
    right before the first use of what it gives, that of a pack hook right after the last use that the forward makes of
    what it takes, others where they were called: of a value that is packed, only the packed copy is alive in between.
    """

    description = "Replace calls of traced hooks by their bodies"

    def apply(self, module: ir.Operation) -> None:
        bodies = [func for func in functions(module) if BWD_INLINE in func.attributes]
        for func in functions(module):
            if func in bodies:
                continue
            # Only calls: what takes their results apart goes with them.
            for op in [v.operation for v in func.regions[0].blocks[0].operations if v.operation.name == CALL]:
                body = find_body(module, op)
                if body is not None:
                    _check(op, body, self.name)
                    inline_hook(func, op, body)
        for body in bodies:
            body.erase()


def find_body(module: ir.Operation, op: ir.Operation) -> ir.Operation | None:
    """The traced body of the hook that an op calls; None where it stays in Python, or the op calls none."""
    if op.name != CALL:
        return None
    body = find_function(module, name_of_hook(_number(op)))
    return body if body is not None and BWD_INLINE in body.attributes else None


def inline_hook(func: ir.Operation, op: ir.Operation, body: ir.Operation) -> None:
    """Put the body of a hook in the place of a call of it in `func`."""
    values, results, plumbing = _take_apart(op)
    place = _find_place(func, op, values, results)
    given = copy_body(body, values, ir.InsertionPoint(place), name_of_hook(_number(op)))
    for result, value in zip(results, given[: len(results)], strict=True):
        result.replace_all_uses_with(value)
    op.results[1].replace_all_uses_with(op.operands[1])
    for dead in plumbing:
        if not any(True for result in dead.results for _ in result.uses):
            dead.erase()


def copy_body(body: ir.Operation, values: Sequence[ir.Value], ip: ir.InsertionPoint, name: str) -> list[ir.Value]:
    """Copy the ops of a function of one block, called on `values`, to another place; returns what it gives. `name`
    tells the names of its values from those of the graph that they are put into."""
    block = body.regions[0].blocks[0]
    mapping: dict[ir.Value, ir.Value] = dict(zip(block.arguments, values, strict=True))
    *ops, end = (view.operation for view in block.operations)
    for copy in copy_ops(ops, mapping, ip):
        _mark(copy, name)
    return [mapping[value] for value in end.operands]


def check_body(body: ir.Operation, pass_name: str, *, may_communicate: bool = False) -> None:
    """Refuse a function whose body cannot be copied into another's; collectives are of those that may have them.

    Raises:
        PassFailure: it has control flow or effects; at the op.
    """
    name = f"@{ir.StringAttr(body.attributes['sym_name']).value}"
    if len(body.regions[0].blocks) != 1:
        raise PassFailure(body, f"{pass_name}: {name} has several blocks", "trace the hook without control flow")
    for view in body.regions[0].blocks[0].operations:
        if may_communicate and view.operation.name == COLLECTIVE_OP:
            continue
        if view.operation.name.startswith("bwd.") or any(len(r.blocks) for r in view.operation.regions):
            message = f"{pass_name}: {name} does more than compute tensors"
            raise PassFailure(view.operation, message, f"leave the hook in Python: take {BWD_INLINE} off it")


def _take_apart(op: ir.Operation) -> tuple[list[ir.Value], list[ir.Value], list[ir.Operation]]:
    """The tensors that a call takes and gives, and the ops to go with it, from the last to the first."""
    given = op.operands[0]
    bundle = given.owner if isinstance(given, ir.OpResult) and given.owner.name in _BUNDLES else None
    values = [given] if bundle is None else list(bundle.operands)
    unpack = next((use.owner.operation for use in op.results[0].uses if use.owner.operation.name == UNTUPLE), None)
    if unpack is not None:
        results = list(unpack.results)
    else:
        results = [op.results[0]] if any(True for _ in op.results[0].uses) else []
    return values, results, [o for o in (unpack, op, bundle) if o is not None]


def _find_place(
    func: ir.Operation, op: ir.Operation, values: Sequence[ir.Value], results: Sequence[ir.Value]
) -> ir.Operation:
    """The op before which the body of a hook goes."""
    kind = ir.StringAttr(op.attributes["kind"]).value
    if kind not in (PACK, UNPACK):
        return op
    block = func.regions[0].blocks[0]
    readers = [use.owner.operation for result in results for use in result.uses]
    first_reader = _find_first(readers) if readers else block.operations[len(block.operations) - 1].operation
    if kind == UNPACK:
        return first_reader
    ops = [view.operation for view in block.operations]
    start, first = ops.index(op) + 1, ops.index(first_reader)
    tangent_ops = read_joint(func).graph.tangent_ops
    users = [n for n in range(start, first) if any(v in list(ops[n].operands) for v in values)]
    return ops[max((n for n in users if n not in tangent_ops), default=start - 1) + 1]


def _find_first(ops: Sequence[ir.Operation]) -> ir.Operation:
    """Find the op of one block that stands before the others."""
    first = ops[0]
    for op in ops[1:]:
        first = op if op.is_before_in_block(first) else first
    return first


def _check(op: ir.Operation, body: ir.Operation, name: str) -> None:
    # When packing runs, and whether it does, is no matter of order.
    check_body(body, name, may_communicate=ir.StringAttr(op.attributes["kind"]).value != PACK)
    hook, kind = f"@hook_{_number(op)}", function_type(body)
    taken, given = (builders.bundle_type(list(types)) for types in (kind.inputs, kind.results))
    if taken != op.operands[0].type:
        message = f"{name}: {hook} takes {taken}, and is called with {op.operands[0].type}"
        raise PassFailure(op, message, "trace the hook on what it is called with")
    if given != op.results[0].type and any(True for _ in op.results[0].uses):
        message = f"{name}: {hook} gives {given}, and {op.results[0].type} is used"
        raise PassFailure(op, message, "trace the hook on what it is called with")


def _mark(op: ir.Operation, prefix: str) -> None:
    if BWD_VALUES in op.attributes:
        marked = [f"{prefix}.{name}" if name else "" for name in value_names(op)]
        op.attributes[BWD_VALUES] = ir.ArrayAttr.get([ir.StringAttr.get(name) for name in marked])


def _number(op: ir.Operation) -> int:
    return int(ir.IntegerAttr(op.attributes["hook"]).value)
