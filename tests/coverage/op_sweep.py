# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``make coverage``: PyTorch's own operator and module databases through compile_backward, gradients against eager.

Each case runs in a process of its own: one that dies is an outcome, not the end. Verdicts are kept one file a case,
and a sweep goes on where the last one stopped.

These processes are forked: run this from a process of its own, one that has no threads. Those of OpenMP and of IREE's
devices do not survive a fork, and a child that waits for them never ends.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import op_check
from op_cases import Case, all_cases, rotate
from op_check import Verdict
from op_table import read_native, read_verdict, write_table

ROOT = Path(__file__).parents[2]


@dataclass
class _Running:
    cases: Sequence[Case]
    process: BaseProcess
    since: float
    late: bool = False


def sweep(
    cases: Sequence[Case], folder: Path, *, jobs: int, samples: int | None, timeout: float, together: int = 1
) -> list[Verdict]:
    """The verdicts on ``cases``, in order; those that ``folder`` has are taken from there.

    Args:
        cases: what to examine.
        folder: one JSON file a case, named by it.
        jobs: how many processes at a time.
        samples: the most samples per case; None for all.
        timeout: seconds for one case.
        together: how many cases to try as one program, which is halved where one of them is not native.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [case for case in cases if not _path(folder, case).exists()]
    waiting = [missing[i : i + together] for i in range(0, len(missing), together)]
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(waiting.pop(0), folder, samples))
            time.sleep(0.02)
            for job in list(running):
                if job.process.is_alive() and time.monotonic() - job.since < timeout:
                    continue
                running.remove(job)
                job.late = job.process.is_alive()
                _stop(job.process)
                if len(job.cases) > 1:
                    waiting[:0] = _halves([case for case in job.cases if not _path(folder, case).exists()])
                else:
                    _settle(job, folder, timeout)
                for case in job.cases:
                    _tell(_path(folder, case))
    finally:
        for job in running:
            _stop(job.process)
    return [read_verdict(_path(folder, case)) for case in cases]


def _halves(cases: list[Case]) -> list[list[Case]]:
    middle = len(cases) // 2
    return [half for half in (cases[:middle], cases[middle:]) if half]


def _start(cases: Sequence[Case], folder: Path, samples: int | None) -> _Running:
    # Forked, since importing the databases takes longer than most cases; the parent never starts a thread.
    paths = [_path(folder, case) for case in cases]
    process = multiprocessing.get_context("fork").Process(target=_examine, args=(cases, paths, samples))
    process.start()
    return _Running(cases, process, time.monotonic())


def _examine(cases: Sequence[Case], paths: Sequence[Path], samples: int | None) -> None:
    """What the child does; several cases have verdicts only if all are native."""
    warnings.simplefilter("ignore")
    # A sweep in the background of a shell ignores interrupts, and they are how a child is stopped.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    start = time.monotonic()
    if len(cases) == 1:
        verdicts = [op_check.examine(cases[0], samples)]
    else:
        verdicts = op_check.examine_together(cases, samples) or []
    for verdict, path in zip(verdicts, paths, strict=bool(verdicts)):
        verdict.seconds = round((time.monotonic() - start) / len(cases), 1)
        _write(path, verdict)
    os._exit(0)


def _settle(job: _Running, folder: Path, timeout: float) -> None:
    """The verdict on a case whose process left none."""
    (case,), path = job.cases, _path(folder, job.cases[0])
    if path.exists():
        return
    verdict = Verdict(case.name)
    if job.late:
        verdict.fail("refused", "all", f"not compiled within {timeout:.0f} seconds")
        verdict.seconds = timeout
    else:
        code = job.process.exitcode or 0
        ended = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        verdict.fail("crashed", "all", f"the process was ended by {ended}")
    _write(path, verdict)


def _tell(path: Path) -> None:
    if path.exists():
        verdict = read_verdict(path)
        reason = f"  {verdict.failures[0][2][:100]}" if verdict.failures else ""
        count = f"{verdict.native}/{verdict.samples}"
        print(f"{verdict.outcome:8} {verdict.seconds:6.1f} s  {verdict.name} {count}{reason}", flush=True)


def _stop(process: BaseProcess) -> None:
    """End a child and the tools it runs: on an interrupt it ends these itself."""
    if process.pid is not None and process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)
    process.join(10)
    process.kill()
    process.join()


def _path(folder: Path, case: Case) -> Path:
    return folder / f"{case.name}.json"


def _write(path: Path, verdict: Verdict) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(verdict.to_dict(), indent=1), encoding="utf-8")
    partial.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where a gradient is wrong or a process crashed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
    parser.add_argument("--folder", type=Path, default=ROOT / "build/coverage", help="where verdicts are kept")
    parser.add_argument("--table", type=Path, help="the file to write the table to")
    parser.add_argument("--kept", action="store_true", help="examine nothing, only write the table of verdicts kept")
    parser.add_argument("--again", action="store_true", help="forget the verdicts kept on these cases")
    options = parser.parse_args(arguments)
    cases = [case for case in all_cases() if not options.ops or re.fullmatch(options.ops, case.name)]
    if options.listed:
        native = read_native(options.listed.read_text(encoding="utf-8"))
        cases = [case for case in cases if case.name in native]
    if options.fraction < 1:
        cases = rotate(cases, options.fraction, options.rotate)
    part, parts = map(int, options.shard.split("/"))
    cases = cases[part::parts]
    if options.again:
        for case in cases:
            _path(options.folder, case).unlink(missing_ok=True)
    if options.kept:
        cases = [case for case in cases if _path(options.folder, case).exists()]
    verdicts = sweep(
        cases,
        options.folder,
        jobs=options.jobs,
        samples=options.samples,
        timeout=options.timeout,
        together=options.together,
    )
    text = write_table(verdicts, options.samples, len(all_cases()))
    if options.table:
        options.table.write_text(text, encoding="utf-8")
    print("\n".join(text.splitlines()[:12]))
    return int(any(v.outcome in ("wrong", "crashed") for v in verdicts))


if __name__ == "__main__":
    sys.exit(main())
