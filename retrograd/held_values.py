# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Describes what is in memory while each part of a step runs, and names it where most is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrograd.built import function_specs
from retrograd.contract.plan import FinishOffload, Free, RunIsland, RunStage, StagePlan, StartFetch
from retrograd.contract.roles import BACKWARD, FORWARD, GRAD, INTO, MUTATION, SAVED
from retrograd.contract.tensors import TensorSpec
from retrograd.pipelines.stages.interface import port_bytes
from retrograd.pipelines.stages.offloading import moved_bytes, moving_plans
from retrograd.pipelines.stages.peaks import handed_over
from retrograd.pipelines.stages.staged import StagedModule
from retrograd.pipelines.toolchain.executable import Executable
from retrograd.pipelines.toolchain.timeline import read_locations
from retrograd.runtime.reports.timeline import BETWEEN, HELD

# The largest values that are named; the others are counted.
_MOST_NAMED = 10
_NAMED = re.compile(r"bwd\.values = \[([^\]]*)\].*loc\((#loc\d*)\)$", re.MULTILINE)


@dataclass(frozen=True)
class Held:
    """A value in memory, by the name that its graph has for it, and what kind it is of."""

    kind: str
    value: str
    bytes: int


@dataclass(frozen=True)
class Part:
    """A stage of a half, or an island between two, whose ``function`` is None; what its caller holds meanwhile, and of
    that the bytes of gradients that lie in residuals."""

    function: str | None
    held: tuple[Held, ...]
    placed: int = 0

    def by_kind(self) -> Counter[str]:
        """Bytes of each kind."""
        counts = Counter(dict.fromkeys(HELD.values(), 0))
        for one in self.held:
            counts[one.kind] += one.bytes
        counts[HELD[GRAD]] -= self.placed
        return counts


def describe_timeline(staged: StagedModule, executable: Executable) -> dict[str, list[dict[str, Any]]]:
    """Lists for each half, in bytes, what is in memory while each of its stages runs: what its caller holds, its
    scratch memory, its steps. A half that is not cut is one stage."""
    return {
        half: [
            {
                "held": dict(part.by_kind()),
                "scratch": executable.transients.get(part.function + INTO, 0),
                "steps": [step.to_list() for step in executable.timelines.get(part.function + INTO, ())],
            }
            for part in _find_parts(half, staged, executable)
            if part.function is not None
        ]
        for half in (FORWARD, BACKWARD)
    }


def describe_fullest(staged: StagedModule, executable: Executable) -> list[list[Any]]:
    """Lists what is in memory where a step takes most, as bytes with words: the largest values, with the lines that
    compute them; gradients and scratch memory as one. What islands work in is not known."""
    parts = [part for half in (FORWARD, BACKWARD) for part in _find_parts(half, staged, executable)]
    if not parts:
        return []
    part = max(parts, key=lambda p: sum(p.by_kind().values()) + _scratch(p, executable))
    sources = _find_sources(staged.source)
    kinds = part.by_kind()
    found: list[tuple[int, str]] = [
        (one.bytes, f"{_SINGULAR[one.kind]} {one.value}" + (f" ({line})" if (line := sources.get(one.value)) else ""))
        for one in part.held
        if one.kind != HELD[GRAD]
    ]
    found += [(kinds[HELD[GRAD]], f"gradients, {sum(o.kind == HELD[GRAD] for o in part.held)} of them")]
    if (scratch := _scratch(part, executable)) > 0:
        steps = executable.timelines.get(f"{part.function}{INTO}", ())
        step = max(steps, key=lambda s: s.scratch_bytes, default=None)
        line = f" ({step.source})" if step is not None and step.source else ""
        found += [(scratch, f"scratch memory of {part.function}{line}")]
    found = sorted((row for row in found if row[0] > 0), key=lambda row: -row[0])
    rest = found[_MOST_NAMED:]
    more = [(sum(size for size, _ in rest), f"{len(rest)} smaller ones")] if rest else []
    return [[*row] for row in (*found[:_MOST_NAMED], *more)]


_SINGULAR = {**{kind: kind.removesuffix("s") for kind in HELD.values()}, BETWEEN: "between stages,"}


def _scratch(part: Part, executable: Executable) -> int:
    """Scratch memory of a part, less the results of a stage that lie in its arguments."""
    name = f"{part.function}{INTO}"
    return executable.transients.get(name, 0) - (0 if part.placed else executable.placed.get(name, 0))


def _find_sources(text: str) -> dict[str, str]:
    """The line that computes each value, as ``file.py:line``, from a module's text; of both halves the first."""
    lines = read_locations(text)
    found: dict[str, str] = {}
    for names, reference in _NAMED.findall(text):
        for name in re.findall(r'"([^"]*)"', names):
            found.setdefault(name, lines.get(reference, ""))
    return found


def _find_parts(half: str, staged: StagedModule, executable: Executable) -> Iterator[Part]:
    # The backward runs while the forward's results are held, less the buffers, which are back in their place.
    results = [r for r in staged.function(FORWARD).results if half == FORWARD or r.role != MUTATION]
    moved, plan = moved_bytes(staged), {**staged.plans, **moving_plans(staged)}.get(half)
    if plan is not None:
        handed = handed_over(staged) if half == BACKWARD else {}
        kept = [r for r in results if half == BACKWARD and (r.role != SAVED or r.value not in {*handed, *moved})]
        yield from _find_stages(half, plan, staged, _held(kept), handed, executable)
        return
    if half == BACKWARD:
        results += staged.function(BACKWARD).results
    # Gradients that lie in residuals take no memory.
    yield Part(half, _held(results), executable.placed.get(half + INTO, 0))


def _find_stages(
    half: str,
    plan: StagePlan,
    staged: StagedModule,
    held: tuple[Held, ...],
    handed: Mapping[str, int],
    executable: Executable,
) -> Iterator[Part]:
    function, stages = staged.function(half), function_specs(staged, executable)
    kinds = {value: HELD[r.role] for value, r in zip(plan.results, function.results, strict=True)}
    places = zip(plan.arguments, function.arguments, strict=True)
    alive = {known: Held(HELD[SAVED], a.value, handed[a.value]) for known, a in places if a.value in handed}
    for step in plan.steps:
        if isinstance(step, Free | FinishOffload):
            for value in step.values:
                alive.pop(value, None)
            continue
        if isinstance(step, StartFetch):
            alive |= {v: Held(HELD[SAVED], v, size) for v, size in zip(step.results, step.bytes, strict=True)}
            continue
        name: str | None = None
        if isinstance(step, RunStage):
            name, sizes = step.function, tuple(port_bytes(r) for r in stages[step.function].results)
        elif isinstance(step, RunIsland):
            sizes = step.bytes
        else:
            continue
        given = zip(step.results, sizes, strict=True)
        alive |= {v: Held(kinds.get(v, BETWEEN), v, size) for v, size in given if v}
        yield Part(name, (*held, *alive.values()))


def _held(results: Sequence[TensorSpec]) -> tuple[Held, ...]:
    return tuple(Held(HELD[r.role], r.value or r.name, port_bytes(r)) for r in results)
