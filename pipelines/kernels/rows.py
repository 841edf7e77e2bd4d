# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Long rows whose length is odd, such as a vocabulary's logits: what is computed along them, in one kernel each.

iree-compile divides loops into tiles that divide them: of 4096 rows of 50,257 a workgroup takes 32 numbers of one
column, each in a line of memory of its own, 5.2 ms on an H100 for what a copy does in 0.6. Here a kernel is written for
each op, elementwise or a sum or maximum of rows, with all in it that is computed element by element before: it reads
what that reads, and the rows in between are never written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import ClassVar

from retrograd.dialects import ir
from retrograd.pipelines.kernels.dispatch import create_dispatch
from retrograd.pipelines.kernels.expressions import TYPES, Statements, find_combined, write_value
from retrograd.pipelines.kernels.family import Compiled, Refusal
from retrograd.pipelines.kernels.kernel import Kernel
from retrograd.pipelines.kernels.matrices import find_buffer
from retrograd.pipelines.kernels.products import ends_product
from retrograd.pipelines.kernels.questions import MEASURED, Chosen, Launch, Question, Run, Trial, pick
from retrograd.pipelines.transforms.helpers.generics import GENERIC, is_reduced, read_inputs, read_maps

SHORTEST = 512
"""Shorter rows stay with IREE."""

FEWEST = 1 << 18
"""As do tensors of fewer elements."""

_WARP = 32
# More inputs than this, and a kernel is for IREE: so many buffers its driver passes.
_MOST_INPUTS = 12
_ELEMENTS = (*TYPES, "i1")
# By which maps an input of rows is read: its elements, one number for each row or column, one for all.
_READS = {
    "(d0, d1) -> (d0, d1)": "row * columns + column",
    "(d0, d1) -> (d0, 0)": "row",
    "(d0, d1) -> (d0)": "row",
    "(d0, d1) -> (d1)": "column",
    "(d0, d1) -> (0, d1)": "column",
    "(d0, d1) -> ()": "0",
}
_WHOLE = "(d0, d1) -> (d0, d1)"
_RESULTS = ("(d0, d1) -> (d0)", "(d0, d1) -> (d0, 0)")
_START = {"arith.addf": 0.0, "arith.maximumf": float("-inf")}


@dataclass(frozen=True)
class RowTile:
    """A tile of elements of a row that a number of warps take at a time."""

    columns: int
    warps: int

    def __str__(self) -> str:
        return f"{self.columns} {self.warps} warps"


TILES = tuple(
    RowTile(*sizes) for sizes in ((1024, 4), (512, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8), (4096, 16))
)
"""The tiles of a kernel along rows, first those that are taken unasked."""

_HEAD = '''"""A kernel that was written for one op."""
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def along(BUFFERS, columns, BC: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
'''
_MAP = """    column = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = column < columns
LOADS
    tl.store(result + row * columns + column, VALUE, mask=inside)
"""
_SUM = """    total = tl.zeros((BC,), tl.float32)
    for start in range(0, columns, BC):
        column = start + tl.arange(0, BC)
        inside = column < columns
LOADS
        total += tl.where(inside, VALUE, 0.0)
    tl.store(result + row, tl.sum(total))
"""
_MAXIMUM = """    most = tl.full((BC,), float("-inf"), tl.float32)
    for start in range(0, columns, BC):
        column = start + tl.arange(0, BC)
        inside = column < columns
LOADS
        most = tl.maximum(most, tl.where(inside, VALUE, float("-inf")), propagate_nan=tl.PropagateNan.ALL)
    # What combines the threads' maxima leaves out what is no number.
    none = tl.sum((most != most).to(tl.int32))
    tl.store(result + row, tl.where(none > 0, float("nan"), tl.max(most)))
"""


@dataclass
class _Body:
    """The buffers that a kernel reads, with the expressions of their elements, and what it computes of them."""

    buffers: list[ir.Value] = field(default_factory=list)
    statements: Statements = field(default_factory=Statements)


