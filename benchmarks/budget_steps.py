# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Does more budget ever give a higher peak or more recomputation? Each model is compiled for 21 budgets, from the least
that is feasible to the peak that `default` has, at equal distances.

python benchmarks/budget_steps.py
python benchmarks/budget_steps.py --models gpt2 --size memory
python benchmarks/budget_steps.py --lay-out
python benchmarks/budget_steps.py --lay-out --models gpt2 --rows /tmp/rows     # several at once, in as many processes,
python benchmarks/budget_steps.py --models --rows /tmp/rows --write            # and then the page of all their rows
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from measure_memory import make_case
from models import MODELS, Case
from page import heading, make_console, markdown_table, measured_with, releases, write_page

from retrograd.frontend.doors.capture import capture_joint
from retrograd.frontend.preparation.importer import import_graph
from retrograd.pipelines.analysis.partition.pareto import InfeasibleBudget
from retrograd.pipelines.analysis.partition.policies import POLICIES, Policy
from retrograd.pipelines.devices.targets import CPU
from retrograd.pipelines.stages.budgeted import BudgetBuilder, Choice
from retrograd.pipelines.stages.peaks import step_peak
from retrograd.pipelines.stages.staged import Finished, Progress, StagedModule
from retrograd.pipelines.toolchain.executable import Executable

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "budget-steps.md"
STEPS = 21
COLUMNS = ("model", "default's peak", "least peak", "of it", "plans", "ms recomputed", "violations", "seconds")
EXPLANATION = f"""\
Each model is compiled for {STEPS} memory budgets: from the least that is feasible to the peak that `default` has, at
equal distances. Peaks are those of the buffers that IREE lays out, which the measured ones equal; with
`--lay-out` nothing is compiled beyond that. The sizes are those of the tests.

- *plans*: how many different ones the budgets lead to.
- *ms recomputed*: within the least budget, by the cost model.
- *seconds*: for the whole row, here in one process each on cores of their own.
- *violations*: peaks above the budget, and steps to a larger budget that raise recomputation or to a smaller one that
  raise the peak.
"""


@dataclass(frozen=True)
class Step:
    """What a budget, in bytes, led to."""

    budget: int
    peak: int
    seconds: float
    saved: int


@dataclass(frozen=True)
class Sweep:
    """A model's steps, by falling budget, and the wall-clock seconds that they took."""

    model: str
    whole: int
    steps: tuple[Step, ...]
    elapsed: float


