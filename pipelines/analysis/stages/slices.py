# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Pieces of a function, cut out where the values in it are known, and the search for the smallest one at fault.

The search is delta debugging on a graph (Zeller, Hildebrandt, "Simplifying and Isolating Failure-Inducing Input",
2002): first the shortest prefix at fault by bisection, then what of its last op's ancestors the fault needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from retrograd.pipelines.analysis.partition.joint_graph import JointGraph


@dataclass(frozen=True)
class Slice:
    """Ops of a function by number, in order; arguments and results are values of it, by number."""

    arguments: tuple[int, ...]
    ops: tuple[int, ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class SliceGraph:
    """A function, of which the values named in ``known`` can be given to a slice or be compared with what it gives. Ops
    that give such a value are *steps*. The others (constants, lists, shapes) go wherever a step needs them."""

    graph: JointGraph
    known: Collection[str]

    @cached_property
    def observable(self) -> frozenset[int]:
        """Values that are known; a literal is none, since it is part of the code that takes it."""
        return frozenset(
            v.id
            for v in self.graph.values
            if v.is_tensor and v.name in self.known and (v.producer is None or self.graph.ops[v.producer].operands)
        )

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Ops that give an observable value and that the function's results need, in order."""
        needed = self.graph.required_ops(self.returned, ())
        return tuple(op.id for op in self.graph.ops if op.id in needed and not self.observable.isdisjoint(op.results))

    @property
    def returned(self) -> tuple[int, ...]:
        """The values that the function returns."""
        return (*self.graph.forward_results, *self.graph.backward_results)

    def operands(self, op: int) -> tuple[int, ...]:
        """Observable values that an op takes, by itself or through ops that are no steps."""
        found: dict[int, None] = {}
        pending = list(reversed(self.graph.ops[op].operands))
        while pending:
            value = pending.pop()
            producer = self.graph.values[value].producer
            if value in self.observable:
                found[value] = None
            elif producer is not None:
                pending.extend(reversed(self.graph.ops[producer].operands))
        return tuple(found)

    def ancestors(self, op: int) -> tuple[int, ...]:
        """Steps that an op depends on, the nearest in program order first."""
        needed = self.graph.required_ops(self.graph.ops[op].operands, ())
        return tuple(step for step in reversed(self.steps) if step in needed)

    def frontier(self, prefix: Collection[int]) -> tuple[int, ...]:
        """Observable results of the steps of ``prefix`` that other steps take or the function returns."""
        kept = set(prefix)
        wanted = {v for op in self.steps if op not in kept for v in self.operands(op)}
        wanted.update(v for r in self.returned for v in self._observed(r))
        return tuple(v for op in prefix for v in self.graph.ops[op].results if v in wanted and v in self.observable)

    def cut(self, steps: Collection[int], results: Sequence[int]) -> Slice:
        """The slice that gives ``results`` by those of ``steps`` that they need; it takes all other values."""
        kept, ops, arguments, seen = set(steps), set[int](), set[int](), set[int]()
        pending = list(results)
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            producer = self.graph.values[value].producer
            if producer is None or (producer not in kept and value in self.observable):
                arguments.add(value)
            elif producer not in ops:
                ops.add(producer)
                pending.extend(self.graph.ops[producer].operands)
        return Slice(tuple(sorted(arguments)), tuple(sorted(ops)), tuple(results))

    def _observed(self, value: int) -> Iterable[int]:
        producer = self.graph.values[value].producer
        if value in self.observable:
            return (value,)
        return () if producer is None else self.operands(producer)


@dataclass(frozen=True)
class Fault:
    """A slice at fault, and the step in it that is the first with which it is."""

    step: int
    slice: Slice


def find_fault(graph: SliceGraph, is_faulty: Callable[[Slice], bool]) -> Fault:
    """The smallest slice at fault that the search finds, in a function that is at fault as a whole.

    Slices with fewer ops than the function may be compiled in another way. Each answer of ``is_faulty`` is taken as it
    is: what is returned was found at fault, and the prefix one step shorter than the one that it ends was not.
    """
    steps = graph.steps

    def prefix(length: int) -> Slice:
        return graph.cut(steps[:length], graph.frontier(steps[:length]))

    last = find_first(len(steps), lambda length: is_faulty(prefix(length))) - 1
    step = steps[last]
    results = [v for v in graph.graph.ops[step].results if v in graph.observable]

    def around(kept: Sequence[int]) -> Slice:
        return graph.cut((*kept, step), results)

    needed = find_needed(graph.ancestors(step), lambda kept: is_faulty(around(kept)))
    return Fault(step, prefix(last + 1) if needed is None else around(needed))


def find_first(count: int, is_faulty: Callable[[int], bool]) -> int:
    """A length of 1 to ``count`` at fault, the length before it being not, where ``count`` is at fault and 0 is not.
    Takes about log2(count) trials; the least such length where fault never ends with length."""
    good, bad = 0, count
    while bad - good > 1:
        middle = (good + bad) // 2
        if is_faulty(middle):
            bad = middle
        else:
            good = middle
    return bad


def find_needed(candidates: Sequence[int], is_faulty: Callable[[Sequence[int]], bool]) -> tuple[int, ...] | None:
    """Few of ``candidates``, those first in order preferred, that are at fault together; ``None`` where all are not.
    Doubles the number of candidates until they are at fault, halves it again, and then leaves out one at a time."""
    count, size = len(candidates), 0
    while not is_faulty(candidates[:size]):
        if size == count:
            return None
        size = min(count, max(1, 2 * size))
    if size == 0:
        return ()
    low = size // 2
    kept = list(candidates[: low + find_first(size - low, lambda n: is_faulty(candidates[: low + n]))])
    for candidate in reversed(kept[:-1]):
        fewer = [c for c in kept if c != candidate]
        if is_faulty(fewer):
            kept = fewer
    return tuple(kept)
