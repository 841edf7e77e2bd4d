# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products of matrices by kernels of our own: which, on which tiles, in how many parts.

A product of f32 is one of bf16: each matrix is split into the three that it is exactly the sum of, and of their nine
products the six that count are added up, smallest first, on matrix units. On an H100 that is 106 to 113 TFLOP/s for
4096 x 4096 x 4096, with an error of 2.1e-7; cuBLAS computes it in f32 with 51 and 1.1e-6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import ClassVar

from retrograd.contract.trials import Buffer, Ending
from retrograd.dialects import ir
from retrograd.pipelines.kernels.dispatch import create_dispatch
from retrograd.pipelines.kernels.epilogues import Epilogue, find_epilogue
from retrograd.pipelines.kernels.family import Compiled, Refusal
from retrograd.pipelines.kernels.kernel import Kernel
from retrograd.pipelines.kernels.matrices import Matrix, find_buffer, find_matrix, is_aligned
from retrograd.pipelines.kernels.questions import MEASURED, MOST, Chosen, Launch, Question, Run, Trial, pick, put_first
from retrograd.pipelines.kernels.tiles import MULTIPROCESSORS, Shape, Tiling, choose_tiling, list_tilings, pad
from retrograd.pipelines.transforms.helpers.copies import copy_form
from retrograd.pipelines.transforms.helpers.fills import is_zero

PRODUCTS = {"linalg.matmul": 2, "linalg.batch_matmul": 3}
"""The ops, and the rank of their operands."""

MOST_BATCHES = 65535
"""The most that CUDA lets the second axis of a grid have."""

_LARGE_PLANES = 1 << 27
"""Bytes of a first matrix's three parts from which on the product divides the matrix as it reads it: those of the
gradient of a vocabulary's logits would be at a step's peak, and larger than they are."""

# Multiplications below which IREE's one kernel is as good as three launches.
FEWEST = 1 << 24
SHORTEST = 16
_PLAIN_MAPS = ("(d0, d2)", "(d2, d1)", "(d0, d1)"), ("(d0, d1, d3)", "(d0, d3, d2)", "(d0, d1, d2)")


@dataclass(frozen=True)
class Products:
    """The family: products of f32, bf16 and f16, of fixed sizes, added up in f32."""

    architecture: str
    chosen: Chosen = field(default_factory=dict)
    split: dict[Matrix, ir.Value] = field(default_factory=dict, compare=False)

    name: ClassVar[str] = "products"

    def plan(self, op: ir.Operation) -> ProductPlan | Refusal | None:
        """A plan for a product; the reason where IREE computes it."""
        if op.name not in PRODUCTS:
            return None
        types = [ir.RankedTensorType(operand.type) for operand in op.operands]
        what = f"{op.name.removeprefix('linalg.')} of {types[0]} and {types[1]}"
        reason = _find_obstacle(op, types)
        if reason is not None:
            return Refusal(what, reason)
        batch, (m, n) = (types[2].shape[0] if types[2].rank == 3 else 1), types[2].shape[-2:]
        shape = Shape(batch, m, n, types[0].shape[-1], str(types[0].element_type))
        plan = ProductPlan(op, what, shape, choose_tiling(shape, self.architecture), self.split)
        tiling = pick(plan.question, plan.list_tilings(), self.chosen)
        return replace(plan, tiling=tiling, is_measured=plan.question in self.chosen)


def _find_obstacle(op: ir.Operation, types: list[ir.RankedTensorType]) -> str | None:
    """Why a product is not for a kernel of ours."""
    if not all(type_.has_static_shape for type_ in types):
        return "sizes are open"
    elements = {str(type_.element_type) for type_ in types[:2]}
    if len(elements) != 1 or elements - {"f32", "bf16", "f16"} or str(types[2].element_type) != "f32":
        return f"it multiplies {' and '.join(sorted(elements))} and adds up in {types[2].element_type}"
    if "indexing_maps" in op.attributes:
        maps = tuple(
            str(map_.value).partition("-> ")[2] for map_ in map(ir.AffineMapAttr, op.attributes["indexing_maps"])
        )
        if maps != _PLAIN_MAPS[PRODUCTS[op.name] - 2]:
            return "its operands are broadcast or transposed by maps"
    if not is_zero(op.operands[2]):
        return "it adds to what is there"
    (*batch, m, n), k = types[2].shape, types[0].shape[-1]
    if any(count > MOST_BATCHES for count in batch):
        return f"more than {MOST_BATCHES} of a batch"
    count = m * n * k * (batch[0] if batch else 1)
    if count < FEWEST or min(m, n, k) < SHORTEST:
        return f"of {count} multiplications, {m} x {n} x {k}, it is too small"
    return None


