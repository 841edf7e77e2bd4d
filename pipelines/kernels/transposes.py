# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Transposes of many matrices with a short side, such as a convolution's filters or images of three colors.

iree-compile turns matrices around in tiles of 32 x 32, of which nine taps or three colors are a small part: filters of
512 x 512 x 3 x 3 took 45 us on an H100, where a copy of as much takes 5. What only rounds or widens the result is done
on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import ClassVar

from retrograd.dialects import ir
from retrograd.pipelines.kernels.dispatch import create_dispatch
from retrograd.pipelines.kernels.expressions import TYPES
from retrograd.pipelines.kernels.family import Compiled, Refusal
from retrograd.pipelines.kernels.kernel import Kernel
from retrograd.pipelines.kernels.matrices import find_buffer, is_aligned
from retrograd.pipelines.kernels.questions import MEASURED, Chosen, Launch, Question, Run, Trial, pick
from retrograd.pipelines.transforms.helpers.generics import is_elementwise, read_inputs, read_maps
from retrograd.pipelines.transforms.helpers.uses import only_user

TRANSPOSE = "linalg.transpose"
FEWEST = 1 << 14
"""Tensors of fewer elements stay with IREE."""

SHORTEST = 32
"""As do matrices with no side shorter than this."""

_MOST_MATRICES = 65535
_FLOATS = tuple(name for name in TYPES if not name.startswith("i"))
_CONVERSIONS = ("arith.truncf", "arith.extf")


@dataclass(frozen=True)
class TransposeTile:
    """A tile of elements that a number of warps take at a time."""

    elements: int
    warps: int

    def __str__(self) -> str:
        return f"{self.elements} {self.warps} warps"


TILES = tuple(TransposeTile(*sizes) for sizes in ((2048, 4), (1024, 2), (1024, 4), (2048, 8), (4096, 4), (4096, 8)))
"""The tiles of a transpose, first those that are taken unasked."""


@dataclass(frozen=True)
class Transposes:
    """The family: the last two axes, or groups of axes, change places; of fixed sizes."""

    architecture: str
    chosen: Chosen = field(default_factory=dict)

    name: ClassVar[str] = "transposes"

    def plan(self, op: ir.Operation) -> TransposePlan | Refusal | None:
        """A plan for a transpose with a short side; nothing for one that iree-compile has tiles for."""
        if op.name != TRANSPOSE:
            return None
        type_ = ir.RankedTensorType(op.operands[0].type)
        if not type_.has_static_shape or prod(type_.shape) < FEWEST:
            return None
        matrices = find_matrices(list(type_.shape), [*ir.DenseI64ArrayAttr(op.attributes["permutation"])])
        if matrices is None or min(matrices[1:]) >= SHORTEST or min(matrices[1:]) == 1:
            return None
        count, rows, columns = matrices
        what = f"transposes of {count} x {rows} x {columns}"
        if count > _MOST_MATRICES:
            return Refusal(what, f"more than {_MOST_MATRICES} matrices")
        end = _find_conversion(op) or op
        elements = [str(ir.RankedTensorType(value.type).element_type) for value in (op.operands[0], end.results[0])]
        if not set(elements) <= set(_FLOATS):
            return Refusal(what, f"it is of {elements[0]}")
        plan = TransposePlan(op, end, what, matrices, (elements[0], elements[1]))
        tile = pick(plan.question, TILES, self.chosen)
        return replace(plan, tile=tile, is_measured=plan.question in self.chosen)


def find_matrices(shape: Sequence[int], order: Sequence[int]) -> tuple[int, int, int] | None:
    """How many matrices of which sizes a permutation turns around; ``None`` where it does something else."""
    axes = [axis for axis in order if shape[axis] != 1]
    groups: list[list[int]] = []
    known = sorted(axes)
    for axis in axes:
        if groups and known.index(axis) == known.index(groups[-1][-1]) + 1:
            groups[-1].append(axis)
        else:
            groups.append([axis])
    sizes = [prod(shape[axis] for axis in group) for group in groups]
    firsts = [group[0] for group in groups]
    if len(groups) == 2:
        return 1, sizes[1], sizes[0]
    is_turned = len(groups) == 3 and firsts[0] < firsts[2] < firsts[1]
    return (sizes[0], sizes[2], sizes[1]) if is_turned else None


