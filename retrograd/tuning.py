# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Chooses the tiles of a program's kernels by measurement: kept, from a file, or made on a device now."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from retrograd.contract.trials import Buffer, Call, CompiledKernel, Work
from retrograd.pipelines.devices.targets import Target, cuda_architecture
from retrograd.pipelines.kernels.choice import find_obstacle
from retrograd.pipelines.kernels.kernel import Kernel, KernelError
from retrograd.pipelines.kernels.ptx import find_triton, try_kernels
from retrograd.pipelines.kernels.questions import Question, Trial, find_questions, read_question
from retrograd.pipelines.kernels.tile_table import Entry, Table, keep, read_kept, read_table
from retrograd.runtime.cache import Cache, cache_key

if TYPE_CHECKING:
    from retrograd.pipelines.stages.staged import ExecutableStore, Progress, StagedModule

AUTO, MEASURE = "auto", "measure"
_PROGRAM = "retrograd.tools.measure"

Tiles = str | os.PathLike[str]


@dataclass(frozen=True)
class Tuning:
    """Where tiles come from: a file of some, or measured on ``device`` where they are not kept; ``is_kept`` says that
    what was measured before is taken, and what is measured now kept."""

    file: Path | None
    device: torch.device
    is_kept: bool = True


def read_tiles(tiles: Tiles, target: Target, device: torch.device, *, is_kept: bool) -> Tuning | None:
    """Reads the option ``tiles`` of a compilation; nothing for ``auto``.

    Raises:
        ValueError: no kernels of ours are compiled for the target; says why not.
        TableError: a file cannot be read.
    """
    if tiles == AUTO:
        return None
    if not target.kernels:
        reason = find_obstacle(target) or "kernels is 'off', or has no family of them"
        raise ValueError(f"tiles={tiles!r} is about kernels of retrograd's own, of which there are none: {reason}")
    if tiles == MEASURE:
        return Tuning(None, device, is_kept)
    path = Path(tiles)
    read_table(path)
    return Tuning(path, device, is_kept)


def tune(
    staged: StagedModule, target: Target, tuning: Tuning, progress: Progress, store: ExecutableStore | None
) -> Target:
    """The target with tiles for the kernels of a staged module, as they were measured, are in the file, or are measured
    now.

    Raises:
        CompileError: it cannot be lowered.
        KernelError: some are to be measured, and there is no device for that; says what to do.
    """
    with progress.phase("find tiles"):
        questions = _find_questions(staged, target, store)
    architecture = target.devices[0].architecture
    known = _known_tiles(questions, architecture, tuning)
    missing = [question for question in questions if question.text not in known and len(question.trials) > 1]
    if missing and tuning.file is None:
        with progress.phase("measure tiles"):
            measured = measure_tiles(missing, architecture, tuning.device, progress.tell)
        known |= {entry.question: entry for entry in measured}
        if tuning.is_kept:
            _keep(measured)
    return replace(target, tiles=tuple(sorted((question, entry.tiles) for question, entry in known.items())))


def _find_questions(staged: StagedModule, target: Target, store: ExecutableStore | None) -> list[Question]:
    """Which tiles the kernels of a module could have: known from the store, or from lowering it for that alone."""
    from retrograd.pipelines.toolchain.lowering import lower_to_linalg
    from retrograd.pipelines.toolchain.lowering_steps import lowering_pipeline

    plain = replace(target, tiles=())
    pipeline = lowering_pipeline(plain, asking=True)
    parts = {"entry": "questions", "module": staged.texts["scheduled"], "lowering": pipeline, "target": repr(plain)}
    if store is not None and (found := store.get(parts)) is not None:
        return [read_question(text) for text in json.loads(found)]
    questions = find_questions(lower_to_linalg(staged.source.encode(), plain, twins_alone=True, asking=True))
    if store is not None:
        store.put(parts, json.dumps([question.to_json() for question in questions]).encode())
    return list(questions)


def _known_tiles(questions: Sequence[Question], architecture: str, tuning: Tuning) -> dict[str, Entry]:
    """Looks questions up in a table; of a file that has something for none of them, a warning tells."""
    triton = str(find_triton())
    table: Table = read_kept() if tuning.is_kept else {}
    if tuning.file is not None:
        table = read_table(tuning.file)
    found = {q.text: table.get((q.text, architecture, triton)) for q in questions}
    known = {text: entry for text, entry in found.items() if entry is not None}
    # Another release may have had other tiles.
    trials = {question.text: question.trials for question in questions}
    known = {text: entry for text, entry in known.items() if entry.tiles in trials[text]}
    if tuning.file is not None and questions and not known:
        warnings.warn(
            f"{tuning.file} has no tiles for kernels of this program ({architecture}, Triton {triton}); those that "
            "retrograd comes with are taken",
            UserWarning,
            stacklevel=2,
        )
    return known


