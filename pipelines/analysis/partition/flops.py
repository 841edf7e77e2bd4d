# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Floating-point operations of an op, from its shapes: two per multiply-add, one per element of pointwise work."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from retrograd.pipelines.analysis.partition.op_kinds import OpKind, op_kind

Shape = tuple[int, ...] | None


def count_flops(name: str, operands: Sequence[Shape], results: Sequence[Shape]) -> int:
    """FLOPs of the op ``name`` (``torch.aten.mm``) on operands and results of these shapes (``None``: no tensor)."""
    tensors = [s for s in operands if s is not None]
    produced = [s for s in results if s is not None]
    if not produced:
        return 0
    match name.removeprefix("torch.").removeprefix("aten."):
        case "retrograd.lstm" | "retrograd.lstm_backward":
            return 2 * prod(tensors[0][:2]) * prod(tensors[3])
        case "retrograd.rnn_tanh_backward" | "retrograd.rnn_relu_backward":
            return 2 * prod(tensors[0][:2]) * prod(tensors[1])
        case "retrograd.gru" | "retrograd.gru_backward" | "retrograd.rnn_tanh" | "retrograd.rnn_relu":
            return 2 * prod(tensors[0][:2]) * prod(tensors[2])
        case "mm" | "bmm" | "matmul" | "mv" | "dot" | "linear":
            return 2 * prod(produced[0]) * tensors[0][-1]
        case "addmm" | "baddbmm":
            return 2 * prod(produced[0]) * tensors[1][-1] + prod(produced[0])
        case "addbmm":
            return 2 * prod(produced[0]) * tensors[1][0] * tensors[1][-1] + prod(produced[0])
        case "outer":
            return prod(produced[0])
        case "convolution":
            return 2 * prod(produced[0]) * prod(tensors[1][1:])
        case "convolution_backward":
            return 4 * prod(tensors[0]) * prod(tensors[2][1:])
    kind = op_kind(name, has_tensor_result=True)
    if kind is OpKind.POINTWISE:
        return prod(produced[0])
    return prod(tensors[0]) if kind in (OpKind.REDUCTION, OpKind.SCATTER) and tensors else 0
