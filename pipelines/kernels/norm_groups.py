# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Finds groups of ops along the same rows, such as a layer norm's: sums and maxima of rows, what is computed element by
element between them, before and after, and sums down the columns of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import floor, inf, prod
from typing import Literal

from retrograd.dialects import ir
from retrograd.pipelines.kernels.expressions import TYPES, Statements, find_combined, write_value
from retrograd.pipelines.kernels.products import ends_product
from retrograd.pipelines.transforms.helpers.generics import (
    GENERIC,
    is_elementwise,
    is_reduced,
    read_inputs,
    read_loop_sizes,
    read_maps,
)
from retrograd.pipelines.transforms.helpers.maker import Maker
from retrograd.pipelines.transforms.linalg.bwd_export_results import ALIAS

FEWEST = 1 << 18
"""Rows of fewer elements stay with IREE, as do those that are shorter or longer than these."""

SHORTEST, LONGEST = 64, 8192
# Offsets are of 32 bits.
_MOST = 1 << 31
# As many buffers as IREE's driver passes, less scratch memory.
_MOST_BUFFERS, _MOST_MEMBERS, _MOST_DOWN = 15, 80, 6
STARTS = {"arith.addf": 0.0, "arith.maximumf": -inf}
"""What a sum and a maximum begin with."""

_VIEWS = ("tensor.expand_shape", "tensor.collapse_shape", ALIAS)
WHOLE, ROW, COLUMN, ALL = "row * columns + column", "row", "column", "0"
"""Where elements lie that are read for each place, each row, each column, and once."""

Kind = Literal["map", "row", "along", "down", "view"]
"""How an op goes over rows: for each element; for each row; a sum along them; a sum down columns; a view of it."""


@dataclass(frozen=True)
class Space:
    """The shape that a group runs over: ``rows`` of ``columns`` elements each."""

    rows: int
    columns: int


def find_space(op: ir.Operation) -> Space | None:
    """The rows that a sum or maximum goes along, if they are of a size that has kernels here."""
    if op.name != GENERIC or len(op.results) != 1 or (sizes := _find_sizes(op)) is None:
        return None
    reduced = is_reduced(op)
    if len(sizes) < 2 or not reduced[-1] or any(reduced[:-1]):
        return None
    space = Space(prod(sizes[:-1]), sizes[-1])
    fits = SHORTEST <= space.columns <= LONGEST and FEWEST <= space.rows * space.columns < _MOST
    return space if fits else None


def classify(op: ir.Operation, space: Space) -> Kind | None:
    """How an op goes over rows; ``None`` where it does not, or computes what there are no statements for."""
    if op.name in _VIEWS:
        return "view"
    # What has no loops computes one number, and goes over no rows.
    if op.name != GENERIC or len(op.results) != 1 or not read_inputs(op) or not (sizes := _find_sizes(op)):
        return None
    if str(ir.RankedTensorType(op.results[0].type).element_type) not in (*TYPES, "i1") or ends_product(op):
        return None
    kind = _find_kind(op, sizes, space)
    return kind if kind is not None and _can_be_written(op, kind) else None


def _find_kind(op: ir.Operation, sizes: Sequence[int], space: Space) -> Kind | None:
    reduced, result = is_reduced(op), find_place(op, len(op.operands) - 1, space)
    is_whole = prod(sizes) == space.rows * space.columns and sizes[-1] == space.columns
    if is_elementwise(op):
        return "map" if is_whole else "row" if prod(sizes) == space.rows else None
    if not is_whole or len(reduced) < 2 or str(ir.RankedTensorType(op.results[0].type).element_type) != "f32":
        return None
    if reduced[-1] and not any(reduced[:-1]):
        return "along" if result == ROW else None
    return "down" if not reduced[-1] and all(reduced[:-1]) and result == COLUMN else None


