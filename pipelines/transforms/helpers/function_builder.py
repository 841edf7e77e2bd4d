# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Builds a function out of some of another's ops: how a joint function is cut into pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from retrograd.contract.attributes import BWD_VALUE
from retrograd.dialects import ir
from retrograd.pipelines.analysis.partition.read_graph import ReadGraph, text_attributes
from retrograd.pipelines.transforms.helpers.maker import Maker


@dataclass(frozen=True)
class Port:
    """An argument or result of a function to build: a value of the source, by number, and its string attributes."""

    value: int
    attributes: Mapping[str, str]


@dataclass(frozen=True)
class FunctionSketch:
    """A function to build: name, arguments, ops of the source by number in order, results, values to ``bwd.save``."""

    name: str
    arguments: Sequence[Port]
    ops: Sequence[int]
    results: Sequence[Port]
    saves: Sequence[Port] = field(default=())


def build_function(before: ir.Operation, source: ReadGraph, sketch: FunctionSketch) -> ir.Operation:
    """Build the sketched ``func.func`` in front of ``before``, cloning ops of ``source``, which stays as it is."""
    inputs = [source.values[p.value].type for p in sketch.arguments]
    outputs = [source.values[p.value].type for p in sketch.results]
    attributes = {
        "sym_name": ir.StringAttr.get(sketch.name),
        "function_type": ir.TypeAttr.get(ir.FunctionType.get(inputs, outputs)),
        "arg_attrs": text_attributes(port.attributes for port in sketch.arguments),
        "res_attrs": text_attributes(port.attributes for port in sketch.results),
    }
    func = Maker.before(before).op("func.func", attributes=attributes, regions=1)
    block = func.regions[0].blocks.append(*inputs, arg_locs=[before.location] * len(inputs))
    mapping = {p.value: argument for p, argument in zip(sketch.arguments, block.arguments, strict=True)}
    make = Maker(ir.InsertionPoint(block), func.location)
    for number in sketch.ops:
        copy = source.ops[number].clone(ip=make.ip).operation
        for i, operand in enumerate(source.graph.ops[number].operands):
            copy.operands[i] = mapping[operand]
        # A value saved in the forward enters the backward as an argument, and stays that even where its op runs again.
        for result, value in zip(source.graph.ops[number].results, copy.results, strict=True):
            mapping.setdefault(result, value)
    for port in sketch.saves:
        name = ir.StringAttr.get(port.attributes[BWD_VALUE])
        make.op("bwd.save", [mapping[port.value]], attributes={"name": name})
    make.op("func.return", [mapping[p.value] for p in sketch.results])
    return func
