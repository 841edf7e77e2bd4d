# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Convolutions of images with channels last, and their gradients, by kernels of our own: products whose operands are
read from where they are, without columns in memory and without padded copies.

The gradient of filters is a sum over all places of all images, which is computed in parts; these are added up by a
second kernel, in their order, so that two runs have the same bits.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import ClassVar

from retrograd.contract.convolution import Convolution, Tensor
from retrograd.contract.trials import Buffer
from retrograd.dialects import ir
from retrograd.pipelines.kernels.convolution_tiles import CONVOLVE, CORRELATE, SPREAD, ConvolutionTile, Work, list_tiles
from retrograd.pipelines.kernels.dispatch import create_dispatch
from retrograd.pipelines.kernels.family import Compiled
from retrograd.pipelines.kernels.kernel import Kernel
from retrograd.pipelines.kernels.matrices import find_buffer, is_aligned
from retrograd.pipelines.kernels.questions import MEASURED, MOST, Chosen, Launch, Question, Run, Trial, pick, put_first

# By op: the kernel, and which of operands and result are images, filters and results of the convolution.
_KINDS = {
    "bwd.convolution": (CONVOLVE, ("x", "w", "y")),
    "bwd.convolution_input_gradient": (SPREAD, ("y", "w", "x")),
    "bwd.convolution_filter_gradient": (CORRELATE, ("y", "x", "w")),
}
_OPS = {kind: op for op, (kind, _) in _KINDS.items()}
_WHAT = {CONVOLVE: "convolution", SPREAD: "gradient of images", CORRELATE: "gradient of filters"}
MOST_OF_RUNS = 16
"""Images of fewer channels are read by runs: all taps of a row at once."""

_PARTS_AT_ONCE, _SUMS = 16, 128
_UNCHOSEN = ConvolutionTile(64, 64, 32, 4, 2, 1.0)