def _sums_down(op: ir.Operation) -> bool:
    """Whether an op adds rows up, the last of its loops being columns; what has no loops adds nothing up."""
    reduced = is_reduced(op)
    return bool(reduced) and reduced[0] and not reduced[-1]


def _can_be_written(op: ir.Operation, kind: Kind) -> bool:
    block = op.regions[0].blocks[0]
    statements = Statements(names={argument: f"x{n}" for n, argument in enumerate(block.arguments)})
    value = find_value(op, kind)
    is_read = list(block.arguments[len(block.arguments) - 1].uses)
    return (
        value is not None and len(is_read) == (kind in ("along", "down")) and write_value(value, statements) is not None
    )


def find_value(op: ir.Operation, kind: Kind) -> ir.Value | None:
    """The value that the body of an op gives, or adds up."""
    if kind in ("map", "row"):
        (*_, end) = (view.operation for view in op.regions[0].blocks[0].operations)
        value: ir.Value = end.operands[0]
        return value
    return find_combined(op, STARTS if kind == "along" else {"arith.addf": 0.0})


def _find_sizes(op: ir.Operation) -> list[int] | None:
    """The sizes of an op's loops; ``None`` where one is open, or an operand is no tensor."""
    if not all(isinstance(operand.type, ir.RankedTensorType) for operand in op.operands):
        return None
    return read_loop_sizes(op, list(op.operands))


