# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``convert-torch-operator-to-bwd``: the library ops that hooks are traced as become ops of the bwd dialect."""

from __future__ import annotations

from collections.abc import Callable

from retrograd.contract.attributes import BWD_SHAPES, BWD_VALUES
from retrograd.dialects import builders, bwd, ir
from retrograd.pipelines.analysis.partition.read_graph import operator_name, value_names
from retrograd.pipelines.infra.functions import functions
from retrograd.pipelines.infra.passes import ModulePass, PassFailure

_NAME = "convert-torch-operator-to-bwd"
_PREFIX = "torch.retrograd."
_LIST = "torch.prim.ListConstruct"
_UNPACK = "torch.prim.ListUnpack"
# What is left of an operand once the op that took it is raised.
_ARGUMENTS = (_LIST, "torch.constant.str", "torch.constant.int")


class ConvertTorchOperatorToBwd(ModulePass):
    """Raises each ``torch.operator "torch.retrograd.*"`` that has a bwd op: `create_token`, `call_hook`,
    `call_backward`, `accumulate_grad`, `update_input`, `final_callbacks`.

    Tensors of shape [0] that stood for tokens become ``!bwd.token``, lists of values ``!torch.tuple`` (a single value
    is itself, none at all ``!torch.none``). Other ops stay, and ops of the library that are no effects too.
    """

    description = "Raise traced hook ops to the bwd dialect"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            for block in func.regions[0].blocks:
                for op in [view.operation for view in block.operations]:
                    if _is_effect(op):
                        with op.location, ir.InsertionPoint(op):
                            _convert(op)
            _check_tokens(func)


def _is_effect(op: ir.Operation) -> bool:
    return op.name == "torch.operator" and operator_name(op).removeprefix(_PREFIX) in _CONVERSIONS


def _convert(op: ir.Operation) -> None:
    operands = [operand.owner for operand in op.operands if isinstance(operand, ir.OpResult)]
    _CONVERSIONS[operator_name(op).removeprefix(_PREFIX)](op)
    op.erase()
    for operand in dict.fromkeys(operands):
        if operand.name in _ARGUMENTS and not any(True for _ in operand.results[0].uses):
            operand.erase()


def _convert_create_token(op: ir.Operation) -> None:
    op.results[0].replace_all_uses_with(builders.create_token())


def _convert_call_hook(op: ir.Operation) -> None:
    kind, hook = _constant(op, 2), _constant(op, 3)
    value, token = _values(op), _token(op, 1)
    results = _results(op)
    replacement, next_token = builders.call_hook(
        value, token, kind=kind.value, hook=hook.value, result_type=_bundle_type(results)
    )
    _replace(op, results, replacement, next_token)


def _convert_call_backward(op: ir.Operation) -> None:
    function = _constant(op, 2)
    value, token = _values(op), _token(op, 1)
    results = _results(op)
    gradient, next_token = builders.call_backward(
        value, token, function=function.value, result_type=_bundle_type(results)
    )
    _replace(op, results, gradient, next_token)


def _convert_accumulate_grad(op: ir.Operation) -> None:
    param = _constant(op, 2)
    op.results[0].replace_all_uses_with(builders.accumulate_grad(op.operands[0], _token(op, 1), param=param.value))


def _convert_update_input(op: ir.Operation) -> None:
    hook = _constant(op, 2)
    op.results[0].replace_all_uses_with(builders.update_input(_values(op), _token(op, 1), hook=hook.value))


def _convert_final_callbacks(op: ir.Operation) -> None:
    op.results[0].replace_all_uses_with(builders.final_callbacks(_token(op, 0)))


_CONVERSIONS: dict[str, Callable[[ir.Operation], None]] = {
    "create_token": _convert_create_token,
    "call_hook": _convert_call_hook,
    "call_backward": _convert_call_backward,
    "accumulate_grad": _convert_accumulate_grad,
    "final_callbacks": _convert_final_callbacks,
    "update_input": _convert_update_input,
}


def _constant(op: ir.Operation, index: int) -> ir.Attribute:
    """The value of the constant that operand number `index` is."""
    operand = op.operands[index]
    if isinstance(operand, ir.OpResult) and operand.owner.name in _ARGUMENTS[1:]:
        return operand.owner.attributes["value"]
    message = f"{_NAME}: operand {index} of {operator_name(op)} is no constant"
    raise PassFailure(op, message, "kinds and numbers are known when the hook is traced")


def _values(op: ir.Operation) -> ir.Value:
    """The values of the list that the first operand is, as one value."""
    operand = op.operands[0]
    if isinstance(operand, ir.OpResult) and operand.owner.name == _LIST:
        return builders.bundle(list(operand.owner.operands))
    message = f"{_NAME}: the values of {operator_name(op)} are no {_LIST}"
    raise PassFailure(op, message, "pass the tensors one by one")


def _token(op: ir.Operation, index: int) -> ir.Value:
    """The token that operand number `index` is, once what gives it is raised."""
    if bwd.is_token(op.operands[index]):
        return op.operands[index]
    message = f"{_NAME}: operand {index} of {operator_name(op)} comes from no op that gives a token"
    raise PassFailure(op, message, "start the chain with retrograd::create_token, before its first use")


def _results(op: ir.Operation) -> ir.Operation | None:
    """The op that takes the list of results apart; None where nobody uses any of them."""
    users = [use.owner.operation for use in op.results[0].uses]
    if all(user.name == _UNPACK for user in users) and len(users) <= 1:
        return users[0] if users else None
    message = f"{_NAME}: the results of {operator_name(op)} are used as a list"
    raise PassFailure(op, message, f"take them apart with one {_UNPACK}")


def _bundle_type(results: ir.Operation | None) -> ir.Type:
    return builders.bundle_type([] if results is None else [r.type for r in results.results])


def _replace(op: ir.Operation, results: ir.Operation | None, value: ir.Value, token: ir.Value) -> None:
    """Put what a raised op gives in the place of what `op` gave; names of values and open shapes go along."""
    op.results[1].replace_all_uses_with(token)
    if results is None:
        return
    texts = {BWD_VALUES: value_names(results)}
    if BWD_SHAPES in results.attributes:
        texts[BWD_SHAPES] = [ir.StringAttr(shape).value for shape in ir.ArrayAttr(results.attributes[BWD_SHAPES])]
    for old, new in zip(results.results, builders.unbundle(value), strict=True):
        old.replace_all_uses_with(new)
        named = new.owner
    for key, own in texts.items():
        attributes = [*own, ""] if named == value.owner else own
        named.attributes[key] = ir.ArrayAttr.get([ir.StringAttr.get(text) for text in attributes])
    results.erase()


def _check_tokens(func: ir.Operation) -> None:
    """Refuse tokens that go where no bwd op can take them.

    Raises:
        PassFailure: an op of another dialect, the return among them, takes a token.
    """
    for block in func.regions[0].blocks:
        for view in block.operations:
            if not view.operation.name.startswith("bwd.") and any(map(bwd.is_token, view.operation.operands)):
                message = f"{_NAME}: takes a token, which only effects can"
                raise PassFailure(view.operation, message, "leave the token out of what the graph computes and returns")
