# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-narrow-saved``: values are saved in the narrower types that the user asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from retrograd.dialects import ir
from retrograd.pipelines.analysis.narrow_types import FORMATS, part_names
from retrograd.pipelines.analysis.read_graph import (
    STORED,
    attribute_dicts,
    fixed_shape,
    function_type,
    stored_bytes,
    tensor_shape,
)
from retrograd.pipelines.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.bwd_partition import find_function
from retrograd.pipelines.transforms.narrowing import TorchBuilder, pack, unpack

NARROWED = "bwd.narrowed"


@dataclass(frozen=True)
class BwdNarrowSaved(ModulePass):
    """Replaces each ``bwd.save`` of a value whose op has ``bwd.saved_dtype`` by saves of what it is packed to.

    ``@forward`` packs a value after its last use, ``@backward`` unpacks it in front of its first, as torch ops that
    fuse with their neighbours. Values that are returned as outputs stay as they are, since the caller has them, and so
    do those that would take no fewer bytes. The names of the others are kept on the module, as
    ``bwd.narrowed = {tanh = "bf16"}``, to be packed on the captured graph as well.
    """

    name: ClassVar[str] = "bwd-narrow-saved"
    description: ClassVar[str] = "Pack saved values into narrower types in @forward, unpack them in @backward"

    def apply(self, module: ir.Operation) -> None:
        forward, backward = (find_function(module, name) for name in ("forward", "backward"))
        if forward is None or backward is None:
            message = "bwd-narrow-saved: no functions @forward and @backward in the module"
            raise PassFailure(module, message, "run bwd-partition first")
        narrowed: dict[str, str] = {}
        parts: dict[str, list[ir.Type]] = {}
        order = _order(forward)
        for save in order:
            if save.name != "bwd.save" or (format := find_format(save.operands[0])) is None:
                continue
            name = ir.StringAttr(save.attributes["name"]).value
            narrowed[name] = format
            parts[name] = pack_save(save, name, format, order)
        if narrowed:
            unpack_arguments(backward, narrowed, parts)
            module.attributes[NARROWED] = ir.DictAttr.get({k: ir.StringAttr.get(v) for k, v in narrowed.items()})


def read_narrowed(module: ir.Operation) -> dict[str, str]:
    """What ``bwd-narrow-saved`` narrowed in a module: the type by the name of the value."""
    if NARROWED not in module.attributes:
        return {}
    return {a.name: ir.StringAttr(a.attr).value for a in ir.DictAttr(module.attributes[NARROWED])}


def find_format(value: ir.Value) -> str | None:
    """The type to save a value in; ``None`` if it is saved as it is.

    Raises:
        PassFailure: the attribute is no such type, or the value has open sizes.
    """
    if not isinstance(value, ir.OpResult) or STORED not in value.owner.attributes:
        return None
    format = ir.StringAttr(value.owner.attributes[STORED]).value
    if format not in FORMATS:
        message = f"bwd-narrow-saved: {STORED} is {value.owner.attributes[STORED]}"
        raise PassFailure(value.owner, message, f"it is one of {', '.join(FORMATS)}")
    shape = fixed_shape(value.type)
    if shape is None and tensor_shape(value.type) is not None:
        message = f"bwd-narrow-saved: the size of a value of type {value.type} differs from call to call"
        raise PassFailure(value.owner, message, "narrow values of fixed sizes only, or compile without dynamic_shapes")
    return None if stored_bytes(value.owner, value.type, shape) is None else format


def pack_save(save: ir.Operation, name: str, format: str, order: dict[ir.Operation, int]) -> list[ir.Type]:
    """Pack what is saved after its last use, and save the parts in its place; returns their types."""
    value = save.operands[0]
    users = [use.owner.operation for use in value.uses]
    last = max(order[op] for op in (value.owner, *users) if op.name not in ("bwd.save", "func.return"))
    following = list(order)[last + 1]
    # Of the saves at the end some are gone by now.
    at = save if following.name == "bwd.save" else following
    packed = pack(TorchBuilder(ir.InsertionPoint(at), value.owner.location), value, format)
    for part, part_name in zip(packed, part_names(name, format), strict=True):
        attributes = {"name": ir.StringAttr.get(part_name)}
        ip = ir.InsertionPoint(save)
        ir.Operation.create("bwd.save", operands=[part], attributes=attributes, loc=save.location, ip=ip)
    save.erase()
    return [part.type for part in packed]


def unpack_arguments(func: ir.Operation, narrowed: dict[str, str], parts: dict[str, list[ir.Type]]) -> None:
    """Give ``@backward`` the parts in place of the values, which it unpacks in front of their first use."""
    block, order = func.regions[0].blocks[0], _order(func)
    old, entries = list(block.arguments), attribute_dicts(func, "arg_attrs")
    attributes: list[dict[str, str]] = []
    for argument, entry in zip(old, entries, strict=True):
        name = entry.get("bwd.value", "")
        if entry.get("bwd.role") != "saved" or name not in narrowed:
            argument.replace_all_uses_with(block.add_argument(argument.type, func.location))
            attributes.append(entry)
            continue
        names = part_names(name, narrowed[name])
        given = [block.add_argument(type_, func.location) for type_ in parts[name]]
        attributes += [{**entry, "bwd.name": f"saved.{n}", "bwd.value": n} for n in names]
        first = min((use.owner.operation for use in argument.uses), key=lambda op: order[op])
        builder = TorchBuilder(ir.InsertionPoint(first), first.location)
        argument.replace_all_uses_with(unpack(builder, given, argument.type, narrowed[name]))
    for number in reversed(range(len(old))):
        block.erase_argument(number)
    _set_arguments(func, [a.type for a in block.arguments], attributes)


def _order(func: ir.Operation) -> dict[ir.Operation, int]:
    """The ops of a function, and the place of each."""
    return {view.operation: place for place, view in enumerate(func.regions[0].blocks[0].operations)}


def _set_arguments(func: ir.Operation, types: Sequence[ir.Type], attributes: Sequence[dict[str, str]]) -> None:
    func.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, function_type(func).results))
    func.attributes["arg_attrs"] = ir.ArrayAttr.get(
        [ir.DictAttr.get({k: ir.StringAttr.get(v) for k, v in entry.items()}) for entry in attributes]
    )