@dataclass
class Memory:
    """Keeps what was compiled for one budget for the next ones."""

    found: dict[str, bytes] = field(default_factory=dict)

    def get(self, parts: dict[str, str]) -> bytes | None:
        return self.found.get(json.dumps(parts, sort_keys=True))

    def put(self, parts: dict[str, str], data: bytes) -> None:
        self.found[json.dumps(parts, sort_keys=True)] = data

    def making(self, _parts: dict[str, str]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@dataclass(frozen=True)
class Layouts(BudgetBuilder):
    """Chooses plans by what IREE lays out for them, and compiles none to the end."""

    staged: dict[tuple[Policy, bool, bool], StagedModule] = field(default_factory=dict)

    def stage(
        self, policy: Policy = POLICIES["default"], *, in_order: bool = False, may_offload: bool = False
    ) -> StagedModule:
        key = (policy, in_order, may_offload)
        if key not in self.staged:
            self.staged[key] = super().stage(policy, in_order=in_order, may_offload=may_offload)
        return self.staged[key]

    def attempt(self, choice: Choice, limit: int, facts: dict[str, Any]) -> tuple[Finished | None, int | None]:
        staged, peak = self._weigh(choice, limit)
        if staged is None or peak is None or peak > limit:
            return None, peak
        scratch = self.scratch(staged, choice.target)
        partition = {**staged.partition, **facts, **choice.facts}
        return (replace(staged, partition=partition), Executable(b"", (), scratch, 0.0), False), peak


def sweep(name: str, case: Case, *, is_compiled: bool = True) -> Sweep:
    """Compile ``case`` for all budgets, or if not ``is_compiled``, have IREE lay its buffers out."""
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        captured = capture_joint(stack, case.model, case.args, None)
        module = import_graph(captured.graph_module, captured.signature)
    source = module.operation.get_asm(enable_debug_info=True)
    kind = BudgetBuilder if is_compiled else Layouts
    builder = kind(source, module.context, CPU, releases(), Progress(), Memory())
    whole = int(builder.build(1.0)[0].partition["memory_budget"])
    try:
        least = _peak(builder.build(1))
    except InfeasibleBudget as error:
        least = error.least
    budgets = [least + (whole - least) * step // (STEPS - 1) for step in reversed(range(STEPS))]
    return Sweep(name, whole, tuple(_steps(builder, budgets)), time.perf_counter() - start)


def _steps(builder: BudgetBuilder, budgets: Sequence[int]) -> Iterator[Step]:
    for budget in budgets:
        built = builder.build(budget)
        partition: dict[str, Any] = built[0].partition
        yield Step(budget, _peak(built), partition["recompute_seconds"], partition["saved_bytes"])


def _peak(built: Finished) -> int:
    staged, executable, _ = built
    return step_peak(staged, executable.working)


def find_violations(steps: Sequence[Step]) -> list[str]:
    """What breaks the promise, among steps of falling budget."""
    found = [f"{s.budget:,}: peak {s.peak:,}" for s in steps if s.peak > s.budget]
    for more, less in pairwise(steps):
        if less.peak > more.peak:
            found.append(f"{less.budget:,}: peak {less.peak:,}, above {more.peak:,} for {more.budget:,}")
        if less.seconds < more.seconds:
            found.append(f"{more.budget:,}: {more.seconds:g} s recomputed, above {less.seconds:g} for {less.budget:,}")
    return found


def cells(found: Sweep) -> list[str]:
    """The row as text, in the order of ``COLUMNS``."""
    last = found.steps[-1]
    return [
        found.model,
        f"{found.whole:,}",
        f"{last.peak:,}",
        f"{last.peak / found.whole:.2f}",
        str(len({(s.peak, s.seconds, s.saved) for s in found.steps})),
        f"{1e3 * last.seconds:.3f}",
        str(len(find_violations(found.steps))),
        f"{found.elapsed:.0f}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print the table; 1 if a step breaks the promise."""
    parser = argparse.ArgumentParser(description="Compile models for 21 memory budgets each.")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--size", choices=("memory", "test", "bench"), default="test")
    parser.add_argument("--lay-out", action="store_true", help="stop where IREE has laid its buffers out")
    parser.add_argument("--rows", type=Path, default=ROOT / "build" / "budget-steps", help="where sweeps are kept")
    parser.add_argument("--write", action="store_true", help="write docs/budget-steps.md from the sweeps that are kept")
    options = parser.parse_args(arguments)
    console = make_console(140)
    found: list[Sweep] = []
    for name in options.models:
        torch.manual_seed(0)
        found.append(sweep(name, make_case(name, options.size), is_compiled=not options.lay_out))
        keep(found[-1], options.rows)
        console.print("  ".join(cells(found[-1])), markup=False, highlight=False)
        for line in find_violations(found[-1].steps):
            console.print(f"  {line}", markup=False, highlight=False)
    if options.write:
        lines = heading("Budgets in 21 steps", "budget_steps.py", arguments, EXPLANATION)
        lines += [*markdown_table(COLUMNS, 1, map(cells, read_kept(options.rows))), ""]
        write_page(DOCUMENT, lines + measured_with(releases()))
    return 1 if any(find_violations(s.steps) for s in found) else 0


def keep(found: Sweep, folder: Path) -> None:
    """Write a sweep to a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{found.model}.json").write_text(json.dumps(asdict(found)), encoding="utf-8")


def read_kept(folder: Path) -> Iterator[Sweep]:
    """The sweeps that are kept, in the order of the models."""
    for path in (folder / f"{name}.json" for name in MODELS):
        if path.exists():
            fields = json.loads(path.read_text(encoding="utf-8"))
            yield Sweep(**{**fields, "steps": tuple(Step(**step) for step in fields["steps"])})


if __name__ == "__main__":
    sys.exit(main())