def ends_product(op: ir.Operation) -> bool:
    """Whether the kernel of a product does what an op does, on the way."""
    sources = [value.owner for value in op.operands if isinstance(value, ir.OpResult)]
    between = [inner.owner for source in sources for inner in source.operands if isinstance(inner, ir.OpResult)]
    for source in [*sources, *between]:
        if source.name in PRODUCTS and (epilogue := find_epilogue(source)) is not None:
            return op in (epilogue.op, *epilogue.between)
    return False


@dataclass(frozen=True)
class ProductPlan:
    """A product of matrices as dispatches: what splits or pads an operand, the product, the sum of its parts."""

    op: ir.Operation
    what: str
    shape: Shape
    tiling: Tiling
    split: dict[Matrix, ir.Value] = field(compare=False)
    is_measured: bool = False

    # Read anew each time: of products of products, what one reads is replaced as the other is.
    @property
    def left(self) -> Matrix:
        """The first matrix."""
        return find_matrix(self.op.operands[0])

    @property
    def right(self) -> Matrix:
        """The second one."""
        return find_matrix(self.op.operands[1])

    def __str__(self) -> str:
        parts = f" in {self.tiling.parts} parts" * (self.tiling.parts > 1)
        return f"{self.what}: {self._product(self._epilogue()).label}" + parts + MEASURED * self.is_measured

    @property
    def question(self) -> str:
        """The text that tiles are asked for by: sizes, layouts and types, of what the kernel adds and gives too."""
        shape, epilogue = self.shape, find_epilogue(self.op)
        layout = "nt"[self.left.transposed] + "nt"[self.right.transposed]
        batch = f"{shape.batch} of " if shape.batch > 1 else ""
        words = [f"products {batch}{shape.m}x{shape.n}x{shape.k} {layout} {shape.element}"]
        if epilogue is not None:
            words += ["and bias"] * (epilogue.bias is not None) + [f"to {epilogue.element}"]
            words += ["rounded"] * epilogue.rounded
        # What lies elsewhere is copied first.
        return " ".join([*words, *["apart" for matrix in (self.left, self.right) if not is_aligned(matrix.value)]])

    def questions(self) -> list[Question]:
        """The tiles of the product."""
        trials = {str(tiling): replace(self, tiling=tiling)._trial() for tiling in self.list_tilings()}
        return [Question(self.question, trials)]

    def list_tilings(self) -> tuple[Tiling, ...]:
        """The tilings that it could have, first that which it has unasked."""
        architecture = self.tiling.architecture
        return put_first(self.question, list_tilings(self.shape, architecture, MOST), architecture)

    def _trial(self) -> Trial:
        """The dispatches by themselves, with those that prepare the operands."""
        operands, epilogue = self._operands, self._epilogue()
        inputs = [_buffer_of(matrix) for matrix, _ in operands]
        ending = find_epilogue(self.op)
        bias = ending.bias if ending else None
        inputs += [] if bias is None else [find_buffer(bias)]
        runs: list[Run] = []
        taken: list[int] = []
        for number, (matrix, is_taken) in enumerate(operands):
            launch, shape, element = self._split_launch(matrix)
            if is_taken:
                taken.append(number)
            else:
                taken.append(len(inputs) + len(runs))
                runs.append(Run(launch, (number,), (Buffer(str(element), tuple(shape)),)))
        shapes = [m.shape if is_taken else tuple(self._split_launch(m)[1]) for m, is_taken in operands]
        launch, shape = self._product_launch(epilogue, shapes)
        element = str(epilogue.element) if epilogue else "f32"
        taken += [2] if epilogue and epilogue.bias is not None else []
        runs.append(Run(launch, tuple(taken), (Buffer(element, tuple(shape)),)))
        if self.tiling.parts == 1:
            return Trial(tuple(inputs), tuple(runs))
        rounded = str(ending.element) if ending else "f32"
        return Trial(tuple(inputs), tuple(runs), Ending(rounded, None if bias is None else 2))

    def kernels(self) -> dict[Kernel, bool]:
        """The kernels that it takes."""
        splits = [self._split(matrix) for matrix, is_taken in self._operands if not is_taken]
        return dict.fromkeys([*splits, self._product(self._epilogue())], False)

    def apply(self, compiled: Compiled) -> None:
        """Put the dispatches in the place of the product."""
        op, epilogue = self.op, self._epilogue()
        operands = [
            matrix.place(op) if is_taken else self._write_split(matrix, compiled) for matrix, is_taken in self._operands
        ]
        launch, shape = self._product_launch(epilogue, [ir.RankedTensorType(v.type).shape for v in operands])
        last = epilogue.op if epilogue else op
        element = epilogue.element if epilogue else ir.F32Type.get()
        result = ir.RankedTensorType.get(shape, element, loc=op.location)
        taken = [*operands, *([epilogue.bias] if epilogue and epilogue.bias is not None else [])]
        value = create_dispatch(launch, compiled[launch.kernel], taken, result, last)
        if self.tiling.parts > 1:
            (value,) = copy_form(_write_sum(result, last.results[0].type), [value, op.operands[2]], last)
        last.results[0].replace_all_uses_with(value)
        last.erase()
        if epilogue:
            for between in epilogue.between:
                between.erase()
            op.erase()

    def _product_launch(self, epilogue: Epilogue | None, operands: Sequence[Sequence[int]]) -> tuple[Launch, list[int]]:
        """The product of operands of these shapes, and the shape of what it gives."""
        shape, tiling = self.shape, self.tiling
        batch = [shape.batch] if PRODUCTS[self.op.name] == 3 else []
        parts = [tiling.parts] if tiling.parts > 1 else []
        tiles, many = tiling.count(shape), tiling.parts if tiling.copied else shape.batch
        (*_, high_a, pitch_a), (*_, high_b, pitch_b) = operands
        numbers = (shape.m, shape.n, high_a, pitch_a, high_b, pitch_b, tiling.steps(shape), many)
        if tiling.copied:
            grid = (min(tiles * tiling.parts, MULTIPROCESSORS[tiling.architecture] * tiling.resident), 1, 1)
        else:
            grid = (tiles, shape.batch, tiling.parts)
        return Launch(self._product(epilogue), grid, numbers), [*parts, *batch, shape.m, shape.n]

    def _epilogue(self) -> Epilogue | None:
        """Find what the kernel does to the result besides; parts are added up first."""
        return find_epilogue(self.op, widens=self.tiling.copied) if self.tiling.parts == 1 else None

    @property
    def _operands(self) -> tuple[tuple[Matrix, bool], tuple[Matrix, bool]]:
        """The two matrices, which may be one, each with whether the kernel reads it as it is."""
        left, right = self.left, self.right
        if self.shape.parts > 1:
            return (left, self._is_divided_inside), (right, False)
        return (left, self._fits_tiles(left)), (right, self._fits_tiles(right))

    def _fits_tiles(self, matrix: Matrix) -> bool:
        """Whether tiles divide a matrix where it lies."""
        rows, columns = matrix.shape[-2:]
        if not is_aligned(matrix.value):
            return False
        return columns % 8 == 0 if self.tiling.copied else (pad(rows), pad(columns)) == (rows, columns)

    @property
    def _is_divided_inside(self) -> bool:
        """Whether the product divides its first matrix into parts of bf16."""
        return self.shape.parts > 1 and 2 * self.shape.parts * prod(self.left.shape) >= _LARGE_PLANES

    def _product(self, epilogue: Epilogue | None) -> Kernel:
        shape, tiling = self.shape, self.tiling
        layout = "nt"[self.left.transposed] + "nt"[self.right.transposed]
        bias = epilogue.bias if epilogue else None
        result = str(epilogue.element) if epilogue else "f32"
        operand = "bf16" if shape.parts > 1 else shape.element
        wide = shape.n % 16 == 0
        aligned = is_aligned((epilogue.op if epilogue else self.op).results[0])
        names = [f"product_{layout}", shape.element, _name_tile(tiling), tiling.way]
        added = f"bias_{ir.RankedTensorType(bias.type).element_type}" if bias is not None else ""
        rounded = epilogue is not None and epilogue.rounded
        names += [
            result * (result != "f32"),
            "rounded" * rounded,
            added,
            "odd" * (not wide),
            "unaligned" * (not aligned),
        ]
        pitches = {
            name
            for name, (matrix, is_taken) in zip(("pitch_a", "pitch_b"), self._operands, strict=True)
            # What is split or padded has rows a multiple of 16 apart.
            if not is_taken or matrix.shape[-1] % 16 == 0
        }
        names += ["" if len(pitches) == 2 else "pitch_" + "".join(sorted(p[-1] for p in pitches))]
        inside = self._is_divided_inside
        names += ["divided" * inside, "start_a" * (inside and not is_aligned(self.left.value))]
        constants: dict[str, int | None] = {"TA": int(self.left.transposed), "TB": int(self.right.transposed)}
        constants |= {} if tiling.copied else {"PARTS": shape.parts, "WHOLE": int(inside)}
        constants |= {"BIAS": int(bias is not None), **({"EVEN": int(wide)} if tiling.specialized else {})}
        constants |= ({"ROUND": int(rounded)} if tiling.copied else {}) | tiling.constants
        constants |= {"bias": None} if bias is None else {}
        added_types = [("bias", str(ir.RankedTensorType(bias.type).element_type))] if bias is not None else []
        return Kernel(
            "_".join(name for name in names if name),
            "specialized_products" if tiling.specialized else "products",
            f"product_{tiling.way}" if tiling.way else "product",
            (("a", shape.element if inside else operand), ("b", operand), *added_types, ("c", result)),
            ("M", "N", "high_a", "pitch_a", "high_b", "pitch_b", "steps", "parts" if tiling.copied else "count"),
            (
                *["a"] * (not inside or is_aligned(self.left.value)),
                "b",
                *["c"] * aligned,
                *["N"] * wide,
                *sorted(pitches),
            ),
            tuple(constants.items()),
            tiling.warps,
            tiling.stages,
        )

    def _split(self, matrix: Matrix) -> Kernel:
        parts, element = self.shape.parts, self.shape.element
        even, aligned = matrix.shape[-1] % 16 == 0, is_aligned(matrix.value)
        names = ["split" if parts > 1 else "pad", element, "odd" * (not even), "unaligned" * (not aligned)]
        return Kernel(
            "_".join(name for name in names if name),
            "products",
            "split",
            (("matrix", element), ("planes", "bf16" if parts > 1 else element)),
            ("rows", "columns", "high", "pitch", "count"),
            (*["matrix"] * aligned, "planes", *["columns"] * even, "high", "pitch"),
            (("PARTS", parts), ("BR", 8), ("BC", 256)),
            4,
            1,
        )

    def _split_launch(self, matrix: Matrix) -> tuple[Launch, list[int], ir.Type]:
        """The kernel that splits or pads a matrix, the shape of its result and the type of the elements."""
        *batch, rows, columns = matrix.shape
        count, high, pitch = batch[0] if batch else 1, pad(rows), pad(columns)
        planes = [self.shape.parts] if self.shape.parts > 1 else []
        element = ir.BF16Type.get() if planes else ir.RankedTensorType(matrix.value.type).element_type
        grid = (-(-high // 8) * -(-pitch // 256), count, 1)
        launch = Launch(self._split(matrix), grid, (rows, columns, high, pitch, count))
        return launch, [*planes, *batch, high, pitch], element

    def _write_split(self, matrix: Matrix, compiled: Compiled) -> ir.Value:
        """The parts of a matrix, with zeros around them; once for all products of it."""
        read = replace(matrix, transposed=False)
        if read in self.split:
            return self.split[read]
        launch, shape, element = self._split_launch(matrix)
        result = ir.RankedTensorType.get(shape, element, loc=self.op.location)
        value = create_dispatch(launch, compiled[launch.kernel], [matrix.place(self.op)], result, self.op)
        self.split[read] = value
        return value


def _name_tile(tiling: Tiling) -> str:
    return "x".join(map(str, (tiling.m, tiling.n, tiling.k, tiling.warps, tiling.stages)))


def _buffer_of(matrix: Matrix) -> Buffer:
    return Buffer(str(ir.RankedTensorType(matrix.value.type).element_type), matrix.shape)


def _write_sum(parts: ir.RankedTensorType, total: ir.Type) -> ir.Module:
    """A function that adds up the parts of a product."""
    rank = parts.rank - 1
    loops = ", ".join(f"d{i}" for i in range(rank + 1))
    kept = ", ".join(f"d{i}" for i in range(rank))
    kinds = ", ".join(['"parallel"'] * rank + ['"reduction"'])
    return ir.Module.parse(f"""
func.func @sum(%parts: {parts}, %start: {total}) -> {total} {{
  %sum = linalg.generic {{
      indexing_maps = [affine_map<({loops}) -> (d{rank}, {kept})>, affine_map<({loops}) -> ({kept})>],
      iterator_types = [{kinds}]}} ins(%parts : {parts}) outs(%start : {total}) {{
  ^bb0(%part: f32, %sum: f32):
    %next = arith.addf %sum, %part : f32
    linalg.yield %next : f32
  }} -> {total}
  return %sum : {total}
}}
""")
