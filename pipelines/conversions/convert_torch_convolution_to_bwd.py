# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``convert-torch-convolution-to-bwd``: convolutions that kernels of our own take become ops on builtin tensors."""

from __future__ import annotations

from retrograd.contract.convolution import CONVOLUTION, FILTERS, IMAGES, Convolution, Tensor
from retrograd.dialects import ir
from retrograd.pipelines.analysis.layout.tensor_types import parse_tensor_type
from retrograd.pipelines.analysis.partition.read_graph import find_operators, operator_name
from retrograd.pipelines.conversions.builtin_tensors import builtin_type, from_builtin, to_builtin
from retrograd.pipelines.conversions.convert_torch_pools_to_linalg import read_list
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.helpers.maker import Maker

_NAME = "convert-torch-convolution-to-bwd"
_REMEDY = "leave other convolutions as ops of aten"
# What each becomes, and which of two operands and a result are images, filters and results of the convolution.
_CONVERTED = {
    CONVOLUTION: ("bwd.convolution", (0, 1, 2)),
    IMAGES: ("bwd.convolution_input_gradient", (2, 1, 0)),
    FILTERS: ("bwd.convolution_filter_gradient", (1, 2, 0)),
}


class ConvertTorchConvolutionToBwd(ModulePass):
    """Convolutions of images with channels last, ops of ``retrograd``, and their gradients become ``bwd.convolution``,
    ``bwd.convolution_input_gradient`` and ``bwd.convolution_filter_gradient`` on builtin tensors, which torch-mlir's
    lowering leaves alone.
    """

    description = "Keep convolutions whole through torch-mlir's lowering, for kernels of our own"

    def apply(self, module: ir.Operation) -> None:
        for op in find_operators(module, _CONVERTED):
            with op.location, ir.InsertionPoint(op):
                _convert(op)


def _convert(op: ir.Operation) -> None:
    name, order = _CONVERTED[operator_name(op)]
    first, second, window, _ = op.operands
    numbers = read_list(op, window, _NAME, _REMEDY)
    if len(numbers) != 6 or min(numbers) < 0:
        raise PassFailure(op, f"{_NAME}: expected a window of 6 numbers, found {numbers}", _REMEDY)
    pairs = [numbers[start : start + 2] for start in (0, 2, 4)]
    tensors = [_describe(op, value) for value in (first, second, op.results[0])]
    images, filters, results = (tensors[number] for number in order)
    obstacle = Convolution.of_last(images, filters, results, *pairs).find_obstacle()
    if obstacle is not None:
        raise PassFailure(op, f"{_NAME}: no kernel of ours takes this convolution: {obstacle}", _REMEDY)
    taken = [to_builtin(value) for value in (first, second)]
    axes = dict(zip(("stride", "padding", "dilation"), map(_write_numbers, pairs), strict=True))
    made = Maker().value(name, taken, builtin_type(op.results[0].type), axes)
    op.results[0].replace_all_uses_with(from_builtin(made, op.results[0].type))
    op.erase()


def _write_numbers(numbers: list[int]) -> ir.Attribute:
    return ir.ArrayAttr.get([ir.IntegerAttr.get(ir.IntegerType.get_signless(64), number) for number in numbers])


def _describe(op: ir.Operation, tensor: ir.Value) -> Tensor:
    known = parse_tensor_type(str(tensor.type))
    if known is None or len(known.shape) != 4:
        raise PassFailure(op, f"{_NAME}: expected tensors of four axes, found {tensor.type}", _REMEDY)
    return known.element, known.shape