@dataclass(frozen=True)
class Geometry:
    """A convolution's sizes, as kernels know them."""

    convolution: Convolution

    @property
    def element(self) -> str:
        """The type of elements."""
        return self.convolution.images[0]

    @property
    def images(self) -> tuple[int, ...]:
        """[N, H, W, G C], for G groups of C channels."""
        return _lay_last(self.convolution.images)

    @property
    def filters(self) -> tuple[int, ...]:
        """[G K, R, S, C]."""
        return _lay_last(self.convolution.filters)

    @property
    def results(self) -> tuple[int, ...]:
        """[N, P, Q, G K]."""
        return _lay_last(self.convolution.results)

    @property
    def groups(self) -> int:
        """G."""
        return self.convolution.groups

    @property
    def has_runs(self) -> bool:
        """Whether the taps of a row are read as one run of elements."""
        is_narrow = self.filters[3] < MOST_OF_RUNS and self.filters[2] > 1
        return is_narrow and self.groups == 1 and self.convolution.dilation[1] == 1

    def work(self, kind: str) -> Work:
        """The product that a kernel computes."""
        (_, high, wide, channels), groups = self.filters, self.groups
        filters = self.filters[0] // groups
        if self.has_runs and kind != SPREAD:
            wide, channels = 1, wide * channels
        places = prod(self.results[:3])
        if kind == CONVOLVE:
            return Work(kind, groups, places, filters, high * wide, channels, self.element)
        if kind == CORRELATE:
            return Work(kind, groups * high * wide, filters, channels, 1, places, self.element)
        rows, columns = (-(-size // step) for size, step in zip(self.images[1:3], self.convolution.stride, strict=True))
        phases = prod(self.convolution.stride)
        # Each phase has its share of the taps.
        return Work(
            kind,
            groups * phases,
            self.images[0] * rows * columns,
            channels,
            -(-high * wide // phases),
            filters,
            self.element,
        )

    def numbers(self, kind: str) -> dict[str, int]:
        """The numbers that kernels are told."""
        (count, height, width, pitch_x), (_, high, wide, channels) = self.images, self.filters
        run = 1
        if self.has_runs and kind != SPREAD:
            wide, channels, run = 1, wide * channels, channels
        known = self.convolution
        window = zip(("stride", "pad", "dilation"), (known.stride, known.padding, known.dilation), strict=True)
        steps = {f"{name}_{axis}": number for name, pair in window for axis, number in zip("hw", pair, strict=True)}
        sizes = {"N": count, "H": height, "W": width, "C": channels, "P": self.results[1], "Q": self.results[2]}
        sizes |= {"K": self.filters[0] // self.groups, "high": high, "wide": wide, **steps, "pitch_x": pitch_x}
        return {**sizes, "pitch_y": self.results[3], **({"run": run} if kind != SPREAD else {})}


@dataclass(frozen=True)
class Convolutions:
    """The family: ``bwd.convolution`` and its gradients, all of them."""

    architecture: str
    chosen: Chosen = field(default_factory=dict)

    name: ClassVar[str] = "convolutions"

    def plan(self, op: ir.Operation) -> ConvolutionPlan | None:
        """A plan for a convolution."""
        if op.name not in _KINDS:
            return None
        plan = ConvolutionPlan(op, self.architecture)
        tile = pick(plan.question, plan.list_tiles(), self.chosen)
        return replace(plan, tile=tile, is_measured=plan.question in self.chosen)


@dataclass(frozen=True)
class ConvolutionPlan:
    """A convolution or one of its gradients as a dispatch, and as the sum of what it gives in parts."""

    op: ir.Operation
    architecture: str
    tile: ConvolutionTile = _UNCHOSEN
    is_measured: bool = False

    def __str__(self) -> str:
        taken = " and ".join(str(operand.type) for operand in self.op.operands)
        parts = f" in {self.tile.parts} parts" * (self.tile.parts > 1)
        return f"{_WHAT[self.kind]} of {taken}: {self.kernel().label}{parts}" + MEASURED * self.is_measured

    @cached_property
    def kind(self) -> str:
        """The kernel's function."""
        return _KINDS[self.op.name][0]

    @cached_property
    def geometry(self) -> Geometry:
        """The convolution that the op is, or is a gradient of."""
        types = {name: ir.RankedTensorType(value.type) for name, value in self._values().items()}
        images, filters, results = ((str(types[n].element_type), tuple(types[n].shape)) for n in "xwy")
        window = (
            [ir.IntegerAttr(number).value for number in ir.ArrayAttr(self.op.attributes[name])]
            for name in ("stride", "padding", "dilation")
        )
        return Geometry(Convolution.of_last(images, filters, results, *window))

    @cached_property
    def work(self) -> Work:
        """The product that it is."""
        return self.geometry.work(self.kind)

    @property
    def question(self) -> str:
        """The text that tiles are asked for by: sizes, types and the window."""
        geometry, call = self.geometry, self.geometry.convolution
        images, filters = ("x".join(map(str, sizes)) for sizes in (geometry.images, geometry.filters))
        window = " ".join(
            f"{name} {pair[0]}x{pair[1]}"
            for name, pair in (("stride", call.stride), ("padding", call.padding), ("dilation", call.dilation))
        )
        apart = " apart" * (not all(map(is_aligned, self.op.operands)))
        return f"convolutions {self.kind} {images} by {filters} {window} {self.work.element}{apart}"

    def list_tiles(self) -> tuple[ConvolutionTile, ...]:
        """The tiles that it could have, first those that it has unasked."""
        return put_first(self.question, list_tiles(self.work, self.architecture, MOST), self.architecture)

    def questions(self) -> list[Question]:
        """The tiles of the kernel, each with the sum of what it gives in parts."""
        trials = {str(tile): replace(self, tile=tile)._trial() for tile in self.list_tiles()}
        return [Question(self.question, trials)]

    def _trial(self) -> Trial:
        result = ir.RankedTensorType(self.op.results[0].type)
        inputs = tuple(map(find_buffer, self.op.operands))
        element, whole = str(result.element_type), tuple(result.shape)
        if self.tile.parts == 1:
            return Trial(inputs, (Run(self.launch(), (0, 1), (Buffer(element, whole),)),))
        parts = Buffer("f32", (self.tile.parts, *whole))
        runs = Run(self.launch(), (0, 1), (parts,)), Run(self.sum_launch(), (2,), (Buffer(element, whole),))
        return Trial(inputs, runs)

    def kernels(self) -> dict[Kernel, bool]:
        """The kernels that it takes."""
        return dict.fromkeys([self.kernel(), *([self.sum_launch().kernel] if self.tile.parts > 1 else [])], False)

    def apply(self, compiled: Compiled) -> None:
        """Put the dispatch in the place of the op."""
        op, launch, parts = self.op, self.launch(), self.tile.parts
        type_ = ir.RankedTensorType(op.results[0].type)
        given = type_
        if parts > 1:
            given = ir.RankedTensorType.get([parts, *type_.shape], ir.F32Type.get(), loc=op.location)
        value = create_dispatch(launch, compiled[launch.kernel], list(op.operands), given, op)
        if parts > 1:
            sums = self.sum_launch()
            value = create_dispatch(sums, compiled[sums.kernel], [value], type_, op)
        op.results[0].replace_all_uses_with(value)
        op.erase()

    def launch(self) -> Launch:
        """The kernel for these sizes."""
        return Launch(self.kernel(), self.grid(), tuple(self.numbers().values()))

    def sum_launch(self) -> Launch:
        """The kernel that adds up what this one gives in parts."""
        result = self.op.results[0]
        size = prod(ir.RankedTensorType(result.type).shape)
        kernel = write_sum_kernel(self.work.element, size, is_aligned=is_aligned(result))
        return Launch(kernel, (-(-size // _SUMS), 1, 1), (size, self.tile.parts))

    def grid(self) -> tuple[int, int, int]:
        """The programs."""
        work, tile, groups = self.work, self.tile, self.geometry.groups
        count = tile.count(work)
        if self.kind == SPREAD:
            phases = prod(self.geometry.convolution.stride)
            return count // (groups * phases), phases, groups
        if self.kind == CORRELATE:
            return count // groups, tile.parts, groups
        return count // groups, groups, 1

    def numbers(self) -> dict[str, int]:
        """The numbers that the kernel is told."""
        numbers = self.geometry.numbers(self.kind)
        if self.kind == CORRELATE:
            numbers |= {"steps": self.tile.steps(self.work), "groups": self.geometry.groups}
        return numbers

    def kernel(self) -> Kernel:
        """The kernel."""
        values = self._values()
        aligned = {name for name, value in values.items() if is_aligned(value)}
        return write_kernel(self.kind, self.geometry, self.tile, aligned)

    def _values(self) -> dict[str, ir.Value]:
        """Operands and result, by the names that kernels have for them."""
        return dict(zip(_KINDS[self.op.name][1], [*self.op.operands, self.op.results[0]], strict=True))


def write_kernel(kind: str, geometry: Geometry, tile: ConvolutionTile, aligned: Container[str]) -> Kernel:
    """The kernel for all sizes of a class; ``aligned`` are those of its buffers that surely begin at multiples of 16
    bytes."""
    numbers, element = geometry.numbers(kind), geometry.element
    has_runs = geometry.has_runs and kind != SPREAD
    names = _KINDS[_OPS[kind]][1]
    # What is a sum of parts is written to memory of its own.
    even_buffers = [name for name in names if name in aligned or (tile.parts > 1 and name == names[-1])]
    even = [name for name in ("C", "K", "pitch_x", "pitch_y") if numbers[name] % 16 == 0]
    is_whole = geometry.work(kind).depth % tile.depth == 0 and not has_runs
    constants: dict[str, int | None] = {} if kind == SPREAD else {"RUN": int(has_runs)}
    constants |= {} if kind == CORRELATE else {"EVEN": int(is_whole)}
    constants |= {"EXACT": int(element == "f32"), "BM": tile.rows, "BN": tile.columns, "BK": tile.depth}
    label = [kind, element, f"{tile.rows}x{tile.columns}x{tile.depth}x{tile.warps}x{tile.stages}"]
    label += ["runs" * has_runs, "parts" * (tile.parts > 1), "whole" * (is_whole and kind != CORRELATE)]
    label += ["" if len(even) == 4 else "_".join(["of16", *even])]
    label += ["" if len(even_buffers) == 3 else "_".join(["at16", *even_buffers])]
    result = "f32" if tile.parts > 1 else element
    return Kernel(
        "_".join(part for part in label if part),
        "convolutions",
        kind,
        tuple((name, result if name == names[-1] else element) for name in names),
        (*numbers, *(("steps", "groups") if kind == CORRELATE else ())),
        (*even_buffers, *even),
        tuple(constants.items()),
        tile.warps,
        tile.stages,
    )


def _lay_last(tensor: Tensor) -> tuple[int, ...]:
    """The sizes of a tensor of fixed ones, channels last."""
    count, channels, *plane = (size or 0 for size in tensor[1])
    return (count, *plane, channels)


def write_sum_kernel(element: str, size: int, *, is_aligned: bool) -> Kernel:
    """The kernel that adds up parts of filters of ``size`` elements."""
    is_even = size % 16 == 0
    names = ["add_parts", element, "odd" * (not is_even), "unaligned" * (not is_aligned)]
    return Kernel(
        "_".join(name for name in names if name),
        "convolutions",
        "add_parts",
        (("parts", "f32"), ("w", element)),
        ("size", "count"),
        ("parts", *["w"] * is_aligned, *["size"] * is_even),
        (("BP", _PARTS_AT_ONCE), ("BW", _SUMS)),
        4,
        1,
    )
