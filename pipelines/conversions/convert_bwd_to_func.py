# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``convert-bwd-to-func``: bwd ops go; what they said is now in functions, calls and their order."""

from __future__ import annotations

import re
from collections.abc import Sequence

from retrograd.contract.attributes import BWD_NAME, BWD_ROLE, BWD_SHAPE, BWD_VALUE
from retrograd.contract.hooks import name_of_custom_backward, name_of_hook
from retrograd.contract.roles import GRAD, SAVED, name_in_role
from retrograd.dialects import bwd, ir
from retrograd.pipelines.analysis.partition.read_graph import (
    ShapeReader,
    attribute_dicts,
    function_type,
    set_function_type,
    text_attributes,
)
from retrograd.pipelines.infra.functions import find_function, functions, only_block
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.helpers.maker import Maker

_SIGNED = re.compile(r"!torch\.vtensor<\[([\d,?]*)\],\s*([su]i\d+)>")
# An op of these calls back into the process that runs the module; the attribute numbers what it calls, of that name.
_CALLS = {"bwd.call_hook": ("hook", name_of_hook), "bwd.call_backward": ("function", name_of_custom_backward)}


class ConvertBwdToFunc(ModulePass):
    """Lowers each bwd op of each function.

    - ``bwd.save``: one more result of its function, with role ``saved``, in the order of the ops;
    - ``bwd.accumulate_grad``: one more result, with role ``grad``;
    - ``bwd.call_hook``, ``bwd.call_backward``, ``bwd.final_callbacks``: calls of private functions ``@hook_N``,
      ``@backward_N`` and ``@final_callbacks``, in the order of the tokens, which is theirs in the block;
    - ``bwd.recompute_barrier``: its operand; tokens: nothing.
    """

    description = "Lower bwd ops to function results and calls"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            _check_signature(func)
            _check_body(func)
            added = _convert_body(module, func)
            _append_results(func, added)
            _keep_signs(func)


def _keep_signs(func: ir.Operation) -> None:
    """Say on integer results whether they are signed: linalg drops it, and readers of the results compare types."""
    results = []
    for type_, attributes in zip(function_type(func).results, attribute_dicts(func, "res_attrs"), strict=True):
        entry: dict[str, ir.Attribute] = {k: ir.StringAttr.get(v) for k, v in attributes.items()}
        signed = _SIGNED.fullmatch(str(type_))
        if signed:
            shape = "".join(f"{n}x" for n in signed[1].split(",") if n)
            entry["iree.abi.encoding"] = ir.TypeAttr.get(ir.Type.parse(f"tensor<{shape}{signed[2]}>"))
        results.append(ir.DictAttr.get(entry))
    func.attributes["res_attrs"] = ir.ArrayAttr.get(results)


def _check_signature(func: ir.Operation) -> None:
    kind = function_type(func)
    if any(str(t) == bwd.TOKEN for t in (*kind.inputs, *kind.results)):
        raise PassFailure(
            func,
            "convert-bwd-to-func: a function takes or gives a !bwd.token",
            "start the chain inside the function with bwd.create_token",
        )


def _check_body(func: ir.Operation) -> None:
    for view in only_block(func, "convert-bwd-to-func").operations:
        if not view.operation.name.startswith("bwd.") and any(map(bwd.is_token, view.operation.operands)):
            message = f"convert-bwd-to-func: takes a {bwd.TOKEN}, which only bwd ops can"
            raise PassFailure(view.operation, message, "order it by values that stay")


def _convert_body(module: ir.Operation, func: ir.Operation) -> list[tuple[ir.Value, dict[str, str]]]:
    """Lower each bwd op; returns the results to add to the function, with their attributes."""
    added: list[tuple[ir.Value, dict[str, str]]] = []
    shapes = ShapeReader(func)
    dead: list[ir.Operation] = []
    for view in func.regions[0].blocks[0].operations:
        op = view.operation
        match op.name:
            case "bwd.save":
                name = ir.StringAttr(op.attributes["name"]).value
                attributes = {BWD_ROLE: SAVED, BWD_NAME: name_in_role(SAVED, name), BWD_VALUE: name}
                added.append((op.operands[0], attributes | _shape_of(shapes, op)))
            case "bwd.accumulate_grad":
                number = ir.IntegerAttr(op.attributes["param"]).value
                attributes = {BWD_ROLE: GRAD, BWD_NAME: name_in_role(GRAD, str(number))}
                added.append((op.operands[0], attributes | _shape_of(shapes, op)))
            case "bwd.recompute_barrier":
                op.results[0].replace_all_uses_with(op.operands[0])
            case "bwd.call_hook" | "bwd.call_backward":
                attribute, name_of = _CALLS[op.name]
                number = ir.IntegerAttr(op.attributes[attribute]).value
                call = _call(module, name_of(number), op, list(op.operands)[:-1], list(op.results)[:-1])
                op.results[0].replace_all_uses_with(call.results[0])
            case "bwd.final_callbacks":
                _call(module, "final_callbacks", op, [], [])
            case "bwd.update_input":
                message = "convert-bwd-to-func: an update of an argument that is in no plan"
                raise PassFailure(op, message, "run bwd-outline-stages first")
            case "bwd.create_token":
                pass
            case _:
                continue
        dead.append(op)
    # From the last to the first: only tokens are left between them.
    for op in reversed(dead):
        op.erase()
    return added


def _shape_of(shapes: ShapeReader, op: ir.Operation) -> dict[str, str]:
    text = shapes.text(op.operands[0])
    return {BWD_SHAPE: text} if text else {}


def _call(
    module: ir.Operation, name: str, op: ir.Operation, operands: Sequence[ir.Value], results: Sequence[ir.Value]
) -> ir.Operation:
    operand_types, result_types = [o.type for o in operands], [r.type for r in results]
    _declare(module, name, ir.FunctionType.get(operand_types, result_types), op)
    callee = {"callee": ir.FlatSymbolRefAttr.get(name)}
    return Maker.before(op).op("func.call", operands, result_types, callee)


def _declare(module: ir.Operation, name: str, type_: ir.FunctionType, caller: ir.Operation) -> None:
    declared = find_function(module, name)
    if declared is not None:
        if function_type(declared) != type_:
            raise PassFailure(
                caller,
                f"convert-bwd-to-func: @{name} is called as {type_} here and as {function_type(declared)} elsewhere",
                "give each hook a number of its own per signature",
            )
        return
    attributes = {
        "sym_name": ir.StringAttr.get(name),
        "function_type": ir.TypeAttr.get(type_),
        "sym_visibility": ir.StringAttr.get("private"),
    }
    start = ir.InsertionPoint.at_block_begin(module.regions[0].blocks[0])
    Maker(start, caller.location).op("func.func", attributes=attributes, regions=1)


def _append_results(func: ir.Operation, added: Sequence[tuple[ir.Value, dict[str, str]]]) -> None:
    """Return the added values too, after what the function returns already."""
    if not added:
        return
    block = func.regions[0].blocks[0]
    old_return = list(block.operations)[-1].operation
    values = [*old_return.operands, *(value for value, _ in added)]
    Maker.before(old_return).op("func.return", values)
    old_return.erase()
    results = [*attribute_dicts(func, "res_attrs"), *(attributes for _, attributes in added)]
    set_function_type(func, function_type(func).inputs, [value.type for value in values])
    func.attributes["res_attrs"] = text_attributes(results)
