# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Torch ops that pack a tensor into a narrower type and unpack it; the frontend's ``narrowing.py`` does the same in
torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from retrograd.contract.attributes import BWD_SHAPES
from retrograd.contract.formats import BLOCK, FLOAT8_MAX, INT8_MAX, TINY
from retrograd.dialects import ir
from retrograd.pipelines.analysis.layout.tensor_types import element_type, fixed_shape, tensor_shape
from retrograd.pipelines.transforms.helpers.maker import Maker

# torch's numbers of dtypes.
_DTYPES = {"si8": 1, "f16": 5, "f32": 6, "f64": 7, "bf16": 15, "f8E4M3FN": 24}


@dataclass(frozen=True)
class TorchBuilder:
    """Creates torch ops at one place; ``shape`` is what is written of tensors whose sizes are open."""

    make: Maker
    shape: str = ""

    def op(self, name: str, operands: Sequence[ir.Value], type_: ir.Type) -> ir.Value:
        """The result of a new op."""
        made = self.make.op(f"torch.{name}", operands, [type_])
        if None in (tensor_shape(type_) or ()):
            made.attributes[BWD_SHAPES] = ir.ArrayAttr.get([ir.StringAttr.get(self.shape)])
        return made.results[0]

    def integer(self, value: int) -> ir.Value:
        """A constant ``!torch.int``."""
        attribute = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
        return self._constant("int", attribute)

    def number(self, value: float) -> ir.Value:
        """A constant ``!torch.float``."""
        return self._constant("float", ir.FloatAttr.get_f64(value))

    def flag(self, value: bool) -> ir.Value:
        """A constant ``!torch.bool``."""
        return self._constant("bool", ir.IntegerAttr.get(ir.IntegerType.get_signless(1), int(value)))

    def integers(self, values: Sequence[int]) -> ir.Value:
        """A ``!torch.list<int>``."""
        return self.op("prim.ListConstruct", [self.integer(v) for v in values], ir.Type.parse("!torch.list<int>"))

    def convert(self, value: ir.Value, element: str) -> ir.Value:
        """``value`` in another element type."""
        if element_type(value.type) == element:
            return value
        shape = tensor_shape(value.type) or ()
        return self.op("prims.convert_element_type", [value, self.integer(_DTYPES[element])], tensor(shape, element))

    def view(self, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        """``value`` in another shape of as many elements."""
        return self.op("aten.view", [value, self.integers(shape)], tensor(shape, element_type(value.type)))

    def _constant(self, kind: str, attribute: ir.Attribute) -> ir.Value:
        return self.make.value(f"torch.constant.{kind}", [], ir.Type.parse(f"!torch.{kind}"), {"value": attribute})


def tensor(shape: Sequence[int | None], element: str) -> ir.Type:
    """A ``!torch.vtensor`` type; ``None`` stands for an open size."""
    sizes = ("?" if size is None else str(size) for size in shape)
    return ir.Type.parse(f"!torch.vtensor<[{','.join(sizes)}],{element}>")


def pack(build: TorchBuilder, value: ir.Value, format: str) -> list[ir.Value]:
    """The parts of ``value`` in ``format``."""
    match format:
        case "bf16":
            return [build.convert(value, "bf16")]
        case "float8_e4m3":
            wide = build.convert(value, "f32")
            scale = _scale(build, _largest(build, wide, range(len(tensor_shape(wide.type) or ()))), FLOAT8_MAX)
            scaled = build.op("aten.div.Tensor", [wide, scale], wide.type)
            return [build.convert(scaled, "f8E4M3FN"), scale]
        case "int8-block":
            rows = _rows(build, build.convert(value, "f32"))
            scales = _scale(build, _largest(build, rows, (1,)), INT8_MAX)
            scaled = build.op("aten.div.Tensor", [rows, scales], rows.type)
            return [build.convert(build.op("aten.round", [scaled], rows.type), "si8"), scales]
    raise ValueError(f"no type {format!r} to save in")


def unpack(build: TorchBuilder, parts: Sequence[ir.Value], type_: ir.Type, format: str) -> ir.Value:
    """The value of ``type_`` that ``parts`` were packed from, rounded."""
    element = element_type(type_)
    if format == "bf16":
        return build.convert(parts[0], element)
    wide = build.convert(parts[0], "f32")
    whole = build.op("aten.mul.Tensor", [wide, parts[1]], wide.type)
    if format == "int8-block":
        shape = fixed_shape(type_) or ()
        count = prod(shape)
        flat = build.view(whole, (prod(_shape(whole)),))
        zero, one = build.integer(0), build.integer(1)
        flat = build.op("aten.slice.Tensor", [flat, zero, zero, build.integer(count), one], tensor((count,), "f32"))
        whole = build.view(flat, shape)
    return build.convert(whole, element)


def _shape(value: ir.Value) -> tuple[int, ...]:
    return fixed_shape(value.type) or ()


def _rows(build: TorchBuilder, value: ir.Value) -> ir.Value:
    """The elements in rows of a block each, the last filled up with zeros."""
    count = prod(_shape(value))
    rows = -(-count // BLOCK)
    flat = build.view(value, (count,))
    if rows * BLOCK > count:
        pads = build.integers((0, rows * BLOCK - count))
        flat = build.op("aten.constant_pad_nd", [flat, pads, build.number(0.0)], tensor((rows * BLOCK,), "f32"))
    return build.view(flat, (rows, BLOCK))


def _largest(build: TorchBuilder, value: ir.Value, dims: Sequence[int]) -> ir.Value:
    """The largest magnitude along ``dims``, which stay as dimensions of size 1."""
    magnitudes = build.op("aten.abs", [value], value.type)
    shape = [1 if dim in dims else size for dim, size in enumerate(tensor_shape(value.type) or ())]
    return build.op("aten.amax", [magnitudes, build.integers(tuple(dims)), build.flag(True)], tensor(shape, "f32"))


def _scale(build: TorchBuilder, largest: ir.Value, limit: float) -> ir.Value:
    """Compute the divisor that brings ``largest`` to ``limit``."""
    above = build.op("aten.clamp_min", [largest, build.number(TINY)], largest.type)
    return build.op("aten.div.Scalar", [above, build.number(limit)], largest.type)
