# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-narrow-saved``: values are saved in the narrower types that the user asked for, or as hooks pack them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from retrograd.contract.attributes import BWD_INLINE, BWD_NAME, BWD_PACKED_AS, BWD_ROLE, BWD_SHAPE, BWD_VALUE
from retrograd.contract.formats import FORMATS, part_names
from retrograd.contract.roles import BACKWARD, FORWARD, SAVED, name_in_role
from retrograd.dialects import ir
from retrograd.pipelines.analysis.layout.tensor_types import tensor_shape
from retrograd.pipelines.analysis.partition.read_graph import (
    ShapeReader,
    attribute_dicts,
    function_type,
    set_function_type,
    text_attributes,
)
from retrograd.pipelines.analysis.partition.value_numbering import KEPT_ON_HOST, STORED, packed_as, stored_format
from retrograd.pipelines.infra.functions import find_function, functions
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.helpers.maker import Maker
from retrograd.pipelines.transforms.helpers.narrowing import TorchBuilder, pack, unpack
from retrograd.pipelines.transforms.torch.bwd_inline_hooks import check_body, copy_body

NARROWED = "bwd.narrowed"
# A part of a value: its name and type.
Part: TypeAlias = tuple[str, ir.Type]


class BwdNarrowSaved(ModulePass):
    """Replaces each ``bwd.save`` of a value whose op has ``bwd.saved_dtype`` by saves of what it is packed to.

    ``@forward`` packs a value after its last use, ``@backward`` unpacks it in front of its first, as torch ops that
    fuse with their neighbours. Values that are returned as outputs stay as they are, since the caller has them, and so
    do those that would take no fewer bytes. The names of the others are kept on the module, as
    ``bwd.narrowed = {tanh = "bf16"}``, to be packed on the captured graph as well.

    Where an op has ``bwd.packed_as = ["pack_0"]``, the body of ``@pack_0`` packs its result and that of ``@unpack_0``
    unpacks it, whatever the bytes: the user's hooks. The functions are gone afterwards.
    """

    description = "Pack saved values into narrower types in @forward, unpack them in @backward"

    def apply(self, module: ir.Operation) -> None:
        forward, backward = (find_function(module, name) for name in (FORWARD, BACKWARD))
        if forward is None or backward is None:
            message = "bwd-narrow-saved: no functions @forward and @backward in the module"
            raise PassFailure(module, message, "run bwd-partition first")
        packers: dict[str, Packer] = {}
        parts: dict[str, list[Part]] = {}
        ops, shapes = _ops(forward), ShapeReader(forward)
        last = find_last_places(ops)
        for save in ops:
            if save.name != "bwd.save" or (packer := find_packer(module, save.operands[0], shapes)) is None:
                continue
            name = ir.StringAttr(save.attributes["name"]).value
            packers[name] = packer
            following = ops[last[save.operands[0]] + 1]
            parts[name] = pack_save(save, name, packer, following, shapes.text(save.operands[0]))
        for save in [op for op in ops if op.name == "bwd.save"]:
            if ir.StringAttr(save.attributes["name"]).value in packers:
                save.erase()
        if packers:
            unpack_arguments(backward, packers, parts)
            names = {value: ir.StringAttr.get(packer.name) for value, packer in packers.items()}
            module.attributes[NARROWED] = ir.DictAttr.get(names)
        for body in [func for func in functions(module) if BWD_INLINE in func.attributes]:
            body.erase()
        # Known by their numbers, the hooks would make the same program another text.
        for op in [view.operation for func in (forward, backward) for view in func.regions[0].blocks[0].operations]:
            if BWD_PACKED_AS in op.attributes:
                del op.attributes[BWD_PACKED_AS]


class Packer(Protocol):
    """Makes what is saved of a value, in @forward, and the value of that, in @backward."""

    @property
    def name(self) -> str:
        """The name of the function on the module."""

    def pack(self, build: TorchBuilder, value: ir.Value, name: str) -> dict[str, ir.Value]:
        """The parts of the value called ``name``, by their own names."""

    def unpack(self, build: TorchBuilder, parts: Sequence[ir.Value], type_: ir.Type) -> ir.Value:
        """The value of a type."""


