# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scratch memory of a program's functions, read off IREE's IR after its stream phase.

What a function allocates there is a constant, or worked out from its arguments' sizes by integer arithmetic, which is
done here with the sizes of the trace (``bwd.sizes`` on the module).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeVar

from retrograd.contract.attributes import BWD_JOINED, BWD_PLACED
from retrograd.contract.roles import INTO, SIZE
from retrograd.contract.sizes import evaluate_size, parse_shape
from retrograd.pipelines.toolchain.pool import Pool

Value = TypeVar("Value")

LAYOUT_PASS = "iree-stream-fold-uniform-operands"
"""After this pass of IREE's, one of the last of its stream phase, :func:`read_transients` reads."""

_FUNCTION = re.compile(r"^  util\.func public @(\w+)\((.*?)\{\n(.*?)^  \}", flags=re.MULTILINE | re.DOTALL)
_PLACED = re.compile(rf'{re.escape(BWD_PLACED)} = "([^"]*)"')
_JOINED = re.compile(rf'{re.escape(BWD_JOINED)} = "([^"]*)"')
_HINTS = re.compile(r"bwd\.sizes = \{([^}]*)\}")
# An argument that is no tensor.
_NUMBER = re.compile(r"%arg\d+: (?!!hal\.buffer_view)")
_DIMENSION = "hal.buffer_view.dim"
_ARGUMENT = re.compile(r"(%\w+): [!\w.]+ \{([^}]*)\}")
_VALUE = re.compile(r"%[\w-]+|(?<=\[)\d+(?=\])")
_NAME = re.compile(r"%[\w-]+")
# A block's label with what it takes, or an op of a function's body; not those of an op's regions.
_LINE = re.compile(
    r"^(?:  \^(?P<label>\w+)(?P<taken>.*)|    (?:(?P<results>%[^=]*?) = )?(?P<op>[a-z_]+\.[\w.]+) ?(?P<rest>.*))",
    flags=re.MULTILINE,
)
_TAKEN = re.compile(r"(%[\w-]+): ")
_JUMP = re.compile(r"\^(\w+)(?:\((.*?) : [^)]*\))?")
_JUMPS = ("cf.br", "cf.cond_br")
_EXECUTE = "stream.cmd.execute"
_ALLOCA, _DEALLOCA, _AWAIT = "stream.resource.alloca", "stream.resource.dealloca", "stream.timepoint.await"
# What a loop carries that starts with a constant is of that kind.
_SCRATCH = re.compile(r"!stream\.resource<(?:transient|constant)>\{(%[\w-]+)\}")
# What a function allocates that takes storage for all its results: one of them that it writes somewhere else first, as
# where two results are one value.
_ALLOCATED = re.compile(r"!stream\.resource<(?:transient|constant|external)>\{(%[\w-]+)\}")
_OPERATIONS: dict[str, Callable[..., int]] = {
    "addi": operator.add,
    "subi": operator.sub,
    "muli": operator.mul,
    "divsi": operator.floordiv,
    "divui": operator.floordiv,
    "floordivsi": operator.floordiv,
    "ceildivsi": lambda a, b: -(-a // b),
    "ceildivui": lambda a, b: -(-a // b),
    "remsi": operator.mod,
    "remui": operator.mod,
    "minsi": min,
    "minui": min,
    "maxsi": max,
    "maxui": max,
    "index_cast": int,
    "index_castui": int,
    "select": lambda condition, a, b: a if condition else b,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    name: compare
    for sign in "su"
    for name, compare in (
        (f"{sign}lt", operator.lt),
        (f"{sign}le", operator.le),
        (f"{sign}gt", operator.gt),
        (f"{sign}ge", operator.ge),
    )
} | {"eq": operator.eq, "ne": operator.ne}


def read_transients(stream: str, *, frees_late: bool = False, is_launched: bool = False) -> dict[str, int]:
    """Peak scratch bytes of each exported function, at the sizes of the trace; functions of which they cannot be told
    are left out.

    Transient resources are allocated and freed as the function runs, step by step through its loops; where a driver
    ``frees_late``, when the host has waited for it: it runs ahead of the device, and what it allocates is there at
    once. Where the program ``is_launched``, a function without jumps and open sizes becomes a launch plan, which has
    one piece of memory for all that it allocates. (The statistics that IREE can write add up all functions.)
    """
    found = _HINTS.search(stream)
    hints = {name: int(size) for name, size in re.findall(r"(\w+) = (\d+)", found[1])} if found else {}
    peaks: dict[str, int] = {}
    for name, signature, body in _FUNCTION.findall(stream):
        blocks = _read_blocks(body)
        has_sizes = _NUMBER.search(signature) or _DIMENSION in body
        pool = Pool() if is_launched and len(blocks) == 1 and not has_sizes else None
        counted = _ALLOCATED if name.endswith(INTO) else _SCRATCH
        run = _Run(frees_late and pool is None, counted, _read_arguments(signature, hints), pool)
        try:
            run.follow(blocks)
        except _UnknownSize:
            continue
        peaks[name] = run.peak
    return peaks


def read_placed(stream: str) -> dict[str, int]:
    """Bytes of the results of each exported function that lie in arguments which its caller gave up, if any do."""
    found = ((name, _PLACED.search(signature)) for name, signature, _ in _FUNCTION.findall(stream))
    return {
        name: sum(int(placed.rpartition(":")[2]) for placed in said[1].split(","))
        for name, said in found
        if said is not None
    }


def read_joined(stream: str) -> dict[str, int]:
    """Bytes of the arguments of each exported function that it takes one behind another, if it takes any so."""
    found = ((name, _JOINED.search(signature)) for name, signature, _ in _FUNCTION.findall(stream))
    return {
        name: sum(int(member.split(":")[1]) for member in said[1].split(",") if member.endswith(":0"))
        for name, said in found
        if said is not None
    }


class _UnknownSize(Exception):
    """A size is not known, nor what it follows from."""


@dataclass(frozen=True)
class _Op:
    """One op: its results, name, what is written after it, and the values that are named there."""

    results: tuple[str, ...]
    name: str
    rest: str
    used: tuple[str, ...]


@dataclass(eq=False)
class _Block:
    """A block of a function: what it takes and its ops; and of the values from before it those that are read from its
    begin on, ``live``, and from its end on, ``after``."""

    label: str
    taken: tuple[str, ...] = ()
    ops: list[_Op] = field(default_factory=list)
    live: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()

    def jumps(self) -> list[tuple[str, tuple[str, ...]]]:
        """The blocks that may follow, by label, with what each is given."""
        if not self.ops or self.ops[-1].name not in _JUMPS:
            return []
        return [(label, tuple(_NAME.findall(given))) for label, given in _JUMP.findall(self.ops[-1].rest)]

    def find_live(self, number: int = 0) -> frozenset[str]:
        """Find the values that are read from the op of that number on and were there before it."""
        ops = self.ops[number:]
        return self.after.union(*(op.used for op in ops)).difference(*(op.results for op in ops))


@dataclass(eq=False)
class _Buffer:
    """An allocated buffer of so many bytes; ``offset`` is its place in a launch plan's memory."""

    size: int
    offset: int = 0


@dataclass
class _Run:
    """Runs a function for what it allocates, of the resources ``counted``; ``values`` are the numbers that are known,
    ``pool`` is the memory of a launch plan, ``peak`` is the most bytes that there were at one time."""

    frees_late: bool
    counted: re.Pattern[str]
    values: dict[str, int]
    pool: Pool | None = None
    peak: int = 0
    # What is allocated and not free yet.
    held: set[_Buffer] = field(default_factory=set)
    # By name, what a resource is part of, and what is free once a timepoint is reached and is not free yet.
    buffers: dict[str, frozenset[_Buffer]] = field(default_factory=dict)
    behind: dict[str, frozenset[_Buffer]] = field(default_factory=dict)
    # What nothing refers to any longer, while the device may be at work on it.
    dropped: set[_Buffer] = field(default_factory=set)
    in_order: bool = False

    def follow(self, blocks: Mapping[str, _Block]) -> None:
        """Run from the first block to the last; from a jump on that depends on data, each block once.

        Raises:
            _UnknownSize: something is allocated of a size that is not known.
        """
        order = list(blocks.values())
        block: _Block | None = order[0]
        while block is not None:
            for number, op in enumerate(block.ops):
                if op.name == _ALLOCA and len(order) > 1 and not self.in_order:
                    self._keep(block.find_live(number))
                self._run(op)
            block = self._jump(block, blocks)

    def _run(self, op: _Op) -> None:
        """One op: a number, or memory that is taken or given back."""
        for name in op.results:
            self.values.pop(name, None)
        number = _work_out(op.name, op.rest, self.values)
        if number is not None:
            self.values[op.results[0]] = number
            return
        reached, given = _united(self.behind, op.used), _united(self.buffers, op.used)
        if op.name == _ALLOCA:
            # Its second result is a timepoint, which refers to no memory.
            self.buffers[op.results[0]] = self._allocate(op)
        elif op.name == _DEALLOCA:
            reached |= given
        elif op.name != _EXECUTE:
            self.buffers.update(dict.fromkeys(op.results, given))
        if op.name == _AWAIT or not self.frees_late:
            self._free(reached)
        if op.name == _AWAIT:
            self._free(self.dropped)
            self.dropped.clear()
        self.behind.update(dict.fromkeys(op.results, reached & self.held))

    def _allocate(self, op: _Op) -> frozenset[_Buffer]:
        found = self.counted.search(op.rest)
        if found is None:
            return frozenset()
        if found[1] not in self.values:
            raise _UnknownSize(found[1])
        size = self.values[found[1]]
        buffer = _Buffer(size, self.pool.allocate(size) if self.pool else 0)
        self.held.add(buffer)
        self.peak = self.pool.size if self.pool else max(self.peak, sum(one.size for one in self.held))
        return frozenset([buffer])

    def _free(self, buffers: Set[_Buffer]) -> None:
        if self.pool is not None:
            for buffer in self.held & buffers:
                self.pool.free(buffer.offset)
        self.held -= buffers

    def _keep(self, names: Set[str]) -> None:
        """Free what none of the values refers to that are still read, ``names``: in a function with jumps IREE frees
        little by name, and the rest as its last reference goes."""
        kept = {name: buffers for name, buffers in self.buffers.items() if name in names}
        lost = self.held - _united(kept, kept) - _united(self.behind, self.behind)
        self.buffers = kept
        if self.frees_late:
            self.dropped |= lost
        else:
            self._free(lost)

    def _jump(self, block: _Block, blocks: Mapping[str, _Block]) -> _Block | None:
        """The block that comes next, which is given what it takes."""
        jumps = block.jumps()
        if len(jumps) == 2:
            condition = self.values.get(block.ops[-1].used[0])
            self.in_order = self.in_order or condition is None
            jumps = jumps[:1] if condition else jumps[1:]
        if self.in_order:
            labels = list(blocks)
            following = labels[labels.index(block.label) + 1 :]
            return blocks[following[0]] if following else None
        if not jumps:
            return None
        ((label, given),) = jumps
        after = blocks[label]
        _hand_over(self.values, given, after.taken)
        _hand_over(self.buffers, given, after.taken)
        _hand_over(self.behind, given, after.taken)
        self._keep(after.live | {*after.taken})
        return after


def _united(table: Mapping[str, frozenset[_Buffer]], names: Iterable[str]) -> frozenset[_Buffer]:
    return frozenset[_Buffer]().union(*(table.get(name, ()) for name in names))


def _hand_over(table: dict[str, Value], given: Sequence[str], taken: Sequence[str]) -> None:
    """Have a block's arguments, ``taken``, be what it is ``given``."""
    moved = {new: table[old] for new, old in zip(taken, given, strict=True) if old in table}
    for name in taken:
        table.pop(name, None)
    table.update(moved)


def _read_blocks(body: str) -> dict[str, _Block]:
    """The blocks of a function by label, the first first, whose label is empty."""
    block = _Block("")
    blocks = {"": block}
    for line in _LINE.finditer(body):
        if line["label"]:
            block = blocks[line["label"]] = _Block(line["label"], tuple(_TAKEN.findall(line["taken"])))
            continue
        results = tuple(_NAME.findall(line["results"] or ""))
        block.ops.append(_Op(results, line["op"], line["rest"], tuple(_NAME.findall(line["rest"]))))
    # What a block reads may be of any block before it, a later round of a loop's among them.
    changed = len(blocks) > 1
    while changed:
        changed = False
        for one in blocks.values():
            one.after = frozenset[str]().union(*(blocks[label].live for label, _ in one.jumps()))
            live = one.find_live().difference(one.taken)
            changed = changed or live != one.live
            one.live = live
    return blocks


def _read_arguments(signature: str, hints: Mapping[str, int]) -> dict[str, int]:
    """The numbers among the arguments, and the sizes of tensors as ``%arg0[1]``."""
    values: dict[str, int] = {}
    for name, attributes in _ARGUMENT.findall(signature):
        fields = dict(re.findall(r'bwd\.(\w+) = "([^"]*)"', attributes))
        if fields.get("role") == SIZE and fields.get("name") in hints:
            values[name] = hints[fields["name"]]
        for axis, size in enumerate(parse_shape(fields.get("shape", ""))):
            values[f"{name}[{axis}]"] = evaluate_size(size, hints)
    return values


def _work_out(op: str, rest: str, values: Mapping[str, int]) -> int | None:
    if op == "arith.constant":
        constant = re.match(r"(-?\d+) : ", rest)
        return int(constant[1]) if constant else None
    # The types that follow a colon have no values in them.
    names = _VALUE.findall(rest.partition(" loc(")[0])
    if op == _DIMENSION:
        return values.get(f"{names[0]}[{names[1]}]") if len(names) == 2 else None
    operands = [values[n] for n in names if n in values]
    if not operands or len(operands) < len(names):
        return None
    if op == "util.optimization_barrier" and len(operands) == 1:
        return operands[0]
    if op == "util.align":
        return -(-operands[0] // operands[1]) * operands[1]
    if op == "arith.cmpi":
        return int(_COMPARISONS[rest.partition(",")[0]](*operands))
    operation = _OPERATIONS.get(op.removeprefix("arith.")) if op.startswith("arith.") else None
    return None if operation is None else operation(*operands)