@dataclass(frozen=True)
class Rows:
    """The family: elementwise ops, sums and maxima of rows of an odd length, of fixed sizes."""

    architecture: str
    chosen: Chosen = field(default_factory=dict)
    replaced: dict[ir.Value, ir.Value] = field(default_factory=dict, compare=False)

    name: ClassVar[str] = "rows"

    def plan(self, op: ir.Operation) -> RowPlan | Refusal | None:
        """A plan for an op along rows; nothing for one that all who read it compute themselves."""
        if not _is_along_rows(op):
            return None
        if _is_map(op) and all(_is_inlined(use.owner, use.operand_number) for use in op.results[0].uses):
            return None
        shape = ir.RankedTensorType(op.operands[0].type).shape
        what = f"{'map' if _is_map(op) else 'reduction'} along rows of {shape[0]} x {shape[1]}"
        body = _Body()
        value = _write_map(op, body) if _is_map(op) else _write_reduced(op, body)
        if value is None:
            return Refusal(what, "it computes what kernels are not written for")
        if len(body.buffers) > _MOST_INPUTS:
            return Refusal(what, f"it reads {len(body.buffers)} tensors")
        kernels = {tile: _write_kernel(op, body, value, tile) for tile in TILES}
        question = f"rows {shape[0]}x{shape[1]} {kernels[TILES[0]].label}"
        tile = pick(question, TILES, self.chosen)
        plan = RowPlan(op, what, tuple(body.buffers), kernels, tile, (shape[0], shape[1]), self.replaced, question)
        return replace(plan, is_measured=question in self.chosen)


def _is_along_rows(op: ir.Operation) -> bool:
    """Whether an op has kernels here: by its loops and types, whatever it computes."""
    if op.name != GENERIC or len(op.operands) < 2 or len(is_reduced(op)) != 2 or is_reduced(op)[0]:
        return False
    # A number that is read as it is, and in no tensor, is no operand of a kernel.
    if not all(isinstance(operand.type, ir.RankedTensorType) for operand in op.operands):
        return False
    types = [ir.RankedTensorType(operand.type) for operand in op.operands]
    if not all(type_.has_static_shape and str(type_.element_type) in _ELEMENTS for type_ in types):
        return False
    maps = [str(map_) for map_ in read_maps(op)]
    shape = list(types[0].shape)
    inputs = len(read_inputs(op))
    if inputs == 0 or maps[0] != _WHOLE or any(map_ not in _READS for map_ in maps[:inputs]):
        return False
    if shape[1] % _WARP == 0 or shape[1] < SHORTEST or shape[0] * shape[1] < FEWEST or ends_product(op):
        return False
    if _is_map(op):
        return maps[-1] == _WHOLE and str(types[-1].element_type) in TYPES and str(types[-1].element_type)[0] != "i"
    return maps[inputs] in _RESULTS and str(types[inputs].element_type) == "f32"


def _is_map(op: ir.Operation) -> bool:
    """Whether an op along rows gives rows."""
    return not is_reduced(op)[1] and len(op.results) == 1


def _is_inlined(user: ir.Operation, number: int) -> bool:
    """Whether an op computes anew what it reads there."""
    if isinstance(user, ir.OpView):
        user = user.operation
    if not _is_along_rows(user) or number >= len(read_inputs(user)) or str(read_maps(user)[number]) != _WHOLE:
        return False
    body = _Body()
    value = _write_map(user, body) if _is_map(user) else _write_reduced(user, body)
    return value is not None and len(body.buffers) <= _MOST_INPUTS


def _write_map(op: ir.Operation, body: _Body) -> str | None:
    """Write to ``body`` what an elementwise op computes of each element, and what its inputs are computed of; returns
    the name of the result."""
    block = op.regions[0].blocks[0]
    if list(block.arguments[-1].uses):
        return None
    if op.results[0] in body.statements.names:
        return body.statements.names[op.results[0]]
    (*_, end) = (view.operation for view in block.operations)
    if not _name_inputs(op, body) or (name := write_value(end.operands[0], body.statements)) is None:
        return None
    body.statements.names[op.results[0]] = name
    return name


def _write_reduced(op: ir.Operation, body: _Body) -> str | None:
    """Write the elements that a sum or maximum is taken of. A maximum may come with its place, if nobody reads that."""
    if any(list(result.uses) for result in list(op.results)[1:]):
        return None
    combined = find_combined(op, _START)
    return write_value(combined, body.statements) if combined is not None and _name_inputs(op, body) else None


def _name_inputs(op: ir.Operation, body: _Body) -> bool:
    """Have the arguments of an op's body that are its inputs named; whether all of them can be had."""
    names, arguments = body.statements.names, op.regions[0].blocks[0].arguments
    for value, map_, argument in zip(read_inputs(op), map(str, read_maps(op)), arguments, strict=False):
        source = value.owner if isinstance(value, ir.OpResult) else None
        if source is not None and map_ == _WHOLE and _is_along_rows(source) and _is_map(source):
            inner = _write_map(source, body)
            if inner is None:
                return False
            names[argument] = inner
        elif source is not None and map_ == _WHOLE and (inner := _write_mask(source, body)) is not None:
            names[argument] = inner
        else:
            names[argument] = _add_buffer(value, map_, str(argument.type), body)
    return True


