# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention by kernels of our own: the ops that a trace kept whole, on which tiles, by how many dispatches.

A forward is one kernel, which gives the log-sum-exps of the scores besides. Its gradients are three: the sums of
gradient times output over each row; the gradients of keys and values, a program for a tile of keys; those of queries, a
program for a tile of queries. Weights are computed anew in both, so that nothing is added up in the order of arrival.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from retrograd.contract.trials import Buffer
from retrograd.dialects import ir
from retrograd.pipelines.kernels.attention_tiles import (
    ATTEND,
    KEYS,
    QUERIES,
    SUMS,
    AttentionTile,
    fill_width,
    list_tiles,
)
from retrograd.pipelines.kernels.dispatch import create_dispatches
from retrograd.pipelines.kernels.family import Compiled
from retrograd.pipelines.kernels.heads import Given, Heads, find_given, find_heads, mask_strides
from retrograd.pipelines.kernels.kernel import Kernel
from retrograd.pipelines.kernels.matrices import find_buffer, find_typed_buffer, is_aligned
from retrograd.pipelines.kernels.questions import MEASURED, MOST, Chosen, Launch, Question, Run, Trial, pick, put_first

ATTENTION, BACKWARD = "bwd.attention", "bwd.attention_backward"
DROPPED, DROPPED_BACKWARD = "bwd.dropped_attention", "bwd.dropped_attention_backward"
MASKED_BACKWARD = f"{DROPPED_BACKWARD}_with_mask"
# The operands of each that are heads, by the names that kernels have for them.
_FORWARD_HEADS, _BACKWARD_HEADS = ("q", "k", "v"), ("dout", "q", "k", "v", "out")
_OPERANDS = {
    ATTENTION: _FORWARD_HEADS,
    DROPPED: _FORWARD_HEADS,
    BACKWARD: _BACKWARD_HEADS,
    DROPPED_BACKWARD: _BACKWARD_HEADS,
    MASKED_BACKWARD: _BACKWARD_HEADS,
}
_FORWARDS, _WITH_DROPOUT = (ATTENTION, DROPPED), (DROPPED, DROPPED_BACKWARD, MASKED_BACKWARD)
_AXES = ("batch", "head", "row")
# Of the random numbers that a chance is compared with; so many of them are drawn at once.
_DIGITS, _DRAWN = 24, 4
# Values of one op, by the names that a kernel has for them.
Values = Mapping[str, ir.Value | None]


@dataclass(frozen=True)
class Attention:
    """The family: ``bwd.attention`` and its gradients, all of them."""

    architecture: str
    chosen: Chosen = field(default_factory=dict)

    name: ClassVar[str] = "attention"

    def plan(self, op: ir.Operation) -> AttentionPlan | None:
        """A plan for attention."""
        return AttentionPlan(op, self.architecture, self.chosen) if op.name in _OPERANDS else None


