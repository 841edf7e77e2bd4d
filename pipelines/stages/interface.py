# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Arguments and results of a staged function, read off its attributes and types; how much memory they take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

from retrograd.contract.attributes import BWD_NAME, BWD_ROLE, BWD_SHAPE, BWD_VALUE
from retrograd.contract.roles import SIZE
from retrograd.contract.sizes import Size, evaluate_shape, parse_shape
from retrograd.contract.tensors import DTYPES, FunctionSpec, TensorSpec
from retrograd.dialects import ir
from retrograd.pipelines.analysis.layout.tensor_types import element_type, tensor_shape
from retrograd.pipelines.analysis.partition.read_graph import attribute_dicts, function_type, read_hints


def read_interface(func: ir.Operation) -> FunctionSpec:
    """Read the interface of a staged ``func.func`` on ``!torch.vtensor`` types.

    Raises:
        ValueError: an argument or result is neither a tensor nor a size, has an element type that torch has no dtype
            for, or a shape that differs from call to call and is not written down.
    """
    kind, hints = function_type(func), read_hints(func.parent.operation) if func.parent is not None else {}
    return FunctionSpec(
        ir.StringAttr(func.attributes["sym_name"]).value,
        tuple(_port(t, a, hints) for t, a in zip(kind.inputs, attribute_dicts(func, "arg_attrs"), strict=True)),
        tuple(_port(t, a, hints) for t, a in zip(kind.results, attribute_dicts(func, "res_attrs"), strict=True)),
    )


def port_bytes(port: TensorSpec) -> int:
    """Bytes of a contiguous tensor, of the sizes that it was traced with; none for a size."""
    if port.role == SIZE:
        return 0
    bits = re.match(r"[a-z]*?(\d+)", port.dtype)
    return prod(port.example) * (int(bits[1]) // 8 if bits else 1)


def _port(type_: ir.Type, attributes: Mapping[str, str], hints: Mapping[str, int]) -> TensorSpec:
    name, role, value = (attributes.get(key, "") for key in (BWD_NAME, BWD_ROLE, BWD_VALUE))
    if role == SIZE and str(type_) == "!torch.int":
        return TensorSpec(name, role, (), "int64", value)
    declared, element = tensor_shape(type_), element_type(type_)
    if declared is None or element not in DTYPES:
        raise ValueError(f"{name or 'an unnamed value'} has type {type_}, which no torch tensor has")
    shape: tuple[Size, ...] = tuple(n for n in declared if n is not None)
    if None in declared:
        shape = parse_shape(attributes.get(BWD_SHAPE, ""))
        if len(shape) != len(declared):
            raise ValueError(
                f"{name or 'an unnamed value'} has type {type_} and no {BWD_SHAPE} that says what its sizes are"
            )
    return TensorSpec(name, role, shape, DTYPES[element], value, evaluate_shape(shape, hints))
