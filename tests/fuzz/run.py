# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Random programs, compiled and compared with eager by the thousand: ``python tests/fuzz/run.py --graphs 2000``.

Programs run in child processes: where one ends, the program that it was at is counted as a crash, and the rest goes on.
The exit status is 1 where a gradient was wrong, a process crashed, or an error was no refusal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

BATCH = 25
BAD = ("wrong", "failed", "crashed")


@dataclass
class Tally:
    """How many programs came out how, and the reports of those that must not be."""

    kinds: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)

    def add(self, kind: str, reason: str, report: str) -> None:
        """Count one program."""
        self.kinds[kind] += 1
        if kind == "refused":
            self.refusals[reason] += 1
        if kind in BAD:
            self.bad.append(f"# {kind}: {reason}\n{report}")

    @property
    def graphs(self) -> int:
        """Programs that eager runs."""
        return sum(n for kind, n in self.kinds.items() if kind != "no program")

    def text(self) -> str:
        """The table."""
        rows = [f"graphs: {self.graphs}", *(f"{k}: {self.kinds[k]}" for k in ("right", "refused", *BAD))]
        rows += ["", "refused, by reason:", *(f"{n:6d}  {reason}" for reason, n in self.refusals.most_common())]
        return "\n".join(rows)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Compile random programs and compare them with eager.")
    parser.add_argument("--graphs", type=int, default=2000, help="how many to compile")
    parser.add_argument("--seed", type=int, default=0, help="of the first batch")
    parser.add_argument("--report", type=Path, default=Path("build/fuzz"), help="folder for the table and the programs")
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.batch is not None:
        work(options.batch)
        return 0
    options.report.mkdir(parents=True, exist_ok=True)
    tally, seed, start = Tally(), options.seed, time.monotonic()
    while tally.graphs < options.graphs:
        for kind, reason, report in run_batch(seed):
            tally.add(kind, reason, report)
        seed += 1
        (options.report / "table.txt").write_text(f"{tally.text()}\n", encoding="utf-8")
        (options.report / "bad.py").write_text("\n\n".join(tally.bad), encoding="utf-8")
        print(f"{tally.graphs} graphs, {time.monotonic() - start:.0f} s: {dict(tally.kinds)}", file=sys.stderr)
    print(tally.text())
    return 1 if tally.bad else 0


def run_batch(seed: int) -> Iterator[tuple[str, str, str]]:
    """Verdict, reason and report of each program of a batch, from a process of its own."""
    with subprocess.Popen(worker_command(seed), stdout=subprocess.PIPE, text=True) as process:
        pending = None
        for line in process.stdout or ():
            event = json.loads(line)
            if "program" in event:
                pending = event["program"]
            else:
                yield event["kind"], event["reason"], event["report"]
                pending = None
    if pending is not None:
        yield "crashed", f"exit status {process.returncode}", pending
    elif process.returncode:
        raise RuntimeError(f"batch {seed} ended with exit status {process.returncode} between two programs")


def worker_command(seed: int) -> list[str]:
    """The command that runs a batch."""
    return [sys.executable, __file__, "--batch", str(seed)]


def work(seed: int) -> None:
    """Run a batch, telling the parent on standard output of each program before and after it runs."""
    import hypothesis
    import torch
    from judge import judge, shrink
    from programs import Program
    from strategies import programs

    torch.set_num_threads(1)

    def tell(**event: str) -> None:
        print(json.dumps(event), flush=True)

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=BATCH,
        phases=[hypothesis.Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(programs())
    def check(program: Program) -> None:
        tell(program=program.describe())
        verdict = judge(program)
        report = shrink(program, verdict.kind).describe() if verdict.kind in BAD else ""
        tell(kind=verdict.kind, reason=verdict.reason, report=report)

    check()


if __name__ == "__main__":
    sys.exit(main())