def _find_conversion(op: ir.Operation) -> ir.Operation | None:
    """The op that alone reads a transpose, if all that it does is to round or to widen it."""
    user = only_user(op.results[0])
    if user is None or not is_elementwise(user) or len(read_inputs(user)) != 1:
        return None
    maps = read_maps(user)
    body = [view.operation for view in user.regions[0].blocks[0].operations]
    if maps[0] != maps[-1] or len(body) != 2 or body[0].name not in _CONVERSIONS:
        return None
    return user if body[1].operands[0] == body[0].results[0] else None


@dataclass(frozen=True)
class TransposePlan:
    """A transpose as a dispatch, with the conversion ``end`` of what it gives, or ``end`` is the transpose."""

    op: ir.Operation
    end: ir.Operation
    what: str
    matrices: tuple[int, int, int]
    elements: tuple[str, str]
    tile: TransposeTile = TILES[0]
    is_measured: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self._kernel().label}" + MEASURED * self.is_measured

    @property
    def question(self) -> str:
        """The text that tiles are asked for by."""
        count, rows, columns = self.matrices
        return f"transposes {count} of {rows}x{columns} {self.elements[0]} to {self.elements[1]}"

    def questions(self) -> list[Question]:
        """The tiles of the kernel."""
        inputs, given = (find_buffer(self.op.operands[0]),), (find_buffer(self.end.results[0]),)
        launches = {str(tile): replace(self, tile=tile).launch() for tile in TILES}
        return [Question(self.question, {t: Trial(inputs, (Run(n, (0,), given),)) for t, n in launches.items()})]

    def kernels(self) -> dict[Kernel, bool]:
        """The kernel."""
        return {self._kernel(): False}

    def launch(self) -> Launch:
        """The kernel for these sizes."""
        count, rows, columns = self.matrices
        high, wide = self._sides()
        return Launch(self._kernel(), (-(-rows // high) * -(-columns // wide), count, 1), (rows, columns))

    def apply(self, compiled: Compiled) -> None:
        """Put the dispatch in the place of the transpose."""
        launch, result = self.launch(), self.end.results[0]
        value = create_dispatch(launch, compiled[launch.kernel], [self.op.operands[0]], result.type, self.end)
        result.replace_all_uses_with(value)
        if self.end != self.op:
            self.end.erase()
        self.op.erase()

    def _sides(self) -> tuple[int, int]:
        """Rows and columns of a tile, powers of two: all of the short side."""
        _, rows, columns = self.matrices
        short = 1 << (min(rows, columns) - 1).bit_length()
        long = max(1, self.tile.elements // short)
        return (short, long) if rows < columns else (long, short)

    def _kernel(self) -> Kernel:
        _, rows, columns = self.matrices
        high, wide = self._sides()
        even = [name for name, size in (("rows", rows), ("columns", columns)) if size % 16 == 0]
        aligned = [
            name for name, value in (("x", self.op.operands[0]), ("y", self.end.results[0])) if is_aligned(value)
        ]
        names = [
            "transpose",
            *self.elements,
            f"{high}x{wide}x{self.tile.warps}",
            *even,
            *(f"{name}16" for name in aligned),
        ]
        return Kernel(
            label="_".join(names),
            source="transposes",
            function="transpose",
            pointers=(("x", self.elements[0]), ("y", self.elements[1])),
            numbers=("rows", "columns"),
            aligned=(*aligned, *even),
            constants=(("BR", high), ("BC", wide)),
            warps=self.tile.warps,
            stages=1,
        )
