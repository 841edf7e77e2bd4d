# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``make coverage``: PyTorch's own operator and module databases through compile_backward, gradients against eager.

Cases are examined by processes of their own (``op_workers.py``). Verdicts go to a file of JSON lines as they come, and
a sweep goes on where the last one stopped. The order is a random one, so that a part of a sweep is a random share.

On the CPU, run this from a process of its own, one that has no threads: workers are forked, and those of OpenMP and of
IREE's devices do not survive that.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from op_cases import Case, all_cases, rotate, shuffle
from op_check import Verdict
from op_table import read_native, read_verdicts, write_table
from op_workers import StartMethod, Worker, wait

ROOT = Path(__file__).parents[2]


def sweep(
    cases: Sequence[Case],
    results: Path,
    *,
    jobs: int,
    samples: int | None,
    timeout: float,
    together: int = 1,
    method: StartMethod = "fork",
) -> list[Verdict]:
    """The verdicts on ``cases``, in order; those that ``results`` has are taken from there.

    Args:
        cases: what to examine.
        results: a file of JSON lines, a verdict each, to which the new ones are added.
        jobs: how many processes at a time.
        samples: the most samples per case; None for all.
        timeout: seconds for one case, or for several that are tried as one.
        together: how many cases to try as one program, which is halved where one of them is not native.
        method: how processes are started; ``fork`` serves for the CPU only.
    """
    results.parent.mkdir(parents=True, exist_ok=True)
    verdicts = read_verdicts(results)
    missing = [i for i, case in enumerate(cases) if case.name not in verdicts]
    waiting: list[Sequence[int]] = [missing[i : i + together] for i in range(0, len(missing), together)]
    workers: list[Worker] = []
    try:
        with results.open("a", encoding="utf-8") as file:
            while waiting or workers:
                while waiting and len(workers) < jobs:
                    workers.append(Worker(cases, samples, method))
                    workers[-1].give(waiting.pop(0))
                wait(workers, 1.0)
                for worker in list(workers):
                    found = _collect(worker, cases, timeout, waiting)
                    for verdict in found:
                        verdicts[verdict.name] = verdict
                        file.write(f"{json.dumps(verdict.to_dict())}\n")
                        file.flush()
                        _tell(verdict)
                    if worker.task is None and waiting and worker.usable:
                        worker.give(waiting.pop(0))
                    elif worker.task is None:
                        workers.remove(worker)
                        worker.stop()
    finally:
        for worker in workers:
            worker.stop()
    return [verdicts[case.name] for case in cases]


def _collect(worker: Worker, cases: Sequence[Case], timeout: float, waiting: list[Sequence[int]]) -> list[Verdict]:
    """The verdicts that a worker has come to; several cases without them go back to ``waiting``, in halves."""
    task, answer, late = worker.task, worker.answer(), worker.is_late(timeout)
    if task is None or (answer is None and not late):
        return []
    worker.task = None
    if isinstance(answer, list) and answer:
        return answer
    if not isinstance(answer, list):
        worker.stop()
    if len(task) > 1:
        waiting[:0] = [task[: len(task) // 2], task[len(task) // 2 :]]
        return []
    verdict = Verdict(cases[task[0]].name)
    if answer is None:
        verdict.fail("refused", "all", f"not compiled within {timeout:.0f} seconds")
        verdict.seconds = timeout
    else:
        verdict.fail("crashed", "all", str(answer))
    return [verdict]


def _tell(verdict: Verdict) -> None:
    reason = f"  {verdict.failures[0][2][:100]}" if verdict.failures else ""
    count = f"{verdict.native}/{verdict.samples}"
    print(f"{verdict.outcome:8} {verdict.seconds:6.1f} s  {verdict.name} {count}{reason}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where a gradient is wrong or a process crashed, else 0."""
    options = _make_parser().parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit(f"--device {options.device}: PyTorch finds no CUDA device on this machine")
    every = all_cases(options.device)
    cases = _select(every, options)
    results = options.results or ROOT / f"build/coverage/{options.device.replace(':', '-')}.jsonl"
    if options.again:
        _forget(results, cases)
    if options.kept:
        kept = read_verdicts(results)
        cases = [case for case in cases if case.name in kept]
    verdicts = sweep(
        cases,
        results,
        jobs=options.jobs,
        samples=options.samples,
        timeout=options.timeout,
        together=options.together,
        method="fork" if options.device == "cpu" else "spawn",
    )
    verdicts.sort(key=lambda verdict: (verdict.name.startswith("nn."), verdict.name))
    text = write_table(verdicts, options.samples, len(every), options.device)
    if options.table:
        options.table.write_text(text, encoding="utf-8")
    print("\n".join(text.splitlines()[:12]))
    return int(any(v.outcome in ("wrong", "crashed") for v in verdicts))


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="where samples are, and what they are compiled for: cpu, cuda")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--ops", default="", help="a regular expression that the names of cases must match in full")
    parser.add_argument("--listed", type=Path, help="take only the cases that this table lists as native")
    parser.add_argument("--fraction", type=float, default=1.0, help="the share of cases to take")
    parser.add_argument("--rotate", default=str(datetime.date.today()), help="what selects that share, such as a date")
    parser.add_argument(
        "--samples", type=int, help="the most samples of a case, spread over all; all of them if left out"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one case")
    parser.add_argument("--together", type=int, default=8, help="cases to try as one program, where all are native")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="of N parts of the cases, part I, from 0")
    parser.add_argument("--results", type=Path, help="where verdicts are kept; build/coverage/DEVICE.jsonl if left out")
    parser.add_argument("--table", type=Path, help="the file to write the table to")
    parser.add_argument("--kept", action="store_true", help="examine nothing, only write the table of verdicts kept")
    parser.add_argument("--again", action="store_true", help="forget the verdicts kept on these cases")
    return parser


def _select(cases: Sequence[Case], options: argparse.Namespace) -> list[Case]:
    """The cases that the command line asks for, in the order of the sweep."""
    chosen = [case for case in cases if not options.ops or re.fullmatch(options.ops, case.name)]
    if options.listed:
        native = read_native(options.listed.read_text(encoding="utf-8"))
        chosen = [case for case in chosen if case.name in native]
    if options.fraction < 1:
        chosen = rotate(chosen, options.fraction, options.rotate)
    part, parts = map(int, options.shard.split("/"))
    return shuffle(chosen, "order")[part::parts]


def _forget(results: Path, cases: Sequence[Case]) -> None:
    names = {case.name for case in cases}
    kept = [v for v in read_verdicts(results).values() if v.name not in names]
    if results.exists():
        results.write_text("".join(f"{json.dumps(v.to_dict())}\n" for v in kept), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
