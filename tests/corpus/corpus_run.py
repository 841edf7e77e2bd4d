# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``make models``: programs of transformers, timm and torch.nn's users through three doors, beside eager and Inductor.

Each program and door has a process of its own, forked from this one, with limits on its time and memory: one that dies
or hangs is a verdict. Verdicts go to a file of JSON lines as they come, and a run goes on where the last one stopped.
With ``--jobs`` several run at a time, each on processors of its own. With ``--unlisted`` programs are tried that nobody
chose, first in eager: what that does not run is no program.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import multiprocessing
import multiprocessing.queues
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / folder) for folder in ("tests/fuzz", "benchmarks") if str(ROOT / folder) not in sys.path]

import corpus_page  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
from corpus_case import Program, on_device, with_one_layer  # noqa: E402
from corpus_doors import DOORS, EAGER  # noqa: E402
from corpus_examine import Verdict, examine  # noqa: E402
from corpus_programs import PROGRAMS, QUICK  # noqa: E402
from corpus_unlisted import find_unlisted  # noqa: E402
from page import cpu_model, releases  # noqa: E402

import retrograd  # noqa: E402


@dataclass(frozen=True)
class Limits:
    """Of a process: seconds, and bytes of address space (each tool that it starts has as many for itself), or None."""

    seconds: float
    memory: int | None


# What takes longer in eager is not small.
_EAGER_SECONDS = 60.0
# Imported before the first fork: importing is no part of what is timed.
COMPILERS = (retrograd.compile_backward, retrograd.enable)


