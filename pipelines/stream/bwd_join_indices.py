# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-join-indices``: what takes a loop's index apart by divisions and puts it together again is the index.

Where IREE makes one loop of several, a body that numbers its elements (a random number's place in its stream) gets each
loop's index by division, and multiplies them up again: for each element on all devices. On CUDA it may not compile at
all: of an index in steps of two, LLVM makes a product of pairs of 16 bits, which NVPTX has no instruction for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from iree.compiler import ir

from retrograd.pipelines.stream.passes import PassFailure, constant_of

NAME = "bwd-join-indices"
_INDEX, _CAST, _ADD, _MULTIPLY = "linalg.index", "arith.index_cast", "arith.addi", "arith.muli"
# Of places, which are never negative, signed and unsigned ones are the same.
_DIVIDE, _REMAIN = ("arith.divsi", "arith.divui"), ("arith.remsi", "arith.remui")
_WIDTH = 1 << 32


@dataclass
class _Sum:
    """A number of 32 bits, of those that overflow: places with a factor each, and a constant."""

    places: dict[Any, int]
    constant: int

    def add(self, other: _Sum, factor: int = 1) -> _Sum:
        """This and ``factor`` times ``other``."""
        places = dict(self.places)
        for place, own in other.places.items():
            places[place] = (places.get(place, 0) + factor * own) % _WIDTH
        return _Sum(places, (self.constant + factor * other.constant) % _WIDTH)


def apply(module: Any) -> None:
    """Rewrite the kernels of a ``builtin.module`` in place.

    Raises:
        PassFailure: a place is divided by 0.
    """
    for body in _bodies(module):
        operations = [op.operation for op in body.operations]
        if not any(op.name in _REMAIN for op in operations):
            continue
        for op in reversed(operations):
            if op.name == _ADD and any(True for _ in op.results[0].uses):
                _join(op)


def _bodies(op: Any) -> Iterator[Any]:
    """The blocks within ``op`` in which elements are computed."""
    for region in op.regions:
        for block in region.blocks:
            if op.name == "linalg.generic":
                yield block
            else:
                for inner in block.operations:
                    yield from _bodies(inner.operation)


def _join(root: Any) -> None:
    """Put a sum of 32 bits together of fewer places, where that is possible."""
    if str(root.results[0].type) != "i32":
        return
    read = _read(root.results[0])
    joined = None if read is None else _reduce(read)
    if read is None or joined is None or len(joined.places) != 1:
        return
    ((place, factor),) = joined.places.items()
    with ir.InsertionPoint(root), root.location:
        value = _create(_CAST, [place], root.results[0].type)
        if factor != 1:
            value = _create(_MULTIPLY, [value, _number(factor)], value.type)
        if joined.constant:
            value = _create(_ADD, [value, _number(joined.constant)], value.type)
    root.results[0].replace_all_uses_with(value)


def _read(value: Any) -> _Sum | None:
    """The sum that a number of 32 bits is; None of others."""
    owner = _owner(value)
    if owner is None:
        return None
    if owner.name == "arith.constant":
        return _Sum({}, (constant_of(value) or 0) % _WIDTH)
    if owner.name == _CAST:
        return _Sum({owner.operands[0]: 1}, 0) if _is_place(owner.operands[0]) else None
    if owner.name not in (_ADD, _MULTIPLY):
        return None
    first, second = (_read(operand) for operand in owner.operands)
    if first is None or second is None:
        return None
    if owner.name == _ADD:
        return first.add(second)
    if second.places:
        first, second = second, first
    return None if second.places else _Sum({}, 0).add(first, second.constant)


def _reduce(read: _Sum) -> _Sum | None:
    """``read`` with quotients and remainders of the same division put together; None where there are none."""
    joined = _reduce_once(read)
    while joined is not None and (further := _reduce_once(joined)) is not None:
        joined = further
    return joined


def _reduce_once(read: _Sum) -> _Sum | None:
    for quotient, factor in read.places.items():
        divided = _division(quotient, _DIVIDE)
        if divided is None:
            continue
        source, by = divided
        for rest, own in read.places.items():
            if _division(rest, _REMAIN) == divided and factor == own * by % _WIDTH:
                others = {place: f for place, f in read.places.items() if place not in (quotient, rest)}
                return _Sum(others, read.constant).add(_Sum({source: own}, 0))
    return None


def _division(place: Any, names: tuple[str, ...]) -> tuple[Any, int] | None:
    """Return what is divided where a place is part of it by a division, and the constant by which."""
    owner = _owner(place)
    if owner is None or owner.name not in names:
        return None
    by = constant_of(owner.operands[1])
    if by == 0:
        raise PassFailure(NAME, owner, "a place is divided by 0", "give each loop a size")
    return None if by is None or by < 0 else (owner.operands[0], by)


def _is_place(value: Any) -> bool:
    """Whether a value is a loop's index or, by divisions, a part of one: it is not negative."""
    owner = _owner(value)
    if owner is None:
        return False
    divided = _division(value, (*_DIVIDE, *_REMAIN))
    return owner.name == _INDEX or (divided is not None and _is_place(divided[0]))


def _owner(value: Any) -> Any:
    """The op that gives a value; None of a block's arguments."""
    return None if isinstance(value.owner, ir.Block) else value.owner


def _number(value: int) -> Any:
    type_ = ir.IntegerType.get_signless(32)
    signed = (value + _WIDTH // 2) % _WIDTH - _WIDTH // 2
    attribute = ir.IntegerAttr.get(type_, signed)
    return ir.Operation.create("arith.constant", results=[type_], attributes={"value": attribute}).results[0]


def _create(name: str, operands: list[Any], type_: Any) -> Any:
    return ir.Operation.create(name, operands=operands, results=[type_]).results[0]
