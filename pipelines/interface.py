# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Arguments and results of a staged function, read off its attributes and types."""

from __future__ import annotations

import re
from dataclasses import dataclass

from retrograd.dialects import ir
from retrograd.pipelines.analysis.read_graph import attribute_dicts, function_type, tensor_shape

_ELEMENT = re.compile(r"!torch\.vtensor<\[[\d,?]*\],\s*([\w!.<>]+)>")
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
}


@dataclass(frozen=True)
class TensorPort:
    """An argument or result: ``name`` and ``role`` to the user, the captured value it stands for, shape and dtype."""

    name: str
    role: str
    value: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class FunctionInterface:
    """A function that can be called: its name, arguments and results in order."""

    name: str
    arguments: tuple[TensorPort, ...]
    results: tuple[TensorPort, ...]


def read_interface(func: ir.Operation) -> FunctionInterface:
    """Read the interface of a staged ``func.func`` on ``!torch.vtensor`` types.

    Raises:
        ValueError: an argument or result is no tensor, or has an element type that torch has no dtype for.
    """
    kind = function_type(func)
    return FunctionInterface(
        ir.StringAttr(func.attributes["sym_name"]).value,
        tuple(_port(t, a) for t, a in zip(kind.inputs, attribute_dicts(func, "arg_attrs"), strict=True)),
        tuple(_port(t, a) for t, a in zip(kind.results, attribute_dicts(func, "res_attrs"), strict=True)),
    )


def _port(type_: ir.Type, attributes: dict[str, str]) -> TensorPort:
    shape, element = tensor_shape(type_), _ELEMENT.fullmatch(str(type_))
    if shape is None or element is None or element[1] not in DTYPES:
        raise ValueError(
            f"{attributes.get('bwd.name', 'an unnamed value')} has type {type_}, which no torch tensor has"
        )
    return TensorPort(
        attributes.get("bwd.name", ""),
        attributes.get("bwd.role", ""),
        attributes.get("bwd.value", ""),
        shape,
        DTYPES[element[1]],
    )