@dataclass(frozen=True)
class AttentionPlan:
    """Attention or its gradients as dispatches."""

    op: ir.Operation
    architecture: str
    chosen: Chosen = field(default_factory=dict)

    def __str__(self) -> str:
        what = "attention" if self.op.name in _FORWARDS else "gradients of attention"
        what += " and its mask" * (self.op.name == MASKED_BACKWARD)
        what += " with dropout" * (self.op.name in _WITH_DROPOUT)
        query, key = (ir.RankedTensorType(self.op.operands[_OPERANDS[self.op.name].index(name)].type) for name in "qk")
        is_measured = any(write_question(step) in self.chosen for step in read_steps(self.op))
        labels = ", ".join(kernel.label for kernel in self.kernels())
        return f"{what} of {query} and {key}: {labels}" + MEASURED * is_measured

    def kernels(self) -> dict[Kernel, bool]:
        """The kernels that it takes."""
        return dict.fromkeys((write_kernel(step, self._tile(step)) for step in read_steps(self.op)), False)

    def questions(self) -> list[Question]:
        """The tiles of each kernel."""
        return [
            Question(write_question(step), {str(tile): _write_trial(step, tile) for tile in self._tiles(step)})
            for step in read_steps(self.op)
        ]

    def _tiles(self, step: Step) -> tuple[AttentionTile, ...]:
        tiles = list_tiles(step.kind, step.element, step.first.shape[3], self.architecture, MOST)
        return put_first(write_question(step), tiles, self.architecture)

    def _tile(self, step: Step) -> AttentionTile:
        return pick(write_question(step), self._tiles(step), self.chosen)

    def apply(self, compiled: Compiled) -> None:
        """Put the dispatches in the place of the op."""
        op, left = self.op, dict[str, ir.Value]()
        for step in read_steps(op):
            tile = self._tile(step)
            kernel = write_kernel(step, tile)
            tensors = [*(heads.value for heads in step.heads.values()), *step.others.values()]
            sums = [left[name] if value is None else value for name, value in step.sums.items()]
            types = [given.type for given in step.given.values()] + [step.sums_type] * len(step.given_sums)
            types += [] if step.scores is None else [step.scores.type]
            launch = Launch(kernel, find_grid(step, tile), tuple(step.numbers.values()))
            values = create_dispatches(launch, compiled[kernel], [*tensors, *sums], types, op)
            for given, value in zip(step.given.values(), values, strict=False):
                given.replace_by(value)
            rest = values[len(step.given) :]
            if step.scores is not None:
                step.scores.replace_all_uses_with(rest.pop())
            for (name, result), value in zip(step.given_sums.items(), rest, strict=True):
                left[name] = value
                if result is not None:
                    result.replace_all_uses_with(value)
        op.erase()


@dataclass(frozen=True)
class Step:
    """A kernel, and what it takes and gives by the names of its function: heads, and sums, an f32 for each row.

    A sum that is no value of the op's is ``None``: one step leaves it to the next. ``scores`` is the result that is the
    gradient of the scores, of the mask's type.
    """

    kind: str
    op: ir.Operation
    heads: Mapping[str, Heads]
    mask: ir.Value | None
    sums: Values
    given: Mapping[str, Given]
    given_sums: Values
    sizes: Mapping[str, int]
    seed: ir.Value | None = None
    scores: ir.Value | None = None

    @property
    def others(self) -> dict[str, ir.Value]:
        """The operands besides heads and sums: a mask, a seed."""
        return {name: value for name, value in (("mask", self.mask), ("seeds", self.seed)) if value is not None}

    @property
    def first(self) -> Heads:
        """Heads of the shape of queries."""
        return next(iter(self.heads.values()))

    @property
    def element(self) -> str:
        """The type of the elements of heads."""
        return str(ir.RankedTensorType(self.first.value.type).element_type)

    @property
    def sums_type(self) -> ir.Type:
        """The type of sums."""
        return ir.RankedTensorType.get(list(self.first.shape[:3]), ir.F32Type.get(), loc=self.op.location)

    @property
    def numbers(self) -> dict[str, int]:
        """The numbers that the kernel is told: sizes, and the strides of what it takes and gives."""
        taken = {name: (heads.start, *heads.strides) for name, heads in self.heads.items()}
        masks = {} if self.mask is None else {"mask": mask_strides(self.mask)[:3]}
        given = {name: heads.strides for name, heads in self.given.items()}
        names = [*_name_strides(taken, "start"), *_name_strides([*masks, *given])]
        values = [number for own in (taken | masks | given).values() for number in own]
        return {**self.sizes, **dict(zip(names, values, strict=True))}


