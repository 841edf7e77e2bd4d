# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``convert-torch-view-to-tensor``: views whose sizes differ from call to call become collapsed and expanded axes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from retrograd.contract.attributes import BWD_SHAPES
from retrograd.contract.sizes import Size, parse_shape
from retrograd.dialects import ir
from retrograd.pipelines.analysis.layout.tensor_types import element_type, tensor_shape
from retrograd.pipelines.analysis.layout.view_groups import AxisGroup, find_axis_groups
from retrograd.pipelines.analysis.partition.read_graph import ShapeReader, read_hints
from retrograd.pipelines.infra.functions import functions
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.helpers.maker import Maker

_VIEWS = ("torch.aten.view", "torch.aten._unsafe_view", "torch.aten.reshape")
_LIST = "torch.prim.ListConstruct"
# Shape expressions are only read here: the sizes themselves are operands of the op.
_DYNAMIC = -(2**63)


class ConvertTorchViewToTensor(ModulePass):
    """``aten.view`` with open sizes becomes ``tensor.collapse_shape`` and ``tensor.expand_shape``.

    torch-mlir lowers such a view by its type alone, in which ``[a, b, 2, 8] -> [a * b, 16]`` is ``[?, ?, 2, 8] ->
    [?, 16]``; it then takes one of the unknown sizes for 1. Here the expressions in ``bwd.shape`` and ``bwd.shapes``
    say which axes belong together. Views of fixed sizes are left to torch-mlir.
    """

    description = "Lower views of open sizes by what their sizes are, not by their types alone"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            shapes = ShapeReader(func)
            for block in func.regions[0].blocks:
                for op in [view.operation for view in block.operations]:
                    if op.name in _VIEWS and (_is_open(op.operands[0]) or _is_open(op.results[0])):
                        convert_view(op, shapes)


def convert_view(op: ir.Operation, shapes: ShapeReader) -> None:
    """Replace one view.

    Raises:
        PassFailure: a shape is not written down, or a size is no operand of the op.
    """
    source, result = _read_shape(op, op.operands[0], shapes), _read_shape(op, op.results[0], shapes)
    if not source or not result:
        message = "convert-torch-view-to-tensor: a view of open sizes to or from a number"
        raise PassFailure(op, message, "select the element instead")
    module = op.parent.parent
    groups = find_axis_groups(source, result, read_hints(module.operation))
    ip, location = ir.InsertionPoint(op), op.location
    with ip, location:
        value = Maker().value("torch_c.to_builtin_tensor", [op.operands[0]], _builtin(op.operands[0].type))
        value = _collapse(value, groups)
        value = _expand(op, value, groups)
        # A view of this one asks for its shape.
        kept = {BWD_SHAPES: op.attributes[BWD_SHAPES]} if BWD_SHAPES in op.attributes else None
        value = Maker().value("torch_c.from_builtin_tensor", [value], op.results[0].type, kept)
    op.results[0].replace_all_uses_with(value)
    op.erase()


def _is_open(value: ir.Value) -> bool:
    return None in (tensor_shape(value.type) or ())


def _read_shape(op: ir.Operation, value: ir.Value, shapes: ShapeReader) -> tuple[Size, ...]:
    declared = tensor_shape(value.type) or ()
    if None not in declared:
        return tuple(n for n in declared if n is not None)
    text = shapes.text(value)
    if len(parse_shape(text)) != len(declared):
        message = f"convert-torch-view-to-tensor: nothing says what the sizes of {value.type} are"
        raise PassFailure(op, message, "keep bwd.shape on arguments and bwd.shapes on ops, which the import writes")
    return parse_shape(text)


def _collapse(value: ir.Value, groups: Sequence[AxisGroup]) -> ir.Value:
    """Collapse a tensor to one axis for each group."""
    if all(len(group.source) == 1 for group in groups):
        return value
    type_ = ir.RankedTensorType(value.type)
    sizes = [_product([_static(type_, axis) for axis in group.source]) for group in groups]
    attributes = {"reassociation": _reassociation([group.source for group in groups])}
    return Maker().value("tensor.collapse_shape", [value], _tensor(sizes, type_.element_type), attributes)


