# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``make models``: programs of transformers, timm and torch.nn's users through three doors, beside eager and Inductor.

Each program and door has a process of its own, forked from this one, with limits on its time and memory: one that dies
or hangs is a verdict. Verdicts go to a file of JSON lines as they come, and a run goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/fuzz", "benchmarks")]

import torch  # noqa: E402
import torch._dynamo  # noqa: E402
from corpus_doors import DOORS  # noqa: E402
from corpus_examine import Verdict, examine  # noqa: E402
from corpus_programs import PROGRAMS  # noqa: E402


def try_apart(name: str, door: str, repeats: int, timeout: float, log: Path) -> Verdict:
    """The verdict of a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, name, door, repeats, log), daemon=False)
    start = time.monotonic()
    process.start()
    theirs.close()
    verdict: Verdict | None = None
    try:
        if ours.poll(timeout):
            verdict = ours.recv()
        else:
            verdict = Verdict(name, PROGRAMS[name].family, door, "crashed", f"not done within {timeout:.0f} seconds")
    except EOFError:
        process.join(10)
        code = process.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        verdict = Verdict(name, PROGRAMS[name].family, door, "crashed", f"the process was ended by {how}")
    finally:
        _end(process)
    verdict.total_seconds = round(time.monotonic() - start, 1)
    return verdict


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """End a process with all that it has started: it leads a group of its own."""
    process.join(5)
    if process.pid is not None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
    process.join()


def _work(connection: Connection, name: str, door: str, repeats: int, log: Path) -> None:
    os.setsid()
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    verdict = examine(PROGRAMS[name], door, repeats)
    connection.send(verdict)
    connection.close()
    # Without what runs at exit: threads of a device that is gone can wait for ever there.
    os._exit(0)


def read_verdicts(path: Path) -> dict[tuple[str, str], Verdict]:
    """The verdicts that were kept, the last of each program and door."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = (Verdict(**json.loads(line)) for line in lines if line.strip())
    return {(verdict.program, verdict.door): verdict for verdict in found}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where something is wrong or crashed, else 0."""
    options = _make_parser().parse_args(arguments)
    names = [n for n in PROGRAMS if re.search(options.programs, n) and (not options.quick or PROGRAMS[n].quick)]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    kept = read_verdicts(options.results)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    bad = 0
    for door in options.doors.split(","):
        for name in names:
            before = kept.get((name, door))
            if before and not (options.again and before.outcome not in options.keep.split(",")):
                continue
            log = options.results.parent / "logs" / f"{re.sub(r'[^A-Za-z0-9]+', '-', name)}.{door}.txt"
            verdict = try_apart(name, door, options.repeats, options.timeout, log)
            verdict.commit = commit.strip()
            with options.results.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(verdict.to_dict())}\n")
            bad += verdict.outcome in ("wrong", "crashed")
            print(
                f"{verdict.outcome:8} {door:16} {name:50} {verdict.total_seconds:6.1f} s, compiled in "
                f"{verdict.compile_seconds or 0:5.1f} s, ratio {verdict.ratio or 0:5.2f} {verdict.reason[:150]}"
                f"{' ISLANDS ' + str(len(verdict.islands)) if verdict.islands else ''}",
                flush=True,
            )
    return int(bad > 0)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", default="", help="a regular expression that is found in the names of programs")
    parser.add_argument("--quick", action="store_true", help="take only the programs that the tests take")
    parser.add_argument("--doors", default=",".join(DOORS), help="through which doors, with commas between")
    parser.add_argument("--repeats", type=int, default=11, help="steps to time")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one program through one door")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "build/models/verdicts.jsonl", help="where verdicts are kept"
    )
    parser.add_argument("--again", action="store_true", help="try again what has a verdict that is not in --keep")
    parser.add_argument("--keep", default="right,ran", help="outcomes that --again leaves alone")
    return parser


if __name__ == "__main__":
    sys.exit(main())
