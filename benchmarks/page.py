# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the benchmark commands share: how they show progress, and how figures become a file or a page of the docs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

PACKAGES = ("retrograd", "torch", "torch-mlir", "iree-base-compiler", "iree-base-runtime")
BY_HAND = "<!-- By hand from here on: a benchmark's --write leaves it. -->"
"""The line of a page behind which nothing is generated."""


class Progress:
    """Shows what is being done: as a spinner on a terminal, else as plain lines."""

    def __init__(self, console: Console, status: Any) -> None:
        self._console, self._status = console, status

    def __call__(self, text: str) -> None:
        if self._console.is_terminal:
            self._status.update(text)
        else:
            self._console.print(text)


def make_console(width: int) -> Console:
    """The terminal as it is; ``width`` columns where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def environment(size: str, repeats: int) -> dict[str, str]:
    """What figures on the CPU depend on, by name."""
    return {
        "CPU": cpu_model(),
        "threads": str(torch.get_num_threads()),
        "size": size,
        "steps timed": str(repeats),
        **releases(),
    }


def cuda_environment(timed: str, repeats: int) -> dict[str, str]:
    """What figures on a CUDA device depend on, by name; ``timed`` is what there were ``repeats`` of."""
    facts = {"device": torch.cuda.get_device_name(), "CUDA": str(torch.version.cuda)}
    return {**facts, "CPU": cpu_model(), timed: str(repeats), **releases()}


def need_cuda_device() -> None:
    """End the program where there is no CUDA device to run on; products of float32 are IEEE's there from now on."""
    if not torch.cuda.is_available():
        sys.exit("no CUDA device to run on")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def releases() -> dict[str, str]:
    """Of Python and of what is measured."""
    return {"Python": platform.python_version(), **{package: version(package) for package in PACKAGES}}


def cpu_model() -> str:
    """The processor's name, as the kernel gives it."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def positive(text: str) -> int:
    """An option's number, above zero."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def number(value: float | None, form: str) -> str:
    """A figure as text; a dash for none."""
    return "-" if value is None else format(value, form)


def save_json(path: Path, rows: Iterable[Any], facts: dict[str, str]) -> None:
    """Rows, which are dataclasses, and what they depend on."""
    content = {"environment": facts, "rows": [dataclasses.asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def command_line(script: str, arguments: Sequence[str] | None) -> str:
    """The command that repeats this run."""
    return shlex.join(["python", f"benchmarks/{script}", *(sys.argv[1:] if arguments is None else arguments)])


def heading(title: str, script: str, arguments: Sequence[str] | None, explanation: str) -> list[str]:
    """The lines that a page begins with: its title and the command that repeats the run."""
    return heading_of(title, [command_line(script, arguments)], explanation)


def heading_of(title: str, commands: Sequence[str], explanation: str) -> list[str]:
    """The lines that a page begins with whose figures are from several commands."""
    return [f"# {title}", "", "```", *commands, "```", "", explanation]


def markdown_table(columns: Sequence[str], names: int, rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table whose first columns, so many, are names, and the others numbers."""
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join(['---'] * names + ['---:'] * (len(columns) - names))} |"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def measured_with(facts: dict[str, str]) -> list[str]:
    """The lines that a page ends with."""
    return ["| measured with | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in facts.items())]


def steps_page(
    title: str,
    explanation: str,
    columns: Sequence[str],
    rows: Sequence[tuple[Sequence[str], str]],
    facts: Mapping[str, str],
) -> list[str]:
    """The lines of a page of models through engines: of each row the cells, which begin with both, and its note.
    ``facts`` are what the figures depend on, with the command that gives them."""
    depends = dict(facts)
    lines = heading_of(title, [depends.pop("command")], explanation)
    lines += markdown_table(columns, 2, [cells for cells, _ in rows])
    notes = [f"- {cells[0]}, {cells[1]}: {note}" for cells, note in rows if note]
    return [*lines, "", *notes, *([""] if notes else []), *measured_with(depends)]


def write_page(path: Path, lines: Sequence[str]) -> None:
    """Write a page of the docs; what stands by hand at its end, from the line ``BY_HAND`` on, stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    by_hand = ["", *written[written.index(BY_HAND) :]] if BY_HAND in written else []
    path.write_text("\n".join([*lines, *by_hand]) + "\n", encoding="utf-8")