def _keep(entries: Sequence[Entry]) -> None:
    try:
        with Cache().making(cache_key({"entry": "tiles"})):
            keep(entries)
    except OSError as error:
        warnings.warn(f"tiles that were measured are not kept: {error}", RuntimeWarning, stacklevel=2)


def measure_tiles(
    questions: Sequence[Question], architecture: str, device: torch.device, tell: Callable[[str], None]
) -> list[Entry]:
    """The fastest tiles for questions, on a device; ``tell`` hears how far it is.

    Raises:
        KernelError: there is no device of the architecture.
    """
    index = _find_device(device, architecture)
    kernels = [run.launch.kernel for q in questions for trial in q.trials.values() for run in trial.runs]
    compiled = try_kernels(kernels, architecture, lambda done, count: tell(f"compile kernels: {done} of {count}"))
    asked = [(question, sound) for question in questions if (sound := _find_sound(question, compiled))]
    triton = str(find_triton())
    entries: list[Entry] = []
    answers = _ask_device([list(works.values()) for _, works in asked], index)
    for number, (question, works) in enumerate(asked, 1):
        tell(f"measure tiles: {number} of {len(asked)}, {question.text}")
        answer = next(answers)
        if answer is None or "0" in answer["faults"]:
            continue
        tiles = list(works)[answer["fastest"]]
        found = (round(answer["microseconds"], 2), round(answer["unasked"], 2))
        entries.append(Entry(question.text, architecture, triton, tiles, answer["device"], *found))
    return entries


def _find_device(device: torch.device, architecture: str) -> int:
    """The number of the device to measure on: that of tensors, else the first of the architecture.

    Raises:
        KernelError: there is none.
    """
    numbers = range(torch.cuda.device_count()) if torch.cuda.is_available() else range(0)
    own = [number for number in numbers if cuda_architecture(*torch.cuda.get_device_capability(number)) == architecture]
    if device.type == "cuda" and (device.index or 0) in own:
        return device.index or 0
    if not own:
        raise KernelError(
            f"there is no CUDA device of {architecture} here to measure tiles on; compile with tiles=FILE, a file that "
            "`retrograd tiles FILE` writes where there is one, or with tiles='auto'"
        )
    return own[0]


def _find_sound(question: Question, compiled: Mapping[Kernel, CompiledKernel | str]) -> dict[str, Work]:
    """Finds the work of each choice of tiles whose kernels were compiled; nothing if those taken unasked are not."""
    works: dict[str, Work] = {}
    for tiles, trial in question.trials.items():
        found = {run.launch.kernel: compiled[run.launch.kernel] for run in trial.runs}
        if not any(isinstance(code, str) for code in found.values()):
            works[tiles] = make_work(trial, found)
    return works if question.unasked in works else {}


def make_work(trial: Trial, compiled: Mapping[Kernel, Any]) -> Work:
    """A trial with the code of its kernels."""
    calls: list[Call] = []
    given: list[Buffer] = []
    updated, count = None, len(trial.inputs)
    results: tuple[int, ...] = ()
    for run in trial.runs:
        launch, code = run.launch, compiled[run.launch.kernel]
        results = tuple(range(count + len(given), count + len(given) + len(run.given)))
        if launch.written is not None:
            updated = run.taken[launch.written]
            results = (updated,)
        buffers = (*run.taken, *(results if launch.written is None else ()))
        given += run.given
        entry, grid, numbers = launch.kernel.label, launch.grid, launch.numbers
        calls.append(Call(code, entry, grid, buffers, numbers))
    return Work(trial.inputs, tuple(given), tuple(calls), results, updated, trial.ending)


def _command(index: int) -> list[str]:
    return [sys.executable, "-m", _PROGRAM, str(index)]


def _ask_device(asked: Sequence[Sequence[Work]], index: int) -> Iterator[dict[str, Any] | None]:
    """Measures each question, in a process of its own: where a kernel ends that, nothing is known of the
    question, and another process goes on with the next."""
    waiting = list(asked)
    while waiting:
        with subprocess.Popen(_command(index), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            if child.stdin is None or child.stdout is None:
                raise AssertionError("the pipes were asked for")
            name = child.stdout.readline()
            if not name:
                raise KernelError(
                    f"a second process, {_PROGRAM}, has no use of the device to measure tiles: it ended with status "
                    f"{child.wait()}; compile with tiles='auto', or mode='default'"
                )
            answered = True
            while waiting and answered:
                works = waiting.pop(0)
                try:
                    child.stdin.write(json.dumps([asdict(work) for work in works]) + "\n")
                    child.stdin.flush()
                    line = child.stdout.readline()
                except BrokenPipeError:
                    line = ""
                answered = bool(line)
                yield {**json.loads(line), "device": json.loads(name)} if line else None
            child.stdin.close()