@dataclass(frozen=True)
class NarrowPacker:
    """Packs to one of the narrower types."""

    name: str

    def pack(self, build: TorchBuilder, value: ir.Value, name: str) -> dict[str, ir.Value]:
        return dict(zip(part_names(name, self.name), pack(build, value, self.name), strict=True))

    def unpack(self, build: TorchBuilder, parts: Sequence[ir.Value], type_: ir.Type) -> ir.Value:
        return unpack(build, parts, type_, self.name)


@dataclass(frozen=True)
class HookPacker:
    """Packs as the user's hooks do, whose bodies are functions of the module."""

    name: str
    packing: ir.Operation
    unpacking: ir.Operation

    def pack(self, build: TorchBuilder, value: ir.Value, name: str) -> dict[str, ir.Value]:
        parts = copy_body(self.packing, [value], build.make.ip, f"{name}_packed")
        return {f"{name}_packed_{number}": part for number, part in enumerate(parts)}

    def unpack(self, build: TorchBuilder, parts: Sequence[ir.Value], type_: ir.Type) -> ir.Value:
        (whole,) = copy_body(self.unpacking, parts, build.make.ip, "unpacked")
        return whole


def read_narrowed(module: ir.Operation) -> dict[str, str]:
    """Read what ``bwd-narrow-saved`` narrowed in a module: by the name of the value the type, or the function that
    packs."""
    if NARROWED not in module.attributes:
        return {}
    return {a.name: ir.StringAttr(a.attr).value for a in ir.DictAttr(module.attributes[NARROWED])}


def find_packer(module: ir.Operation, value: ir.Value, shapes: ShapeReader) -> Packer | None:
    """Find how to pack a value that is saved, of a function that ``shapes`` reads; ``None`` if it is saved as it is.

    Raises:
        PassFailure: the attribute is no such type, there is no such function, or the value has open sizes where they
            have to be fixed.
    """
    if not isinstance(value, ir.OpResult) or not (STORED in value.owner.attributes or packed_as(value)):
        return None
    if STORED in value.owner.attributes:
        format = ir.StringAttr(value.owner.attributes[STORED]).value
        if format not in FORMATS:
            message = f"bwd-narrow-saved: {STORED} is {value.owner.attributes[STORED]}"
            raise PassFailure(value.owner, message, f"it is one of {', '.join(FORMATS)}")
    narrow = stored_format(value, shapes.read(value))
    if None in (tensor_shape(value.type) or ()) and (packed_as(value) if narrow is None else FORMATS[narrow].blocks):
        _refuse_open(value, narrow)
    if narrow is not None:
        return NarrowPacker(narrow)
    return _find_hooks(module, value) if packed_as(value) else None


def _refuse_open(value: ir.OpResult, narrow: str | None) -> None:
    """Raise for a value of open sizes that is to be packed by what is traced, or counted out, for one size."""
    packed = f"saved as {narrow}" if narrow is not None else "packed by hooks"
    fitting = ", ".join(name for name, format in FORMATS.items() if not format.blocks)
    message = f"bwd-narrow-saved: a value of type {value.type}, whose size differs from call to call, is {packed}"
    raise PassFailure(value.owner, message, f"save it as one of {fitting}, or compile without dynamic_shapes")


def _find_hooks(module: ir.Operation, value: ir.OpResult) -> HookPacker:
    name = packed_as(value)
    bodies = [find_function(module, f"{prefix}{name}") for prefix in ("", "un")]
    for prefix, body in zip(("", "un"), bodies, strict=True):
        if body is None:
            message = f"bwd-narrow-saved: {BWD_PACKED_AS} names @{name}, and there is no @{prefix}{name}"
            raise PassFailure(value.owner, message, "trace both hooks into functions of the module")
        check_body(body, "bwd-narrow-saved")
    packing, unpacking = (body for body in bodies if body is not None)
    taken, given = list(function_type(packing).inputs), list(function_type(unpacking).results)
    if (
        taken != [value.type]
        or given != [value.type]
        or function_type(packing).results != function_type(unpacking).inputs
    ):
        message = f"bwd-narrow-saved: @{name} and @un{name} do not pack and unpack a {value.type}"
        raise PassFailure(value.owner, message, "trace the hooks on what they are called with")
    return HookPacker(name, packing, unpacking)