def _write_mask(op: ir.Operation, body: _Body) -> str | None:
    """Write to ``body`` an elementwise op that makes truths of rows, of columns or of both, such as whether a column is
    the one of the row's class, where there is a kernel for it: read as a tensor it would be written to memory for
    that."""
    if op.name != GENERIC or any(is_reduced(op)) or len(op.results) != 1 or not read_inputs(op):
        return None
    if not all(isinstance(value.type, ir.RankedTensorType) for value in read_inputs(op)):
        return None
    type_, inputs = ir.RankedTensorType(op.results[0].type), len(read_inputs(op))
    elements = [ir.RankedTensorType(value.type).element_type for value in read_inputs(op)]
    maps = [str(map_) for map_ in read_maps(op)]
    if str(type_.element_type) != "i1" or not type_.has_static_shape or maps[-1] != _WHOLE:
        return None
    if any(map_ not in _READS for map_ in maps[:inputs]) or any(str(element) not in _ELEMENTS for element in elements):
        return None
    statements = body.statements
    buffers, lines, names = list(body.buffers), list(statements.lines), dict(statements.names)
    name = _write_map(op, body)
    if name is None:
        body.buffers[:], statements.lines[:] = buffers, lines
        statements.names.clear()
        statements.names.update(names)
    return name


def _add_buffer(value: ir.Value, map_: str, element: str, body: _Body) -> str:
    """The name of an element of a buffer, loaded once."""
    key = (value, map_)
    if key in body.statements.names:
        return body.statements.names[key]
    if value not in body.buffers:
        body.buffers.append(value)
    at = _READS[map_]
    masked = ", mask=inside, other=0" if "column" in at else ""
    load = f"tl.load(p{body.buffers.index(value)} + {at}{masked})" + " != 0" * (element == "i1")
    return body.statements.assign(key, load)


def _write_kernel(op: ir.Operation, body: _Body, value: str, tile: RowTile) -> Kernel:
    """The kernel, with its source."""
    if _is_map(op):
        form, kind = _MAP, "map"
    else:
        (*_, end) = (view.operation for view in op.regions[0].blocks[0].operations)
        form, kind = (_SUM, "sum") if end.operands[0].owner.name == "arith.addf" else (_MAXIMUM, "maximum")
    indent = "    " if kind == "map" else "        "
    loads = "\n".join(f"{indent}{line}" for line in body.statements.lines)
    element = str(ir.RankedTensorType(op.results[0].type).element_type)
    result = f"({value}).to({TYPES[element]})"
    buffers = ", ".join([*(f"p{number}" for number in range(len(body.buffers))), "result"])
    text = _HEAD.replace("BUFFERS", buffers) + form.replace("LOADS", loads).replace("VALUE", result)
    types = [str(ir.RankedTensorType(buffer.type).element_type) for buffer in body.buffers]
    pointers = (*((f"p{number}", type_) for number, type_ in enumerate(types)), ("result", element))
    label = f"rows_{kind}_{sha256(f'{text} {types} {tile}'.encode()).hexdigest()[:8]}"
    return Kernel(label, "rows", "along", pointers, ("columns",), (), (("BC", tile.columns),), tile.warps, 1, text)


@dataclass(frozen=True)
class RowPlan:
    """An op along rows as a dispatch."""

    op: ir.Operation
    what: str
    buffers: tuple[ir.Value, ...]
    by_tile: Mapping[RowTile, Kernel]
    tile: RowTile
    shape: tuple[int, int]
    replaced: dict[ir.Value, ir.Value] = field(compare=False)
    question: str
    is_measured: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.kernel.label}" + MEASURED * self.is_measured

    @property
    def kernel(self) -> Kernel:
        """The kernel on its tiles."""
        return self.by_tile[self.tile]

    def launch(self, tile: RowTile) -> Launch:
        """The kernel on tiles, for these sizes."""
        rows, columns = self.shape
        return Launch(self.by_tile[tile], (rows, -(-columns // tile.columns) if _is_map(self.op) else 1, 1), (columns,))

    def questions(self) -> list[Question]:
        """The tiles of the kernel."""
        inputs, given = tuple(map(find_buffer, self.buffers)), (find_buffer(self.op.results[0]),)
        taken = tuple(range(len(inputs)))
        trials = {str(tile): Trial(inputs, (Run(self.launch(tile), taken, given),)) for tile in TILES}
        return [Question(self.question, trials)]

    def kernels(self) -> dict[Kernel, bool]:
        """The kernel."""
        return {self.kernel: False}

    def apply(self, compiled: Compiled) -> None:
        """Have all that reads the op take a dispatch's result. The op stays, for nobody: what was planned of it, and is
        not applied yet, may name its values."""
        operands = [self.replaced.get(buffer, buffer) for buffer in self.buffers]
        result = self.op.results[0]
        value = create_dispatch(self.launch(self.tile), compiled[self.kernel], operands, result.type, self.op)
        result.replace_all_uses_with(value)
        self.replaced[result] = value
