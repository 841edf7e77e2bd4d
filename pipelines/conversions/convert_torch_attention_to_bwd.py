# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``convert-torch-attention-to-bwd``: attention that a trace kept whole becomes an op on builtin tensors."""

from __future__ import annotations

import math

from retrograd.contract.attention import (
    BACKWARD,
    DROPPED,
    DROPPED_BACKWARD,
    FORWARD,
    MASKED_BACKWARD,
    Attention,
    Tensor,
)
from retrograd.dialects import ir
from retrograd.pipelines.analysis.layout.tensor_types import parse_tensor_type
from retrograd.pipelines.analysis.partition.read_graph import find_operators, operator_name
from retrograd.pipelines.conversions.builtin_tensors import builtin_type, from_builtin, to_builtin
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.helpers.maker import Maker

_NAME = "convert-torch-attention-to-bwd"
_NONE = "torch.constant.none"
_NUMBERS = ("torch.constant.float", "torch.constant.bool", "torch.constant.int")
# Operands that a forward and a backward begin with; what comes behind them is the same for both.
_TENSORS = {FORWARD: 3, BACKWARD: 6, DROPPED: 3, DROPPED_BACKWARD: 6, MASKED_BACKWARD: 6}
_CONVERTED = {
    FORWARD: "bwd.attention",
    BACKWARD: "bwd.attention_backward",
    DROPPED: "bwd.dropped_attention",
    DROPPED_BACKWARD: "bwd.dropped_attention_backward",
    MASKED_BACKWARD: "bwd.dropped_attention_backward_with_mask",
}
_REMEDY = "decompose attention where it is traced, for a target without kernels of ours that take it"


class ConvertTorchAttentionToBwd(ModulePass):
    """Attention and its gradients, as PyTorch has them for a CPU, become ``bwd.attention`` and
    ``bwd.attention_backward`` on builtin tensors, which torch-mlir's lowering leaves alone; with dropout, of which a
    trace has ``retrograd.attention``, ``bwd.dropped_attention`` and ``bwd.dropped_attention_backward``, or
    ``bwd.dropped_attention_backward_with_mask`` where the mask has a gradient.
    """

    description = "Keep attention whole through torch-mlir's lowering, for kernels of our own"

    def apply(self, module: ir.Operation) -> None:
        for op in find_operators(module, _TENSORS):
            with op.location, ir.InsertionPoint(op):
                _convert(op)


def _convert(op: ir.Operation) -> None:
    count = _TENSORS[operator_name(op)]
    tensors, (dropout, causal, mask, scale, *drawn) = list(op.operands)[:count], list(op.operands)[count:]
    query, key, value = tensors[:3] if count == 3 else tensors[1:4]
    obstacle = Attention(
        _describe(query),
        _describe(key),
        _describe(value),
        None if _is_none(mask) else _describe(mask),
        _read_number(op, dropout),
        None if _is_none(scale) else _read_number(op, scale),
        is_seeded=operator_name(op) in (DROPPED, DROPPED_BACKWARD, MASKED_BACKWARD),
    ).find_obstacle()
    if obstacle is not None:
        raise PassFailure(op, f"{_NAME}: no kernel of ours takes this attention: {obstacle}", _REMEDY)
    width = _describe(query)[1][-1] or 1
    factor = 1 / math.sqrt(width) if _is_none(scale) else _read_number(op, scale)
    taken = [to_builtin(tensor) for tensor in tensors]
    added = _write_nothing(query) if _is_none(mask) else to_builtin(mask)
    attributes = {
        "causal": ir.BoolAttr.get(bool(_read_number(op, causal))),
        "scale": ir.FloatAttr.get(ir.F32Type.get(), factor),
    }
    if drawn:
        seed, stream = drawn
        taken_seed = [to_builtin(seed, ir.Type.parse("tensor<2xi64>"))]
        attributes["dropout"] = ir.FloatAttr.get(ir.F32Type.get(), _read_number(op, dropout))
        number = int(_read_number(op, stream))
        attributes["stream"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), number)
    else:
        taken_seed = []
    # Not by the op's class, which takes a false attribute for none.
    types = [builtin_type(result.type) for result in op.results]
    made = Maker().op(_CONVERTED[operator_name(op)], [*taken, added, *taken_seed], types, attributes)
    for old, new in zip(op.results, made.results, strict=True):
        old.replace_all_uses_with(from_builtin(new, old.type))
    op.erase()


def _is_none(value: ir.Value) -> bool:
    return isinstance(value, ir.OpResult) and value.owner.name == _NONE


def _read_number(op: ir.Operation, value: ir.Value) -> float:
    """The number that an operand is."""
    if isinstance(value, ir.OpResult) and value.owner.name in _NUMBERS:
        return float(value.owner.attributes["value"].value)
    raise PassFailure(op, f"{_NAME}: a number among the operands is no constant", _REMEDY)


def _describe(tensor: ir.Value) -> Tensor:
    known = parse_tensor_type(str(tensor.type))
    return ("", ()) if known is None else (known.element, known.shape)


def _write_nothing(like: ir.Value) -> ir.Value:
    """Write the zero that stands for no mask."""
    type_ = ir.RankedTensorType.get([], ir.RankedTensorType(builtin_type(like.type)).element_type)
    return Maker().constant(ir.DenseElementsAttr.get_splat(type_, ir.FloatAttr.get(type_.element_type, 0.0)))