def _expand(op: ir.Operation, value: ir.Value, groups: Sequence[AxisGroup]) -> ir.Value:
    """The axes of the view out of one for each group."""
    if all(len(group.result) == 1 for group in groups):
        return _cast(value, _builtin(op.results[0].type))
    type_ = ir.RankedTensorType(_builtin(op.results[0].type))
    open_axes = [axis for axis in range(type_.rank) if type_.is_dynamic_dim(axis)]
    sizes = _sizes(op, value, groups, open_axes)
    attributes = {
        "reassociation": _reassociation([group.result for group in groups]),
        "static_output_shape": ir.DenseI64ArrayAttr.get(
            [_DYNAMIC if axis in open_axes else type_.get_dim_size(axis) for axis in range(type_.rank)]
        ),
    }
    # An axis whose size the view knows and the collapsed tensor does not is checked, not believed.
    known = [_product([_static(type_, axis) for axis in group.result]) for group in groups]
    value = _cast(value, _tensor(known, type_.element_type))
    return Maker().value("tensor.expand_shape", [value, *sizes], type_, attributes)


def _sizes(op: ir.Operation, value: ir.Value, groups: Sequence[AxisGroup], axes: Sequence[int]) -> list[ir.Value]:
    """The open sizes of the view, which its list of sizes holds; one that is -1 is what the others leave."""
    made = op.operands[1].owner
    if not isinstance(made, ir.Operation | ir.OpView) or made.operation.name != _LIST:
        message = "convert-torch-view-to-tensor: the sizes of a view are no list of numbers"
        raise PassFailure(op, message, "build the list with torch.prim.ListConstruct")
    listed = list(made.operation.operands)
    found: dict[int, ir.Value] = {}
    for axis in axes:
        if _constant_of(listed[axis]) is None:
            number = Maker().value("torch_c.to_i64", [listed[axis]], ir.IntegerType.get_signless(64))
            found[axis] = Maker().value("arith.index_cast", [number], ir.IndexType.get())
    for axis in axes:
        if axis not in found:
            found[axis] = _remainder(op, value, groups, axis, found)
    return [found[axis] for axis in axes]


def _remainder(
    op: ir.Operation, value: ir.Value, groups: Sequence[AxisGroup], axis: int, found: dict[int, ir.Value]
) -> ir.Value:
    """The size of an axis: that of its group, divided by the sizes of the group's other axes."""
    number, group = next((n, g) for n, g in enumerate(groups) if axis in g.result)
    type_ = ir.RankedTensorType(_builtin(op.results[0].type))
    size = Maker().value("tensor.dim", [value, Maker().index(number)], ir.IndexType.get())
    for other in group.result:
        if other == axis:
            continue
        if other not in found and type_.is_dynamic_dim(other):
            message = "convert-torch-view-to-tensor: two sizes of a view are left to be worked out"
            raise PassFailure(op, message, "give all sizes but one")
        divisor = found[other] if other in found else Maker().index(type_.get_dim_size(other))
        size = Maker().value("arith.divui", [size, divisor], ir.IndexType.get())
    return size


def _constant_of(value: ir.Value) -> int | None:
    owner = value.owner
    if isinstance(owner, ir.Operation | ir.OpView) and owner.operation.name == "torch.constant.int":
        return int(ir.IntegerAttr(owner.operation.attributes["value"]).value)
    return None


def _cast(value: ir.Value, type_: ir.Type) -> ir.Value:
    return value if value.type == type_ else Maker().value("tensor.cast", [value], type_)


def _static(type_: ir.RankedTensorType, axis: int) -> int | None:
    return None if type_.is_dynamic_dim(axis) else int(type_.get_dim_size(axis))


def _product(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return prod(known) if len(known) == len(sizes) else None


def _builtin(type_: ir.Type) -> ir.Type:
    """The built-in tensor type of a ``!torch.vtensor``: integers lose their sign."""
    element = element_type(type_).removeprefix("s").removeprefix("u")
    return _tensor(tensor_shape(type_) or (), ir.Type.parse(element))


def _tensor(shape: Sequence[int | None], element: ir.Type) -> ir.Type:
    dynamic = ir.ShapedType.get_dynamic_size()
    return ir.RankedTensorType.get([dynamic if n is None else n for n in shape], element)


def _reassociation(groups: Sequence[Sequence[int]]) -> ir.Attribute:
    i64 = ir.IntegerType.get_signless(64)
    return ir.ArrayAttr.get([ir.ArrayAttr.get([ir.IntegerAttr.get(i64, axis) for axis in group]) for group in groups])
