# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Finds groups of ops along the same rows, such as a layer norm's: sums and maxima of rows, what is computed element by
element between them, before and after, and sums down the columns of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import floor, inf

from retrograd.dialects import ir
from retrograd.pipelines.kernels.row_ops import ROW, VIEWS, WHOLE, Kind, Space, classify, find_place, find_space
from retrograd.pipelines.transforms.helpers.generics import GENERIC, is_reduced, read_inputs
from retrograd.pipelines.transforms.helpers.maker import Maker
from retrograd.pipelines.transforms.linalg.bwd_export_results import ALIAS

# As many buffers as IREE's driver passes, less scratch memory.
_MOST_BUFFERS, _MOST_MEMBERS, _MOST_DOWN = 15, 80, 6


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
            inner = self.sources.get(source.op.operands[0]) if source.op.name in VIEWS else None
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


def _sums_down(op: ir.Operation) -> bool:
    """Whether an op adds rows up, the last of its loops being columns; what has no loops adds nothing up."""
    reduced = is_reduced(op)
    return bool(reduced) and reduced[0] and not reduced[-1]


def _widens(op: ir.Operation) -> bool:
    body = [view.operation.name for view in op.regions[0].blocks[0].operations]
    return body == ["arith.extf", "linalg.yield"]