def pack_save(save: ir.Operation, name: str, packer: Packer, following: ir.Operation, shape: str) -> list[Part]:
    """Pack what is saved, of a ``shape`` that is written down, in front of the op ``following`` its last use, and save
    the parts in front of it; returns their names and types."""
    value = save.operands[0]
    at = save if following.name == "bwd.save" else following
    packed = packer.pack(TorchBuilder(Maker(ir.InsertionPoint(at), value.owner.location), shape), value, name)
    for part_name, part in packed.items():
        if KEPT_ON_HOST in value.owner.attributes and isinstance(part, ir.OpResult):
            part.owner.attributes[KEPT_ON_HOST] = value.owner.attributes[KEPT_ON_HOST]
        Maker.before(save).op("bwd.save", [part], attributes={"name": ir.StringAttr.get(part_name)})
    return [(part_name, part.type) for part_name, part in packed.items()]


def unpack_arguments(func: ir.Operation, packers: dict[str, Packer], parts: dict[str, list[Part]]) -> None:
    """Give ``@backward`` the parts in place of the values, which it unpacks in front of their first use."""
    block, ops = func.regions[0].blocks[0], _ops(func)
    old, entries = list(block.arguments), attribute_dicts(func, "arg_attrs")
    firsts = find_first_uses(ops)
    attributes: list[dict[str, str]] = []
    for argument, entry in zip(old, entries, strict=True):
        name = entry.get(BWD_VALUE, "")
        if entry.get(BWD_ROLE) != SAVED or name not in packers:
            argument.replace_all_uses_with(block.add_argument(argument.type, func.location))
            attributes.append(entry)
            continue
        given = [block.add_argument(type_, func.location) for _, type_ in parts[name]]
        attributes += [_part_attributes(entry, *part) for part in parts[name]]
        first = ops[firsts.get(argument, len(ops) - 1)]
        builder = TorchBuilder(Maker.before(first), entry.get(BWD_SHAPE, ""))
        argument.replace_all_uses_with(packers[name].unpack(builder, given, argument.type))
    for number in reversed(range(len(old))):
        block.erase_argument(number)
    _set_arguments(func, [a.type for a in block.arguments], attributes)


def _part_attributes(entry: dict[str, str], name: str, type_: ir.Type) -> dict[str, str]:
    """Derive the attributes of an argument that is a part of the one that had ``entry``."""
    shape = {} if None in (tensor_shape(type_) or ()) else {BWD_SHAPE: ""}
    named = {**entry, **shape, BWD_NAME: name_in_role(SAVED, name), BWD_VALUE: name}
    return {key: text for key, text in named.items() if text}


def _ops(func: ir.Operation) -> list[ir.Operation]:
    return [view.operation for view in func.regions[0].blocks[0].operations]


# By values, not by ops: operands are part of an op's hash, which changes with them.
def find_last_places(ops: Sequence[ir.Operation]) -> dict[ir.Value, int]:
    """For each value the place of the op that is the last to give or to use it, other than to save or return it."""
    last: dict[ir.Value, int] = {}
    for place, op in enumerate(ops):
        last |= dict.fromkeys(op.results, place)
        if op.name not in ("bwd.save", "func.return"):
            last |= dict.fromkeys(op.operands, place)
    return last


def find_first_uses(ops: Sequence[ir.Operation]) -> dict[ir.Value, int]:
    """For each value that ``ops`` take the place of the first that does."""
    first: dict[ir.Value, int] = {}
    for place, op in enumerate(ops):
        for operand in op.operands:
            first.setdefault(operand, place)
    return first


def _set_arguments(func: ir.Operation, types: Sequence[ir.Type], attributes: Sequence[dict[str, str]]) -> None:
    set_function_type(func, types, function_type(func).results)
    func.attributes["arg_attrs"] = text_attributes(attributes)
