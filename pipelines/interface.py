# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Arguments and results of a staged function, read off its attributes and types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from retrograd.contract.roles import SIZE
from retrograd.dialects import ir
from retrograd.dialects.sizes import Size, evaluate_size, parse_shape
from retrograd.pipelines.analysis.read_graph import SHAPE, attribute_dicts, function_type, read_hints
from retrograd.pipelines.analysis.tensor_types import element_type, tensor_shape

# torch's names of element types by MLIR's.
DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8E4M3FN": "float8_e4m3fn",
    "f8E5M2": "float8_e5m2",
    "si64": "int64",
    "si32": "int32",
    "si16": "int16",
    "si8": "int8",
    "ui8": "uint8",
    "i1": "bool",
    # Compiled code reads and writes them as pairs, but for those of f16, which only islands take and give.
    "complex<f16>": "complex32",
    "complex<f32>": "complex64",
    "complex<f64>": "complex128",
}


@dataclass(frozen=True)
class TensorPort:
    """An argument or result: ``name`` and ``role`` to the user, the captured value it stands for, shape and dtype.

    Of a shape that differs from call to call, ``shape`` has expressions over the sizes, which are arguments with the
    role ``size``, and ``example`` the numbers that it was traced with.
    """

    name: str
    role: str
    value: str
    shape: tuple[Size, ...]
    dtype: str
    example: tuple[int, ...]


@dataclass(frozen=True)
class FunctionInterface:
    """A function that can be called: its name, arguments and results in order."""

    name: str
    arguments: tuple[TensorPort, ...]
    results: tuple[TensorPort, ...]


def read_interface(func: ir.Operation) -> FunctionInterface:
    """Read the interface of a staged ``func.func`` on ``!torch.vtensor`` types.

    Raises:
        ValueError: an argument or result is neither a tensor nor a size, has an element type that torch has no dtype
            for, or a shape that differs from call to call and is not written down.
    """
    kind, hints = function_type(func), read_hints(func.parent.operation) if func.parent is not None else {}
    return FunctionInterface(
        ir.StringAttr(func.attributes["sym_name"]).value,
        tuple(_port(t, a, hints) for t, a in zip(kind.inputs, attribute_dicts(func, "arg_attrs"), strict=True)),
        tuple(_port(t, a, hints) for t, a in zip(kind.results, attribute_dicts(func, "res_attrs"), strict=True)),
    )


def _port(type_: ir.Type, attributes: Mapping[str, str], hints: Mapping[str, int]) -> TensorPort:
    name, role, value = (attributes.get(f"bwd.{key}", "") for key in ("name", "role", "value"))
    if role == SIZE and str(type_) == "!torch.int":
        return TensorPort(name, role, value, (), "int64", ())
    declared, element = tensor_shape(type_), element_type(type_)
    if declared is None or element not in DTYPES:
        raise ValueError(f"{name or 'an unnamed value'} has type {type_}, which no torch tensor has")
    shape: tuple[Size, ...] = tuple(n for n in declared if n is not None)
    if None in declared:
        shape = parse_shape(attributes.get(SHAPE, ""))
        if len(shape) != len(declared):
            raise ValueError(
                f"{name or 'an unnamed value'} has type {type_} and no {SHAPE} that says what its sizes are"
            )
    return TensorPort(name, role, value, shape, DTYPES[element], tuple(evaluate_size(n, hints) for n in shape))
