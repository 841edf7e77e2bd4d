# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``convert-torch-complex-to-pairs``: functions take and give pairs of real numbers in the place of complex ones."""

from __future__ import annotations

from retrograd.dialects import ir
from retrograd.pipelines.analysis.layout.tensor_types import element_type, tensor_shape
from retrograd.pipelines.analysis.partition.read_graph import function_type, set_function_type
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass, PassFailure

COMPLEX = "bwd.complex"
"""On an argument or result: it is complex to callers; ``bwd-export-complex`` gives it back its type."""

_TO_REAL, _TO_COMPLEX, _LITERAL = "torch.aten.view_as_real", "torch.aten.view_as_complex", "torch.vtensor.literal"


class ConvertTorchComplexToPairs(ModulePass):
    """A complex argument that only ``aten.view_as_real`` takes becomes what this gives, a result that
    ``aten.view_as_complex`` gives what that takes, each marked with ``bwd.complex``.

    Elements lie in memory as pairs in any case. torch-mlir would take complex numbers apart and put them together, by
    code that IREE does not compile. An op that computes with complex numbers is an error.
    """

    description = "Have functions take and give pairs of real numbers for complex ones"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            block = only_block(func, self.name)
            arguments = [i for i, argument in enumerate(block.arguments) if _convert_argument(argument)]
            terminator = list(block.operations)[-1].operation
            results = [i for i in range(len(terminator.operands)) if _convert_result(terminator, i)]
            for op in [view.operation for view in block.operations]:
                if op.name == _TO_COMPLEX and not list(op.results[0].uses):
                    op.erase()
                elif op.name != _LITERAL and any(_is_complex(value) for value in op.results):
                    _refuse(op)
            kinds = [a.type for a in block.arguments], [value.type for value in terminator.operands]
            set_function_type(func, *kinds)
            _mark(func, "arg_attrs", arguments)
            _mark(func, "res_attrs", results)


def _convert_argument(argument: ir.BlockArgument) -> bool:
    """Make pairs of a complex argument; says whether it is one that can be."""
    uses = [use.owner for use in argument.uses]
    if not _is_complex(argument) or any(op.name != _TO_REAL for op in uses) or not uses:
        return False
    views = list({op.operation.results[0]: op.operation for op in uses}.values())
    for op in views:
        _check_shapes(op, argument, op.results[0])
    argument.set_type(views[0].results[0].type)
    for op in views:
        op.results[0].replace_all_uses_with(argument)
        op.erase()
    return True


def _convert_result(terminator: ir.Operation, index: int) -> bool:
    """Give pairs for a complex result; says whether it is one that can be."""
    value = terminator.operands[index]
    if not isinstance(value, ir.OpResult) or value.owner.name != _TO_COMPLEX:
        return False
    pairs = value.owner.operands[0]
    _check_shapes(value.owner, value, pairs)
    terminator.operands[index] = pairs
    return True


def _check_shapes(op: ir.Operation, value: ir.Value, pairs: ir.Value) -> None:
    shape = tensor_shape(value.type)
    if shape is None or tensor_shape(pairs.type) != (*shape, 2):
        message = f"convert-torch-complex-to-pairs: {pairs.type} are not the pairs of {value.type}"
        raise PassFailure(op, message, "give both types as PyTorch does: pairs are along one more axis, the last")


def _refuse(op: ir.Operation) -> None:
    message = "convert-torch-complex-to-pairs: it computes with complex numbers"
    raise PassFailure(op, message, "leave it to torch: as an eager island, or outside of the compiled function")


def _mark(func: ir.Operation, key: str, places: list[int]) -> None:
    if not places:
        return
    kind = function_type(func)
    count = len(kind.inputs if key == "arg_attrs" else kind.results)
    known = list(func.attributes[key]) if key in func.attributes else [ir.DictAttr.get({})] * count
    marked = [
        ir.DictAttr.get({**{a.name: a.attr for a in entry}, COMPLEX: ir.UnitAttr.get()}) if i in places else entry
        for i, entry in enumerate(known)
    ]
    func.attributes[key] = ir.ArrayAttr.get(marked)


def _is_complex(value: ir.Value) -> bool:
    return element_type(value.type).startswith("complex<")