def read_steps(op: ir.Operation) -> list[Step]:
    """The kernels of an op, less those of which nobody reads a result; read anew each time: of two ops, what one reads
    is replaced as the other is."""
    heads = {name: find_heads(value) for name, value in zip(_OPERANDS[op.name], op.operands, strict=False)}
    mask = op.operands[len(heads) + (op.name not in _FORWARDS)]
    added = mask if ir.RankedTensorType(mask.type).rank else None
    seed = op.operands[len(op.operands) - 1] if op.name in _WITH_DROPOUT else None
    bits = _bits_of(ir.FloatAttr(op.attributes["scale"]).value)
    _, count, rows, _ = heads["q"].shape
    sizes = {"scale": bits, "H": count, "L": rows, "S": heads["k"].shape[2]}
    if seed is not None:
        chance = round(ir.FloatAttr(op.attributes["dropout"]).value * 2**_DIGITS) / 2**_DIGITS
        sizes |= {"stream": ir.IntegerAttr(op.attributes["stream"]).value, "chance": _bits_of(chance)}
    results = list(op.results)
    if op.name in _FORWARDS:
        output, lse = results
        return [Step(ATTEND, op, heads, added, {}, {"out": find_given(output)}, {"lse": lse}, sizes, seed)]
    taken, lse = {name: heads[name] for name in ("dout", "q", "k", "v")}, op.operands[5]
    sums: Values = {"lse": lse, "total": None}
    dq, dk, dv = (find_given(result) for result in results[:3])
    scores = next((result for result in results[3:] if list(result.uses)), None)
    steps = [
        Step(KEYS, op, taken, added, sums, {"dk": dk, "dv": dv}, {}, sizes, seed),
        Step(QUERIES, op, taken, added, sums, {"dq": dq}, {}, sizes, seed, scores),
    ]
    read = [
        step
        for step in steps
        if step.scores is not None or any(list(given.value.uses) for given in step.given.values())
    ]
    summed = {name: heads[name] for name in ("dout", "out")}
    return [Step(SUMS, op, summed, None, {}, {}, {"total": None}, {"H": count, "L": rows}), *read]


def _bits_of(number: float) -> int:
    (bits,) = struct.unpack("<i", struct.pack("<f", number))
    return int(bits)


def write_question(step: Step) -> str:
    """Write the text that the tiles of a step are asked for by: sizes and types, and what is masked."""
    batch, count, rows, width = step.first.shape
    words = [f"attention {step.kind} of {batch}x{count}x{rows}x{width}"]
    if "k" in step.heads:
        _, heads, columns, _ = step.heads["k"].shape
        words += [f"and {heads}x{columns}", "causal" * bool(ir.BoolAttr(step.op.attributes["causal"]).value)]
    if step.mask is not None:
        strides = ["all" if stride == 0 else "each" for stride in mask_strides(step.mask)[2:]]
        words += ["masked", str(ir.RankedTensorType(step.mask.type).element_type), *strides]
    words += ["dropped"] * (step.seed is not None) + ["scores"] * (step.scores is not None)
    return " ".join(word for word in [*words, step.element] if word)


def _write_trial(step: Step, tile: AttentionTile) -> Trial:
    """A step by itself, on buffers of its own."""
    inputs = [find_buffer(heads.value) for heads in step.heads.values()]
    inputs += [find_buffer(value) for value in step.others.values()]
    sums = Buffer("f32", step.first.shape[:3])
    inputs += [sums] * len(step.sums)
    given = [find_typed_buffer(given.type) for given in step.given.values()] + [sums] * len(step.given_sums)
    given += [] if step.scores is None else [find_typed_buffer(step.scores.type)]
    launch = Launch(write_kernel(step, tile), find_grid(step, tile), tuple(step.numbers.values()))
    return Trial(tuple(inputs), (Run(launch, tuple(range(len(inputs))), tuple(given)),))


