# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Random programs, compiled and compared with eager by the thousand: ``python tests/fuzz/run.py --graphs 2000``.

Every other batch is drawn op by op, the rest are slices of the graphs of the models in ``benchmarks/models``. Programs
run in child processes: where one ends, or takes too long, the program that it was at is counted as a crash, and the
rest goes on. Verdicts are kept, a line of JSON for each batch of programs, and a run goes on where the last one
stopped. The exit status is 1 where a gradient was wrong, a process crashed, or an error was no refusal.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from programs import Program

BATCH = 25
KINDS = ("drawn", "slices")
BAD = ("wrong", "failed", "crashed")
Event = tuple[str, str, str]
"""Kind, reason and report of a program."""


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
    options = _make_parser().parse_args()
    if options.device.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            sys.exit(f"--device {options.device}: PyTorch finds no CUDA device on this machine")
    if options.batch is not None:
        work(options.batch, options.device, options.kinds, options.without)
        return 0
    options.report.mkdir(parents=True, exist_ok=True)
    tally = fuzz(options)
    print(tally.text())
    return 1 if tally.bad else 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compile random programs and compare them with eager.")
    parser.add_argument("--graphs", type=int, default=2000, help="how many to compile")
    parser.add_argument("--seed", type=int, default=0, help="of the first batch")
    parser.add_argument("--device", default="cpu", help="what to run and compile them for: cpu, cuda")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one program, made smaller included")
    parser.add_argument(
        "--report", type=Path, default=Path("build/fuzz"), help="folder for verdicts, table and programs"
    )
    parser.add_argument("--again", action="store_true", help="forget the verdicts that the folder has")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="programs of which kinds")
    parser.add_argument(
        "--without",
        nargs="+",
        default=[],
        metavar="PASS",
        help="leave passes out, to see whether their absence is found",
    )
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    return parser


def fuzz(options: argparse.Namespace) -> Tally:
    """Batch after batch, ``options.jobs`` at a time, until there are as many graphs as are wanted."""
    kept = options.report / f"verdicts-{options.device.replace(':', '-')}.jsonl"
    if options.again:
        kept.unlink(missing_ok=True)
    tally, done, seed, start = Tally(), set(), options.seed, time.monotonic()
    for line in kept.read_text(encoding="utf-8").splitlines() if kept.exists() else ():
        batch = json.loads(line)
        if batch["seed"] >= options.seed:
            done.add(batch["seed"])
            for event in batch["events"]:
                tally.add(*event)
    running: dict[Future[list[Event]], int] = {}
    with ThreadPoolExecutor(options.jobs) as pool, kept.open("a", encoding="utf-8") as file:
        while tally.graphs < options.graphs or running:
            while tally.graphs < options.graphs and len(running) < options.jobs:
                if seed not in done:
                    running[pool.submit(list, run_batch(worker_command(seed, options), options.timeout))] = seed
                seed += 1
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                events = future.result()
                file.write(f"{json.dumps({'seed': running.pop(future), 'events': events})}\n")
                file.flush()
                for event in events:
                    tally.add(*event)
            (options.report / "table.txt").write_text(f"{tally.text()}\n", encoding="utf-8")
            (options.report / "bad.py").write_text("\n\n".join(tally.bad), encoding="utf-8")
            print(f"{tally.graphs} graphs, {time.monotonic() - start:.0f} s: {dict(tally.kinds)}", file=sys.stderr)
    return tally


def run_batch(command: Sequence[str], timeout: float = 300.0) -> Iterator[Event]:
    """Verdict, reason and report of each program of a batch, from a process of its own, which ``command`` starts, and
    which is ended when it has been silent for ``timeout`` seconds."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        pending, told, late = None, False, threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(timeout, end)
        timer.start()
        for line in process.stdout or ():
            timer.cancel()
            timer = threading.Timer(timeout, end)
            timer.start()
            event, told = json.loads(line), True
            if "program" in event:
                pending = event["program"]
            else:
                yield event["kind"], event["reason"], event["report"]
                pending = None
        timer.cancel()
    if not told and not late.is_set():
        raise RuntimeError(
            f"{shlex.join(command)} ended with exit status {process.returncode} before its first program"
        )
    if pending is not None or process.returncode:
        reason = f"not done within {timeout:.0f} s" if late.is_set() else f"exit status {process.returncode}"
        yield "crashed", reason, pending or f"# {shlex.join(command)}, between two programs"


def worker_command(seed: int, options: argparse.Namespace) -> list[str]:
    """The command that runs a batch."""
    command = [sys.executable, __file__, "--batch", str(seed), "--device", options.device, "--kinds", *options.kinds]
    return [*command, "--without", *options.without] if options.without else command


def work(seed: int, device: str, kinds: Sequence[str], without: Sequence[str]) -> None:
    """Run a batch, telling the parent on standard output of each program before and after it runs."""
    from functools import partial

    import torch
    from judge import judge, shrink

    torch.set_num_threads(1)
    # Eager is the reference: in f32, not in what the tensor cores make of it.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    leave_out(without)

    judged = partial(judge, device=device)

    def tell(**event: str) -> None:
        print(json.dumps(event), flush=True)

    def check(program: Program) -> None:
        tell(program=program.describe())
        verdict = judged(program)
        report = shrink(program, verdict.kind, judged).describe() if verdict.kind in BAD else ""
        tell(kind=verdict.kind, reason=verdict.reason, report=report)

    if kinds[seed % len(kinds)] == "slices":
        check_slices(seed // len(kinds), check)
    else:
        check_drawn(seed, check)


def check_drawn(seed: int, check: Callable[[Program], None]) -> None:
    """``check`` a batch of programs that Hypothesis draws."""
    import hypothesis
    from strategies import programs

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=BATCH,
        phases=[hypothesis.Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(programs())
    def draw(program: Program) -> None:
        check(program)

    draw()


def check_slices(seed: int, check: Callable[[Program], None]) -> None:
    """``check`` a batch of slices of one model's graph."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from graph_slices import draw_slices, read_source
    from models import MODELS

    entry = list(MODELS.values())[seed % len(MODELS)]
    for program in draw_slices(read_source(entry, seed), seed, BATCH):
        check(program)


def leave_out(passes: Sequence[str]) -> None:
    """Have the lowering in this process do without some of its passes."""
    from retrograd.pipelines.toolchain import lowering_steps

    lowering_steps.LOWERING = tuple(step for step in lowering_steps.LOWERING if step.name not in passes)


if __name__ == "__main__":
    sys.exit(main())
