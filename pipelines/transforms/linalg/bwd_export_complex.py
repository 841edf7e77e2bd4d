# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-export-complex``: functions take and give complex numbers, of which they compute with pairs."""

from __future__ import annotations

from retrograd.dialects import ir
from retrograd.pipelines.analysis.partition.read_graph import set_function_type
from retrograd.pipelines.conversions.convert_torch_complex_to_pairs import COMPLEX
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.helpers.maker import Maker


class BwdExportComplex(ModulePass):
    """Arguments and results marked with ``bwd.complex``, pairs along the last axis, are complex to callers: one
    ``flow.tensor.bitcast`` each, which is no work, since complex numbers lie in memory as pairs."""

    description = "Have functions take and give complex numbers for the pairs that are marked"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            block = only_block(func, self.name)
            for index in _take_marks(func, "arg_attrs"):
                _export_argument(func, block, index)
            terminator = list(block.operations)[-1].operation
            for index in _take_marks(func, "res_attrs"):
                pairs = terminator.operands[index]
                terminator.operands[index] = _cast(pairs, _complex(func, pairs.type), terminator)
            kinds = [a.type for a in block.arguments], [value.type for value in terminator.operands]
            set_function_type(func, *kinds)


def _export_argument(func: ir.Operation, block: ir.Block, index: int) -> None:
    argument = block.arguments[index]
    pairs = argument.type
    uses = [(use.owner, use.operand_number) for use in argument.uses]
    argument.set_type(_complex(func, pairs))
    value = _cast(argument, pairs, next(iter(block.operations)).operation)
    for owner, number in uses:
        owner.operands[number] = value


def _take_marks(func: ir.Operation, key: str) -> list[int]:
    """The places that are marked, of arguments or results; the marks are gone."""
    if key not in func.attributes:
        return []
    entries = [{a.name: a.attr for a in entry} for entry in func.attributes[key]]
    marked = [i for i, entry in enumerate(entries) if COMPLEX in entry]
    plain = [ir.DictAttr.get({k: v for k, v in entry.items() if k != COMPLEX}) for entry in entries]
    func.attributes[key] = ir.ArrayAttr.get(plain)
    return marked


def _complex(func: ir.Operation, type_: ir.Type) -> ir.Type:
    """The type of complex numbers whose pairs are of this one."""
    shape = list(ir.RankedTensorType(type_).shape) if isinstance(type_, ir.RankedTensorType) else []
    if shape[-1:] != [2]:
        message = f"bwd-export-complex: {type_} is marked with {COMPLEX}, and has no pairs along its last axis"
        raise PassFailure(func, message, "run it after torch-backend-to-linalg-on-tensors-backend-pipeline")
    with func.location:
        return ir.RankedTensorType.get(shape[:-1], ir.ComplexType.get(ir.RankedTensorType(type_).element_type))


def _cast(value: ir.Value, type_: ir.Type, before: ir.Operation) -> ir.Value:
    make = Maker.before(before)
    sizes = make.open_sizes(value)
    segments = {"operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, len(sizes), len(sizes)])}
    return make.value("flow.tensor.bitcast", [value, *sizes, *sizes], type_, segments)
