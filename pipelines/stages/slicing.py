# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Slices of a staged function as modules of their own: what a search for a fault compiles, and what is reported."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from retrograd.contract.attributes import BWD_NAME, BWD_ROLE, BWD_SHAPE, BWD_SIZES, BWD_VALUE
from retrograd.contract.roles import INPUT, OUTPUT, SIZE
from retrograd.contract.tensors import FunctionSpec
from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.pipelines.analysis.partition.read_graph import ShapeReader, attribute_dicts, read_joint
from retrograd.pipelines.analysis.stages.slices import Slice, SliceGraph, find_fault
from retrograd.pipelines.infra.functions import find_function
from retrograd.pipelines.infra.runner import run_pipeline
from retrograd.pipelines.stages.interface import read_interface
from retrograd.pipelines.transforms.helpers.function_builder import FunctionSketch, Port, build_function
from retrograd.pipelines.transforms.helpers.maker import Maker

# Says anew which integer results are signed, as of any staged function.
_STAGED = "builtin.module(convert-bwd-to-func,bwd-verify-legality{level=staged})"


@dataclass(frozen=True)
class ModuleSlice:
    """A module of one function on torch types: its text with locations, its interface, how many ops are in it.

    Arguments and results are called by the captured values that they are. ``operands`` has the values that each result
    was computed from by its op.
    """

    text: str
    function: FunctionSpec
    ops: int
    operands: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class FoundOp:
    """The first op at fault: name, location in the user's source, value that it gives, and the smallest slice."""

    name: str
    location: str
    value: str
    slice: ModuleSlice


class Slicer:
    """Cuts a function of a staged module (text, with locations) where the values named in ``known`` are; without it,
    wherever a value has a name.

    Raises:
        ValueError: the module has no such function.
    """

    def __init__(self, source: str, function: str, known: Collection[str] | None) -> None:
        self._context = make_context()
        self._module = ir.Module.parse(source, self._context)
        func = find_function(self._module.operation, function)
        if func is None:
            raise ValueError(f"the module has no function @{function}")
        with self._context:
            self._read = read_joint(func)
            self._shapes = ShapeReader(func)
            roles = zip(self._read.graph.arguments, attribute_dicts(func, "arg_attrs"), strict=True)
        # Open sizes go wherever shapes may be written in terms of them.
        self._sizes = {value: attributes for value, attributes in roles if attributes.get(BWD_ROLE) == SIZE}
        self._hints = self._module.operation.attributes.get(BWD_SIZES)
        self._name = function
        graph = self._read.graph
        self.graph = SliceGraph(graph, {v.name for v in graph.values} if known is None else known)

    @property
    def sizes(self) -> str:
        """The sizes that the module was traced with, as an attribute in MLIR; nothing where none is open."""
        return "" if self._hints is None else str(self._hints)

    def build(self, piece: Slice) -> ModuleSlice:
        """A slice as a module."""
        with self._context, ir.Location.unknown():
            module, func = self._make(piece)
            interface = read_interface(func)
            run_pipeline(module, _STAGED, replay=False)
            text: str = module.operation.get_asm(enable_debug_info=True)
        steps = set(self.graph.steps)
        operands = self.operands([self._read.graph.values[v].name for v in piece.results])
        return ModuleSlice(text, interface, sum(op in steps for op in piece.ops), operands)

    def singles(self) -> Iterator[tuple[str, tuple[str, ...], str]]:
        """Each op by itself: its name, the values that it gives, and the text of a function, without locations."""
        for step in self.graph.steps:
            op = self._read.graph.ops[step]
            results = [v for v in op.results if v in self.graph.observable]
            with self._context, ir.Location.unknown():
                module, func = self._make(self.graph.cut((step,), results))
                run_pipeline(module, _STAGED, replay=False)
                yield op.name, tuple(self._read.graph.values[v].name for v in results), str(func)

    def _make(self, piece: Slice) -> tuple[ir.Module, ir.Operation]:
        module = ir.Module.create()
        attributes = {
            "sym_name": ir.StringAttr.get("end"),
            "function_type": ir.TypeAttr.get(ir.FunctionType.get([], [])),
            "sym_visibility": ir.StringAttr.get("private"),
        }
        end = Maker(ir.InsertionPoint(module.body)).op("func.func", attributes=attributes, regions=1)
        arguments = [self._port(value, INPUT) for value in sorted({*piece.arguments, *self._sizes})]
        results = [self._port(value, OUTPUT) for value in piece.results]
        if self._hints is not None:
            module.operation.attributes[BWD_SIZES] = self._hints
        func = build_function(end, self._read, FunctionSketch(self._name, arguments, piece.ops, results))
        end.erase()
        return module, func

    def operands(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """For each of the values named the names of those that its op computes it from."""
        values = self._read.graph.values
        makers = {v.name: v.producer for v in values if v.producer is not None}
        return {n: tuple(values[o].name for o in self.graph.operands(makers[n])) for n in names if n in makers}

    def find(self, is_faulty: Callable[[ModuleSlice], bool]) -> FoundOp | None:
        """The first op at fault and the smallest slice around it that still is; ``None`` where the whole is not."""
        steps = self.graph.steps
        if not steps or not is_faulty(self.build(self.graph.cut(steps, self.graph.frontier(steps)))):
            return None
        fault = find_fault(self.graph, lambda piece: is_faulty(self.build(piece)))
        op = self._read.graph.ops[fault.step]
        value = next(v for v in op.results if v in self.graph.observable)
        location = str(self._read.ops[fault.step].location).removeprefix("loc(").removesuffix(")")
        return FoundOp(op.name, location, self._read.graph.values[value].name, self.build(fault.slice))

    def _port(self, value: int, role: str) -> Port:
        if value in self._sizes:
            return Port(value, self._sizes[value])
        name, shape = self._read.graph.values[value].name, self._shapes.text(self._read.values[value])
        return Port(value, {BWD_ROLE: role, BWD_NAME: name, BWD_VALUE: name, **({BWD_SHAPE: shape} if shape else {})})
