# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The operands and results of attention: how heads lie in memory, seen through transpositions, slices, split axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from retrograd.dialects import ir
from retrograd.pipelines.kernels.matrices import is_aligned
from retrograd.pipelines.transforms.helpers.views import SLICE

_TRANSPOSE, _EXPAND = "linalg.transpose", "tensor.expand_shape"
_PLAIN = (0, 1, 2, 3)
# Numbers of kernels have 32 bits.
_MOST = (1 << 31) - 1


@dataclass(frozen=True)
class Heads:
    """Heads that a kernel reads, of ``shape`` batch x heads x rows x width: ``strides`` are elements of ``value``
    between batches, heads and rows, the first of which is number ``start``."""

    value: ir.Value
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0

    @property
    def is_aligned(self) -> bool:
        """Whether all rows surely begin at a multiple of 16 elements, and the first at one of 16 bytes."""
        return is_aligned(self.value) and not any(number % 16 for number in (self.start, *self.strides))


@dataclass(frozen=True)
class Given:
    """Heads that a kernel gives, ``value`` being the result: its axes are to lie in memory in this ``order``."""

    value: ir.Value
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements between batches, heads and rows."""
        lying = [self.shape[axis] for axis in self.order]
        return tuple(math.prod(lying[self.order.index(axis) + 1 :]) for axis in range(3))

    @property
    def type(self) -> ir.Type:
        """The type of what a kernel gives."""
        element, lying = ir.RankedTensorType(self.value.type).element_type, [self.shape[axis] for axis in self.order]
        return ir.RankedTensorType.get(lying, element, loc=self.value.owner.location)

    @property
    def is_aligned(self) -> bool:
        """Whether all rows surely begin at a multiple of 16 elements, and the first at one of 16 bytes, as in
        :class:`Heads`."""
        turned = [self.value] if self.order == _PLAIN else [use.owner.results[0] for use in self.value.uses]
        return all(map(is_aligned, turned)) and not any(stride % 16 for stride in self.strides)

    def replace_by(self, value: ir.Value) -> None:
        """Have all that reads the result read ``value``, which lies in its order."""
        if self.order == _PLAIN:
            self.value.replace_all_uses_with(value)
            return
        for transpose in [use.owner for use in self.value.uses]:
            transpose.results[0].replace_all_uses_with(value)
            transpose.operation.erase()


@dataclass(frozen=True)
class _View:
    """A tensor within another one: elements of that between those along each axis, and the number of the first."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0


def find_heads(value: ir.Value) -> Heads:
    """Find what ``value`` is a view of, with rows in one piece; ``value`` itself where it is none."""
    passed: list[ir.Operation] = []
    while isinstance(value, ir.OpResult) and value.owner.name in _VIEWS:
        passed.append(value.owner)
        value = value.owner.operands[0]
    shape = tuple(ir.RankedTensorType(passed[0].results[0].type if passed else value.type).shape)
    while True:
        view: _View | None = _lie(value)
        for op in reversed(passed):
            view = view and _VIEWS[op.name](op, view)
        if view is not None and view.strides[3] == 1 and max(view.start, *view.strides) <= _MOST:
            return Heads(value, shape, view.strides[:3], view.start)
        value = passed.pop().results[0]


def find_given(result: ir.Value) -> Given:
    """A result as all that reads it transposes it to; where they do not, in the order of its own axes."""
    orders = {_read_order(use.owner) for use in result.uses}
    order = next(iter(orders)) if len(orders) == 1 else None
    return Given(result, tuple(ir.RankedTensorType(result.type).shape), order or _PLAIN)


def mask_strides(mask: ir.Value) -> tuple[int, ...]:
    """Elements between batches, heads, rows and columns of what is added to scores; 0 along axes that it is the same
    along."""
    shape = list(ir.RankedTensorType(mask.type).shape)
    own = [0 if size == 1 else math.prod(shape[axis + 1 :]) for axis, size in enumerate(shape)]
    return (*[0] * (4 - len(shape)), *own)


def _lie(value: ir.Value) -> _View:
    shape = tuple(ir.RankedTensorType(value.type).shape)
    return _View(shape, tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))))


def _read_order(op: ir.Operation) -> tuple[int, ...] | None:
    """The axes of its operand that those of its result are, of a transposition of heads that keeps the width last."""
    if op.name != _TRANSPOSE:
        return None
    order: Sequence[int] = [*ir.DenseI64ArrayAttr(op.attributes["permutation"])]
    return tuple(order) if len(order) == 4 and order[3] == 3 else None


def _transpose(op: ir.Operation, view: _View) -> _View:
    order = [*ir.DenseI64ArrayAttr(op.attributes["permutation"])]
    return _View(tuple(view.shape[i] for i in order), tuple(view.strides[i] for i in order), view.start)


def _expand(op: ir.Operation, view: _View) -> _View:
    shape = tuple(ir.RankedTensorType(op.results[0].type).shape)
    strides: list[int] = []
    for axis, group in enumerate(ir.ArrayAttr(op.attributes["reassociation"])):
        sizes = [shape[ir.IntegerAttr(number).value] for number in ir.ArrayAttr(group)]
        strides += [view.strides[axis] * math.prod(sizes[place + 1 :]) for place in range(len(sizes))]
    return replace(view, shape=shape, strides=tuple(strides))


def _slice(op: ir.Operation, view: _View) -> _View | None:
    """The view of a slice whose place is fixed; axes of size 1 that it leaves out are left out."""
    offsets, sizes, steps = (
        [*ir.DenseI64ArrayAttr(op.attributes[f"static_{name}"])] for name in ("offsets", "sizes", "strides")
    )
    if len(op.operands) > 1:
        return None
    start = view.start + sum(offset * stride for offset, stride in zip(offsets, view.strides, strict=True))
    wanted, strides = list(ir.RankedTensorType(op.results[0].type).shape), list[int]()
    for size, stride, step in zip(sizes, view.strides, steps, strict=True):
        if len(strides) < len(wanted) and size == wanted[len(strides)]:
            strides.append(stride * step)
    return _View(tuple(wanted), tuple(strides), start) if len(strides) == len(wanted) else None


_VIEWS: dict[str, Callable[[ir.Operation, _View], _View | None]] = {
    _TRANSPOSE: _transpose,
    _EXPAND: _expand,
    SLICE: _slice,
}