def try_apart(program: Program, door: str, repeats: int, limits: Limits, log: Path) -> Verdict:
    """The verdict of a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, program, door, repeats, limits.memory, log), daemon=False)
    start = time.monotonic()
    process.start()
    theirs.close()
    verdict: Verdict | None = None
    try:
        if ours.poll(limits.seconds):
            verdict = ours.recv()
        else:
            verdict = _dead(program, door, f"not done within {limits.seconds:.0f} seconds")
    except EOFError:
        process.join(10)
        code = process.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        verdict = _dead(program, door, f"the process was ended by {how}")
    finally:
        _end(process)
    verdict.total_seconds = round(time.monotonic() - start, 1)
    return verdict


def _dead(program: Program, door: str, reason: str) -> Verdict:
    return Verdict(program.name, program.family, door, "crashed", reason)


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """End a process with all that it has started: it leads a group of its own."""
    process.join(5)
    if process.pid is not None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
    process.join()


def _work(connection: Connection, program: Program, door: str, repeats: int, memory: int | None, log: Path) -> None:
    os.setsid()
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    verdict = examine(program, door, repeats)
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
    name = f"{'unlisted' if options.unlisted else 'verdicts'}{'' if options.device == 'cpu' else f'-{options.device}'}"
    options.results = options.results or ROOT / "build" / "models" / f"{name}.jsonl"
    options.results.parent.mkdir(parents=True, exist_ok=True)
    tried: list[Verdict] = []
    if not options.kept:
        if _asks_eager(options):
            _try_all(_select(options, [EAGER]), options)
        tried = _try_all(_select(options, options.doors.split(",")), options)
    if options.write:
        _write(options)
    return int(any(verdict.outcome in ("wrong", "crashed") for verdict in tried))


@functools.cache
def programs_of(unlisted: bool) -> Mapping[str, Program]:
    """The programs of the corpus, or those that nobody chose, by name."""
    return find_unlisted() if unlisted else PROGRAMS


def runs_in_eager(verdicts: Mapping[tuple[str, str], Verdict], name: str) -> bool:
    """Whether a program is one: eager runs it, near enough to float64."""
    verdict = verdicts.get((name, EAGER))
    return verdict is not None and verdict.outcome in ("right", "ran")


def _asks_eager(options: argparse.Namespace) -> bool:
    """Whether a program is one only where eager runs it: what nobody chose, or chose for another device."""
    return bool(options.unlisted) or options.device != "cpu"


def _select(options: argparse.Namespace, doors: Sequence[str]) -> list[tuple[str, str]]:
    """The programs that the command line asks for, and doors, less those that have a verdict, and what is none."""
    kept = read_verdicts(options.results)
    again = {key for key, verdict in kept.items() if options.again and verdict.outcome not in options.keep.split(",")}
    return [
        (name, door)
        for door in doors
        for name in programs_of(options.unlisted)
        if re.search(options.programs, name) and (door in QUICK.get(name, ()) or not options.quick)
        if (name, door) not in kept or (name, door) in again
        if not _asks_eager(options) or door == EAGER or runs_in_eager(kept, name)
    ]


def _write(options: argparse.Namespace) -> None:
    """Write the page of the verdicts that are kept."""
    found, names = read_verdicts(options.results), [*programs_of(options.unlisted)]
    if _asks_eager(options):
        names = [name for name in names if runs_in_eager(found, name)]
    kept = {key: found[key] for key in itertools.product(names, DOORS) if key in found}
    given = [
        *(["--unlisted"] if options.unlisted else []),
        *([f"--device {options.device}"] if options.device != "cpu" else []),
        *([f"--jobs {options.jobs}"] if options.jobs > 1 else []),
    ]
    command = f'make models ARGS="{" ".join(given)}"' if given else "make models"
    page = corpus_page.PAGES[options.unlisted, options.device]
    facts = _facts(kept, options.jobs, options.device)
    corpus_page.write(kept, ROOT / "docs" / page.file, facts, command, len(names), timed=not options.untimed, page=page)


def _try_all(chosen: Sequence[tuple[str, str]], options: argparse.Namespace) -> list[Verdict]:
    """A verdict of each, in turn or several at a time."""
    if options.jobs == 1:
        return [_try(name, door, options) for name, door in chosen]
    context = multiprocessing.get_context("fork")
    processors = context.SimpleQueue()
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    for job, share in enumerate(share_processors(sorted(os.sched_getaffinity(0)), options.jobs)):
        processors.put((share, devices[job % len(devices)]))
    with ProcessPoolExecutor(options.jobs, context, initializer=_take_processors, initargs=(processors,)) as pool:
        asked = [pool.submit(_try, name, door, options) for name, door in chosen]
        return [one.result() for one in asked]


def share_processors(numbers: Sequence[int], jobs: int) -> list[Sequence[int]]:
    """The processors of each job: as many for each, and none twice.

    Raises:
        ValueError: there are fewer processors than jobs.
    """
    each = len(numbers) // jobs
    if not each:
        raise ValueError(f"{jobs} jobs have no processor each: there are {len(numbers)}")
    return [numbers[job * each : (job + 1) * each] for job in range(jobs)]


def _take_processors(processors: multiprocessing.queues.SimpleQueue[tuple[Sequence[int], str]]) -> None:
    """Run on a share of the processors, and on one of the GPUs that are visible."""
    share, device = processors.get()
    os.sched_setaffinity(0, share)
    os.environ["CUDA_VISIBLE_DEVICES"] = device


def _try(name: str, door: str, options: argparse.Namespace) -> Verdict:
    """A new verdict, kept and told."""
    log = options.results.parent / "logs" / f"{re.sub(r'[^A-Za-z0-9]+', '-', name)}.{door}.txt"
    seconds = min(options.timeout, _EAGER_SECONDS) if door == EAGER else options.timeout
    # CUDA's driver reserves more addresses than a machine has memory.
    limits = Limits(seconds, int(options.memory * 2**30) if options.device == "cpu" else None)
    program = programs_of(options.unlisted)[name]
    program = program if options.device == "cpu" else on_device(program, options.device)
    program = with_one_layer(program) if options.quick else program
    verdict = try_apart(program, door, 0 if door == EAGER else options.repeats, limits, log)
    verdict.commit = commit()
    with options.results.open("a", encoding="utf-8") as file:
        file.write(f"{json.dumps(verdict.to_dict())}\n")
    figures = f"compiled in {verdict.compile_seconds or 0:.0f} s, step to eager {verdict.ratio or 0:.2f}"
    islands = f", {len(verdict.islands)} lines on islands" if verdict.islands else ""
    print(f"{verdict.outcome:8} {door:16} {name:50} {figures}{islands} {verdict.reason[:150]}", flush=True)
    return verdict


@functools.cache
def commit() -> str:
    """The commit that is tried; empty outside of a repository."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def _facts(verdicts: Mapping[tuple[str, str], Verdict], jobs: int, device: str) -> dict[str, str]:
    """What the verdicts depend on, by name."""
    return {
        "date": str(datetime.date.today()),
        **({"device": torch.cuda.get_device_name()} if device == "cuda" else {}),
        "CPU": f"{cpu_model()}, {os.cpu_count()} cores",
        "threads": "1 (of PyTorch)",
        "programs at a time": str(jobs),
        "commits": ", ".join(sorted({v.commit for v in verdicts.values() if v.commit})),
        **releases(),
        **{package: version(package) for package in ("transformers", "timm")},
    }


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", default="", help="a regular expression that is found in the names of programs")
    parser.add_argument("--quick", action="store_true", help="what the tests take: few programs, of one layer")
    parser.add_argument("--doors", default=",".join(DOORS), help="through which doors, with commas between")
    parser.add_argument("--repeats", type=int, default=11, help="steps to time")
    parser.add_argument("--jobs", type=int, default=1, help="how many to try at a time, on as many processors each")
    parser.add_argument("--memory", type=float, default=16.0, help="GiB of address space for each process of one")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one program through one door")
    parser.add_argument("--results", type=Path, help="where verdicts are kept (default: in build/models)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where programs run")
    parser.add_argument("--unlisted", action="store_true", help="programs that nobody chose: docs/unlisted.md")
    parser.add_argument("--again", action="store_true", help="try again what has a verdict that is not in --keep")
    parser.add_argument("--keep", default="right,ran", help="outcomes that --again leaves alone")
    parser.add_argument("--write", action="store_true", help="write the page of the verdicts that are kept")
    parser.add_argument("--untimed", action="store_true", help="write no times that other work on the machine disturbs")
    parser.add_argument("--kept", action="store_true", help="try nothing, only write the page of verdicts kept")
    return parser


if __name__ == "__main__":
    sys.exit(main())
