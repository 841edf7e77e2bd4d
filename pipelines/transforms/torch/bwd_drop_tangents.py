# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-drop-tangents``: the backward of a loss that leaves out some of the outputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import field

from retrograd.contract.attributes import BWD_NAME, BWD_ROLE
from retrograd.contract.roles import BACKWARD, FORWARD, SIZE, TANGENT
from retrograd.contract.sizes import Size, parse_shape
from retrograd.dialects import ir
from retrograd.pipelines.analysis.layout.tensor_types import element_type, tensor_shape
from retrograd.pipelines.analysis.partition.absent_tangents import ADDITIONS, AbsentValues, find_absent_values
from retrograd.pipelines.analysis.partition.read_graph import (
    ReadGraph,
    ShapeReader,
    attribute_dicts,
    function_type,
    read_joint,
    set_function_type,
    text_attributes,
)
from retrograd.pipelines.infra.functions import find_function, only_block
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.helpers.maker import Maker
from retrograd.pipelines.transforms.helpers.narrowing import TorchBuilder, tensor

_PURE = ("bwd.recompute_barrier", "bwd.create_token")
_INTEGER, _INTEGERS = "!torch.int", "!torch.list<int>"
_FLOATS = ("f16", "bf16", "f32", "f64")
_ARITHMETIC = {
    "+": "aten.add.int",
    "-": "aten.sub.int",
    "*": "aten.mul.int",
    "//": "aten.floordiv.int",
    "%": "aten.remainder.int",
    "min": "prim.min.int",
    "max": "prim.max.int",
}


class BwdDropTangents(ModulePass):
    """Takes tangents out of ``@backward``, and with them all that eager would not run without them.

    What is computed from absent tangents alone is gone, sums lose a term, and other ops that take something absent
    beside something that is there take zeros (``analysis/partition/absent_tangents.py``). Gradients that are gone are
    no results any more; arguments that nothing uses any more are taken no longer. A size that zeros have becomes one.

    Hooks that Python calls are refused: this is for a backward that was compiled ahead of time, into which hooks were
    traced. Those on gradients that are gone are then gone with them, as eager calls none for an undefined gradient.
    """

    description = "Compute @backward without some of its tangents, which are undefined, not zero"

    absent: str = field(
        default="", metadata={"help": "which of the tangents of @backward are absent, counted from 0: 0,2"}
    )

    def apply(self, module: ir.Operation) -> None:
        func = find_function(module, BACKWARD)
        if func is None:
            message = "bwd-drop-tangents: no function @backward in the module"
            raise PassFailure(module, message, "run bwd-partition first")
        only_block(func, self.name)
        _refuse_effects(func)
        absent = self._find_arguments(func)
        read = read_joint(func)
        plan = find_absent_values(read.graph, absent, find_carriers(read), find_sums(read, ShapeReader(func)))
        entries = _write_zeros(module, func, read, plan)
        # From the last to the first: a sum may be all that is left of another one.
        for op, operand in reversed(list(plan.kept.items())):
            read.ops[op].results[0].replace_all_uses_with(read.values[operand])
        _drop_results(func, {read.values[value] for value in plan.values})
        _drop_dead_ops(func)
        _drop_arguments(func, entries)

    def _find_arguments(self, func: ir.Operation) -> list[int]:
        """The arguments that the option is about."""
        roles = [a.get(BWD_ROLE) for a in attribute_dicts(func, "arg_attrs")]
        tangents = [number for number, role in enumerate(roles) if role == TANGENT]
        places = [text.strip() for text in self.absent.split(",") if text.strip()]
        for place in places:
            if not (place.isdecimal() and int(place) < len(tangents)):
                message = f"bwd-drop-tangents: no tangent number '{place}' among the {len(tangents)} of @backward"
                raise PassFailure(func, message, "count them from 0 in the order of its arguments, as in absent=0,2")
        return [tangents[int(place)] for place in places]


def find_carriers(read: ReadGraph) -> frozenset[int]:
    """The values that are tensors, or lists and tuples of them."""
    return frozenset(number for number, value in enumerate(read.values) if "tensor" in str(value.type))


def find_sums(read: ReadGraph, shapes: ShapeReader) -> frozenset[int]:
    """The additions that are plain sums: of operands of the result's type and shape, the second not multiplied."""
    found = set()
    for op in read.graph.ops:
        if op.name not in ADDITIONS:
            continue
        first, second, factor = read.ops[op.id].operands
        kinds = {(value.type, shapes.text(value)) for value in (first, second, *read.ops[op.id].results)}
        if len(kinds) == 1 and _is_one(factor):
            found.add(op.id)
    return frozenset(found)


def _is_one(value: ir.Value) -> bool:
    if not isinstance(value, ir.OpResult) or value.owner.name not in ("torch.constant.int", "torch.constant.float"):
        return False
    return bool(value.owner.attributes["value"].value == 1)


def _refuse_effects(func: ir.Operation) -> None:
    for view in func.regions[0].blocks[0].operations:
        if view.operation.name.startswith("bwd.") and view.operation.name not in _PURE:
            remedy = "a backward with hooks is captured as it runs, where no tangent is absent"
            raise PassFailure(view.operation, "bwd-drop-tangents: calls Python in @backward", remedy)