def find_grid(step: Step, tile: AttentionTile) -> tuple[int, int, int]:
    """Tiles, heads and batches: a program each."""
    batch, heads, rows, _ = (step.heads["k"] if step.kind == KEYS else step.first).shape
    return -(-rows // (tile.columns if step.kind == KEYS else tile.rows)), heads, batch


def write_kernel(step: Step, tile: AttentionTile) -> Kernel:
    """The kernel of a step, for all sizes of its class."""
    width = step.first.shape[3]
    element, mask = step.element, step.mask
    added = [("mask", str(ir.RankedTensorType(mask.type).element_type))] if mask is not None else []
    drawn = [("seeds", "i64")] if step.seed is not None else []
    scores = [] if step.scores is None else [("dscore", str(ir.RankedTensorType(step.scores.type).element_type))]
    constants: dict[str, int | None] = {"D": width, "BD": fill_width(width), "BM": tile.rows}
    traits = []
    if step.kind != SUMS:
        over, step_size = (step.sizes["L"], tile.rows) if step.kind == KEYS else (step.sizes["S"], tile.columns)
        repeats = step.heads["q"].shape[1] // step.heads["k"].shape[1]
        causal = bool(ir.BoolAttr(step.op.attributes["causal"]).value)
        column = mask_strides(mask)[3] if mask is not None else 0
        even = over % step_size == 0
        constants |= {"MASK": int(mask is not None), "COLUMN": column, "CAUSAL": int(causal), "EVEN": int(even)}
        fours = bool(drawn) and step.sizes["S"] % _DRAWN == 0
        constants |= {"DROP": int(bool(drawn)), "FOURS": int(fours)}
        constants |= {} if drawn else dict.fromkeys(("seeds", "stream", "chance"))
        constants |= {"EXACT": int(element == "f32"), "REPEATS": repeats, "BN": tile.columns}
        if step.kind == QUERIES:
            constants |= {"SCORES": int(bool(scores))} | ({} if scores else {"dscore": None})
        if mask is None:
            constants |= dict.fromkeys(["mask", *_name_strides(["mask"])])
        traits = ["causal" * causal, f"shared_{repeats}" * (repeats > 1), "odd" * (not even)]
        traits += ["dropped" if fours else "dropped_one_by_one"] * bool(drawn) + ["scores"] * bool(scores)
        traits += [f"mask_{type_}" + "_row" * (not column) for _, type_ in added]
    aligned = dict.fromkeys(_find_aligned(step))
    shape = f"{width}_{tile.rows}x{tile.columns}x{tile.warps}x{tile.stages}"
    traits += ["even" * ("mask" in aligned), "unaligned" * (not aligned.keys() >= set(step.heads))]
    traits += ["apart" * (not aligned.keys() >= set(step.given))]
    label = ["attention" if step.kind == ATTEND else f"attention_{step.kind}", element, shape, *traits]
    return Kernel(
        "_".join(part for part in label if part),
        "attention",
        step.kind,
        (
            *((name, element) for name in step.heads),
            *added,
            *drawn,
            *((name, "f32") for name in step.sums),
            *((name, element) for name in step.given),
            *((name, "f32") for name in step.given_sums),
            *scores,
        ),
        tuple(step.numbers),
        tuple(aligned),
        tuple(constants.items()),
        tile.warps,
        tile.stages,
        results=len(step.given) + len(step.given_sums) + len(scores),
    )


def _find_aligned(step: Step) -> tuple[str, ...]:
    """The buffers and strides that are multiples of 16: of what is read all or none, so of results, and of a mask."""
    aligned: list[str] = []
    if all(heads.is_aligned for heads in step.heads.values()):
        aligned += [*step.heads, *_name_strides(step.heads, "start")]
    if all(given.is_aligned for given in step.given.values()):
        aligned += [*step.given, *_name_strides(step.given)]
    if step.mask is not None and is_aligned(step.mask) and not any(s % 16 for s in mask_strides(step.mask)[:3]):
        aligned += ["mask", *_name_strides(["mask"])]
    return tuple(aligned)


def _name_strides(names: Iterable[str], *more: str) -> list[str]:
    return [f"{name}_{axis}" for name in names for axis in (*more, *_AXES)]
