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
    case: Case
    process: BaseProcess
    since: float


def sweep(cases: Sequence[Case], folder: Path, *, jobs: int, samples: int | None, timeout: float) -> list[Verdict]:
    """The verdicts on ``cases``, in order; those that ``folder`` has are taken from there.

    Args:
        cases: what to examine.
        folder: one JSON file a case, named by it.
        jobs: how many processes at a time.
        samples: the most samples per case; None for all.
        timeout: seconds for one case.
    """
    folder.mkdir(parents=True, exist_ok=True)
    waiting = [case for case in cases if not _path(folder, case).exists()]
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(waiting.pop(0), folder, samples))
            time.sleep(0.02)
            for job in list(running):
                if job.process.is_alive() and time.monotonic() - job.since < timeout:
                    continue
                _finish(job, folder, timeout)
                running.remove(job)
    finally:
        for job in running:
            _stop(job.process)
    return [read_verdict(_path(folder, case)) for case in cases]


def _start(case: Case, folder: Path, samples: int | None) -> _Running:
    # Forked, since importing the databases takes longer than most cases; the parent never starts a thread.
    process = multiprocessing.get_context("fork").Process(target=_examine, args=(case, _path(folder, case), samples))
    process.start()
    return _Running(case, process, time.monotonic())


def _examine(case: Case, path: Path, samples: int | None) -> None:
    """What the child does."""
    warnings.simplefilter("ignore")
    # A sweep in the background of a shell ignores interrupts, and they are how a child is stopped.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    start = time.monotonic()
    verdict = op_check.examine(case, samples)
    verdict.seconds = round(time.monotonic() - start, 1)
    _write(path, verdict)
    os._exit(0)


def _finish(job: _Running, folder: Path, timeout: float) -> None:
    path = _path(folder, job.case)
    if job.process.is_alive():
        _stop(job.process)
        verdict = Verdict(job.case.name)
        verdict.fail("refused", "all", f"not compiled within {timeout:.0f} seconds")
        verdict.seconds = timeout
        _write(path, verdict)
    elif not path.exists():
        code = job.process.exitcode or 0
        ended = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        verdict = Verdict(job.case.name)
        verdict.fail("crashed", "all", f"the process was ended by {ended}")
        _write(path, verdict)
    verdict = read_verdict(path)
    reason = f"  {verdict.failures[0][2][:100]}" if verdict.failures else ""
    print(
        f"{verdict.outcome:8} {verdict.seconds:6.1f} s  {verdict.name} {verdict.native}/{verdict.samples}{reason}",
        flush=True,
    )


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
    if options.again:
        for case in cases:
            _path(options.folder, case).unlink(missing_ok=True)
    if options.kept:
        cases = [case for case in cases if _path(options.folder, case).exists()]
    verdicts = sweep(cases, options.folder, jobs=options.jobs, samples=options.samples, timeout=options.timeout)
    text = write_table(verdicts, options.samples, len(all_cases()))
    if options.table:
        options.table.write_text(text, encoding="utf-8")
    print("\n".join(text.splitlines()[:12]))
    return int(any(v.outcome in ("wrong", "crashed") for v in verdicts))


if __name__ == "__main__":
    sys.exit(main())