def _write_zeros(module: ir.Operation, func: ir.Operation, read: ReadGraph, plan: AbsentValues) -> list[dict[str, str]]:
    """Put zeros where ``plan`` asks for them; returns the attributes of the arguments, which are more now if the zeros
    have sizes that ``@backward`` did not take."""
    entries = attribute_dicts(func, "arg_attrs")
    sizes = _Sizes(module, func, entries)
    shapes = ShapeReader(func)
    for number, place in plan.zeros:
        op = read.ops[number]
        op.operands[place] = _zeros_like(op.operands[place], shapes.text(op.operands[place]), op, sizes)
    return entries


def _zeros_like(value: ir.Value, text: str, op: ir.Operation, sizes: _Sizes) -> ir.Value:
    """Zeros of the type of ``value``, whose open shape is ``text``, in front of ``op``: one zero, expanded."""
    declared = tensor_shape(value.type)
    shape: Sequence[Size | None] = parse_shape(text) if None in (declared or ()) else declared or ()
    if declared is None or element_type(value.type) not in _FLOATS or len(shape) != len(declared):
        message = f"bwd-drop-tangents: takes an absent {value.type}, for which no zeros can be made"
        raise PassFailure(op, message, "pass zeros for the tangent that it comes from")
    element, build = element_type(value.type), TorchBuilder(Maker.before(op), text)
    literal = {"value": ir.Attribute.parse(f"dense<0.0> : tensor<{element}>")}
    zero = build.make.value("torch.vtensor.literal", [], tensor((), element), literal)
    numbers = [sizes.build(build, size, op) for size in shape if size is not None]
    listed = build.op("prim.ListConstruct", numbers, ir.Type.parse(_INTEGERS))
    return build.op("aten.expand", [zero, listed, build.flag(False)], value.type)


class _Sizes:
    """The open sizes that ``@backward`` takes, by name, and those that it comes to take."""

    def __init__(self, module: ir.Operation, func: ir.Operation, entries: list[dict[str, str]]) -> None:
        forward = find_function(module, FORWARD)
        self._known = [] if forward is None else attribute_dicts(forward, "arg_attrs")
        self._func, self._entries = func, entries
        arguments = func.regions[0].blocks[0].arguments
        self._taken = {e[BWD_NAME]: a for e, a in zip(entries, arguments, strict=True) if e.get(BWD_ROLE) == SIZE}

    def build(self, build: TorchBuilder, size: Size, op: ir.Operation) -> ir.Value:
        """The number that ``size`` is, in front of ``op``."""
        if isinstance(size, int):
            return build.integer(size)
        if isinstance(size, str):
            return self._taken[size] if size in self._taken else self._take(size, op)
        head, left, right = size
        operands = [self.build(build, left, op), self.build(build, right, op)]
        return build.op(_ARITHMETIC[head], operands, ir.Type.parse(_INTEGER))

    def _take(self, name: str, op: ir.Operation) -> ir.Value:
        """Take one more argument: a size that ``@forward`` takes."""
        entry = next((e for e in self._known if e.get(BWD_ROLE) == SIZE and e.get(BWD_NAME) == name), None)
        if entry is None:
            message = f"bwd-drop-tangents: takes zeros of the size '{name}', which no function takes"
            raise PassFailure(op, message, "pass zeros for the tangent that it comes from")
        self._entries.append(entry)
        block = self._func.regions[0].blocks[0]
        self._taken[name] = block.add_argument(ir.Type.parse(_INTEGER), self._func.location)
        return self._taken[name]


def _drop_results(func: ir.Operation, absent: Collection[ir.Value]) -> None:
    """Return what is there alone."""
    old = list(func.regions[0].blocks[0].operations)[-1].operation
    there = [number for number, value in enumerate(old.operands) if value not in absent]
    values = [old.operands[number] for number in there]
    entries = attribute_dicts(func, "res_attrs")
    func.attributes["res_attrs"] = text_attributes([entries[number] for number in there])
    set_function_type(func, function_type(func).inputs, [value.type for value in values])
    Maker.before(old).op("func.return", values)
    old.erase()


def _drop_dead_ops(func: ir.Operation) -> None:
    """Erase ops whose results nobody uses; those without results stay."""
    for op in reversed([view.operation for view in func.regions[0].blocks[0].operations]):
        if len(op.results) and not any(list(result.uses) for result in op.results):
            op.erase()


def _drop_arguments(func: ir.Operation, entries: Sequence[dict[str, str]]) -> None:
    """Take no argument that nothing uses."""
    block = func.regions[0].blocks[0]
    used = [bool(list(argument.uses)) for argument in block.arguments]
    for number in reversed(range(len(used))):
        if not used[number]:
            block.erase_argument(number)
    func.attributes["arg_attrs"] = text_attributes([entry for entry, keep in zip(entries, used, strict=True) if keep])
    set_function_type(func, [argument.type for argument in block.arguments], function_type(func).results)