def find_place(op: ir.Operation, number: int, space: Space) -> str | None:
    """Where the element of an operand lies that an op reads, or writes, as text in Triton."""
    map_, sizes = read_maps(op)[number], _find_sizes(op)
    shape = ir.RankedTensorType(op.operands[number].type).shape
    if sizes is None:
        return None
    steps, strides = [0] * len(sizes), [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    for expression, stride in zip(map_.results, strides, strict=True):
        if isinstance(expression, ir.AffineDimExpr):
            steps[expression.position] += stride
        elif not isinstance(expression, ir.AffineConstantExpr) or expression.value != 0:
            return None
    *leading, last = zip(sizes, steps, strict=True)
    if sizes[-1] != space.columns or prod(sizes) == space.rows:
        leading, last = [*leading, last], (1, 0)
    has_columns = last[1] == 1 and last[0] > 1
    if last[1] > 1 or (last[1] == 1 and not has_columns):
        return None
    row = _find_row([pair for pair in leading if pair[0] > 1], space.columns if has_columns else 1)
    if row is None:
        return None
    if row == ALL:
        return COLUMN if has_columns else ALL
    return f"{row} * columns + column" if has_columns else row


def _find_row(leading: Sequence[tuple[int, int]], width: int) -> str | None:
    """The number of a row, of which there are ``width`` elements each, by sizes and steps of its loops."""
    sizes, steps = [size for size, _ in leading], [step for _, step in leading]
    if not any(steps):
        return ALL
    first = next(n for n, step in enumerate(steps) if step)
    end = len(steps) - next(n for n, step in enumerate(reversed(steps)) if step)
    if any(
        outer != inner * size
        for (outer, inner), size in zip(pairwise(steps[first:end]), sizes[first + 1 : end], strict=True)
    ):
        return None
    if steps[end - 1] != width:
        return None
    within, behind = prod(sizes[first:]), prod(sizes[end:])
    row = f"{ROW} % {within}" if first else ROW
    return f"({row} // {behind})" if behind > 1 else f"({row})" if first else row


@dataclass(eq=False)
class Placed:
    """An op and its place in its block. Ops themselves have another hash as soon as they read other values."""

    op: ir.Operation
    place: float
    _reads: dict[tuple[int, Space], str | None] = field(default_factory=dict, init=False)

    def reads(self, number: int, space: Space) -> str | None:
        """Where the element of an operand lies, as :func:`find_place` says, which is asked once: groups that grow ask
        for each op again."""
        key = (number, space)
        if key not in self._reads:
            self._reads[key] = find_place(self.op, number, space)
        return self._reads[key]

    @property
    def element(self) -> str:
        """The type of the elements of its result."""
        return str(ir.RankedTensorType(self.op.results[0].type).element_type)


@dataclass
class Group:
    """Ops along the same rows, in order; what they read, and those that others read, or that are results. ``copied``
    are computed here and where else they are read."""

    space: Space
    kinds: dict[Placed, Kind]
    sources: Mapping[ir.Value, Placed]
    inputs: list[ir.Value] = field(default_factory=list)
    given: list[Placed] = field(default_factory=list)
    copied: set[Placed] = field(default_factory=set)
    ready: float = -1.0

    def root(self, value: ir.Value) -> ir.Value:
        """The value that a view in the group is of."""
        while (source := self.sources.get(value)) is not None and self.kinds.get(source) == "view":
            value = source.op.operands[0]
        return value

    def source(self, value: ir.Value) -> Placed | None:
        """The op of the group that computes a value."""
        found = self.sources.get(self.root(value))
        return found if found in self.kinds else None

    def holds(self, value: ir.Value) -> bool:
        """Whether a value is computed here, for each element or each row."""
        source = self.source(value)
        return source is not None and self.kinds[source] in ("map", "row", "along")

    def computed(self, kind: Kind) -> list[Placed]:
        """The ops of a kind."""
        return [op for op, own in self.kinds.items() if own == kind]


@dataclass
class Finder:
    """Finds the groups of a block, each once."""

    ops: list[Placed]
    sources: dict[ir.Value, Placed]
    taken: set[Placed] = field(default_factory=set)

    @classmethod
    def of(cls, block: ir.Block) -> Finder:
        """Make the finder of a block as it is."""
        ops = [Placed(view.operation, float(place)) for place, view in enumerate(block.operations)]
        return cls(ops, {result: placed for placed in ops for result in placed.op.results})

    def find(self, op: ir.Operation) -> Group | None:
        """The group of a sum or maximum along rows; ``None`` where there is more to it than a group can have, or less
        than pays: one sum, and nothing else."""
        space, seed = find_space(op), self.sources[op.results[0]]
        if space is None or seed in self.taken or classify(op, space) != "along":
            return None
        group = self._check(Group(space, {seed: "along"}, self.sources))
        while group is not None and (larger := self._enlarge(group)) is not None:
            group = larger
        group = None if group is None else self._leave_widenings(group)
        if group is None or not (group.computed("map") and any(given is not seed for given in group.given)):
            return None
        self.taken.update(op for op in group.kinds if op not in group.copied)
        return group

    def mark(self, group: Group) -> ir.Operation:
        """Put an op where the kernel of a group is to be, and have what reads the group be behind that."""
        number = floor(group.ready) + 1
        for op in group.kinds.keys() - group.copied:
            op.place = number - 0.5
        before = self.ops[number].op
        type_ = ir.RankedTensorType.get([0], ir.F32Type.get(), loc=before.location)
        return Maker.before(before).op("tensor.empty", [], [type_])

    def _enlarge(self, group: Group) -> Group | None:
        """The group with one more op, or an op and the view that it is read through."""
        for added in self._neighbors(group):
            kinds = {op: classify(op.op, group.space) for op in added if op not in self.taken}
            known = {op: kind for op, kind in kinds.items() if kind is not None}
            if len(known) < len(added):
                continue
            larger = self._check(Group(group.space, group.kinds | known, self.sources))
            if larger is not None:
                return larger
        return None

    def _neighbors(self, group: Group) -> Iterator[list[Placed]]:
        for value in group.inputs:
            source = self.sources.get(value)
            if source is None:
                continue
            inner = self.sources.get(source.op.operands[0]) if source.op.name in _VIEWS else None
            if inner is not None:
                yield [inner, source]
            elif source.op.name == GENERIC:
                yield [source]
        found = {user for op, kind in group.kinds.items() if kind != "down" for user in self._users(op)}
        # Sums down columns of what is read in any case.
        read = {self._in_block(use.owner) for value in group.inputs for use in value.uses}
        found |= {op for op in read if op.op.name == GENERIC and _sums_down(op.op)}
        for user in sorted(found - group.kinds.keys(), key=lambda user: user.place):
            yield [user]

    def _check(self, group: Group) -> Group | None:
        """The group, in order, with what it reads and gives; ``None`` where it cannot be computed at one place."""
        ops = sorted(group.kinds, key=lambda op: op.place)
        if len(ops) > _MOST_MEMBERS:
            return None
        made = Group(group.space, {op: group.kinds[op] for op in ops}, self.sources)
        limit = inf
        for op in ops:
            if not self._read(op, made):
                return None
            outside = [user for user in self._users(op) if user not in group.kinds]
            if op in made.copied or not (outside or self._is_seen(op, made)):
                continue
            limit = min([limit, *(user.place for user in outside)])
            if made.kinds[op] != "view":
                made.given.append(op)
        few = len(made.inputs) + len(made.given) <= _MOST_BUFFERS and len(made.computed("down")) <= _MOST_DOWN
        is_written = all(op.element != "i1" for op in made.given)
        # The kernel stands half a step behind the last that it reads.
        return made if is_written and few and floor(made.ready) + 0.5 < limit else None

    def _is_seen(self, op: Placed, group: Group) -> bool:
        """Whether a result of the group is read through views, or written to storage that is given."""
        views = [user for user in self._users(op) if group.kinds.get(user) == "view"]
        return any(
            view.op.name == ALIAS
            or any(user not in group.kinds for user in self._users(view))
            or self._is_seen(view, group)
            for view in views
        )

    def _read(self, op: Placed, group: Group) -> bool:
        """Note what an op reads; whether it can be read there."""
        kind = group.kinds[op]
        if kind == "view":
            return group.holds(op.op.operands[0])
        wholes, copies = set[ir.Value](), kind in ("map", "row")
        for number, value in enumerate(read_inputs(op.op)):
            place = op.reads(number, group.space)
            if place is None:
                return False
            source = group.source(value)
            if source is not None:
                known = {"map": WHOLE, "row": ROW, "along": ROW}.get(group.kinds[source])
                if place != known:
                    return False
                copies &= source in group.copied
                wholes |= {group.root(value)} if place == WHOLE else set()
            else:
                wholes |= {value} if place == WHOLE else set()
                own = self.sources.get(value)
                group.ready = max(group.ready, -1.0 if own is None else own.place)
                group.inputs += [value] * (value not in group.inputs)
        if copies and len(wholes) <= 1:
            group.copied.add(op)
        return True

    def _users(self, op: Placed) -> list[Placed]:
        """The ops of the block that read a result, or hold what does."""
        return [self._in_block(use.owner) for result in op.op.results for use in result.uses]

    def _in_block(self, user: ir.Operation | ir.OpView) -> Placed:
        op = user.operation if isinstance(user, ir.OpView) else user
        while op.block != self.ops[0].op.block:
            op = op.parent.operation if isinstance(op.parent, ir.OpView) else op.parent
        return self.sources[op.results[0]] if list(op.results) else next(own for own in self.ops if own.op == op)

    def _leave_widenings(self, group: Group) -> Group | None:
        """The group less what only widens a tensor for others: they read the narrow one."""
        wider = [op for op in group.given if _widens(op.op) and group.holds(op.op.operands[0])]
        unread = {op for op in wider if all(user not in group.kinds for user in self._users(op))}
        if not unread:
            return group
        kept = {op: kind for op, kind in group.kinds.items() if op not in unread}
        return self._check(Group(group.space, kept, self.sources))


def _widens(op: ir.Operation) -> bool:
    body = [view.operation.name for view in op.regions[0].blocks[0].operations]
    return body == ["arith.extf", "linalg.yield"]
