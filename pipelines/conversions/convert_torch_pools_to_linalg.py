# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``convert-torch-pools-to-linalg``: maxima of windows over images with channels last become one op each."""

from __future__ import annotations

from collections.abc import Callable

from retrograd.dialects import ir
from retrograd.pipelines.analysis.layout.tensor_types import parse_tensor_type
from retrograd.pipelines.analysis.partition.read_graph import find_operators, operator_name
from retrograd.pipelines.conversions.pool_forms import Pool, max_pool_backward_form, max_pool_form
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.helpers.copies import copy_form

_NAME = "convert-torch-pools-to-linalg"
_LIST, _INT = "torch.prim.ListConstruct", "torch.constant.int"
_REMEDY = "leave other pools as ops of aten"
_ELEMENTS = ("f32", "f64", "bf16", "f16")
# The text of each, and how many tensors it takes before its lists.
_FORMS: dict[str, tuple[Callable[[Pool], str], int]] = {
    "torch.retrograd.max_pool_last": (max_pool_form, 1),
    "torch.retrograd.max_pool_last_backward": (max_pool_backward_form, 2),
}


class ConvertTorchPoolsToLinalg(ModulePass):
    """Maxima of windows, ops of ``retrograd``, and their gradients become a ``linalg.generic`` each, whose body reads
    the elements that it compares from where they are.

    What a maximum is of is kept as the number of a tap, in a byte. An element's gradient is a sum over the few windows
    that may hold it, in one order: nothing is scattered.
    """

    description = "Turn pools over images with channels last into one op that reads from where it likes"

    def apply(self, module: ir.Operation) -> None:
        for op in find_operators(module, _FORMS):
            form, count = _FORMS[operator_name(op)]
            parsed = ir.Module.parse(form(read_pool(op, count)))
            results = copy_form(parsed, list(op.operands)[:count], op)
            for old, new in zip(op.results, results, strict=True):
                old.replace_all_uses_with(new)
            op.erase()


def read_pool(op: ir.Operation, count: int) -> Pool:
    """The pool that an op of so many tensors is.

    Raises:
        PassFailure: a size is open, or a number no constant; or elements are no floats.
    """
    tensor = parse_tensor_type(str(op.operands[0].type))
    shape = None if tensor is None else tensor.fixed_shape
    if tensor is None or shape is None or len(shape) != 4 or tensor.element not in _ELEMENTS:
        message = f"{_NAME}: expected floats [images, height, width, channels], found {op.operands[0].type}"
        raise PassFailure(op, message, _REMEDY)
    window, others = (read_list(op, operand, _NAME, _REMEDY) for operand in list(op.operands)[count:])
    if len(window) != 8 or len(others) != 2:
        raise PassFailure(op, f"{_NAME}: expected a window of 8 numbers and 2 sizes", _REMEDY)
    height, width = others
    plane, is_forward = (shape[1], shape[2]), count == 1
    size, out = (plane, (height, width)) if is_forward else ((height, width), plane)
    pairs = [(window[start], window[start + 1]) for start in range(0, 8, 2)]
    return Pool(shape[0], shape[3], tensor.element, size, out, *pairs)


def read_list(op: ir.Operation, value: ir.Value, name: str, remedy: str) -> list[int]:
    """The numbers of a list among an op's operands, for the pass of this ``name``.

    Raises:
        PassFailure: they are no constants.
    """
    source = value.owner if isinstance(value, ir.OpResult) else None
    if source is None or source.name != _LIST:
        raise PassFailure(op, f"{name}: numbers among the operands are no list", remedy)
    sources = [operand.owner for operand in source.operands if isinstance(operand, ir.OpResult)]
    if len(sources) != len(source.operands) or any(number.name != _INT for number in sources):
        raise PassFailure(op, f"{name}: a number among the operands is no constant", remedy)
    return [int(ir.IntegerAttr(number.attributes["value"]).value) for number in sources]
