# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Forward and backward passes on a CUDA device side by side: eager PyTorch, `torch.compile` and retrograd.

python benchmarks/gpu.py
python benchmarks/gpu.py --models mlp transformer --precisions bf16 autocast --jobs 16 --json figures.json
python benchmarks/gpu.py --from figures.json others.json --write
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from measure_gpu import ENGINES, GpuRow, Job, compile_all, measure
from models import MODELS, SIZES
from models.precision import PRECISIONS
from page import (
    Progress,
    command_line,
    cpu_model,
    heading_of,
    make_console,
    markdown_table,
    measured_with,
    number,
    positive,
    releases,
    save_json,
    write_page,
)
from rich.console import Console
from rich.table import Table
from suite import SUITE

from retrograd.runtime.reports.report import format_bytes

DOCUMENT = Path(__file__).parents[1] / "docs" / "gpu-small.md"
CACHES = ("RETROGRAD_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
COLUMNS = (
    "model",
    "precision",
    "through",
    "forward ms",
    "backward ms",
    "to eager",
    "compile s",
    "peak",
    "gradient error",
)
EXPLANATION = """\
Each engine runs the same model on the same arguments in the same process; the engines take turns, step by step, and
each round begins with another one. Times are medians, taken from and to a moment at which the device is idle; the loss
(the mean of the squared outputs) is outside of the model and in the time. TF32 is off.

- *precision*: `f32`; `bf16`, parameters and arguments too; `autocast`, `torch.autocast` to bfloat16 in the model.
- *to eager*: time of forward and backward together, divided by eager's; less than 1 is faster.
- *compile*: from empty caches, in a process of its own, several at a time. For Inductor with its first step.
- *peak*: the most memory that a step allocates beyond what was there before it: by torch's count, and for retrograd
  IREE's scratch memory besides, of each half as stated when it was compiled. What is free of that is kept for later
  calls, up to a sixteenth of the device's memory.
- *gradient error*: the largest error of a gradient relative to its norm, from eager's in f32.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = make_console(150)
    if options.rows_from:
        return show(console, *read_runs(options.rows_from), options.write)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device to run on; --device cpu tries the command")
    if options.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    facts = {"command": command_line("gpu.py", arguments), **environment(options)}
    console.print(f"device: {facts['device']}", highlight=False)
    rows: list[GpuRow] = []
    with console.status("") as status, caches(options.keep_caches):
        say = Progress(console, status)
        jobs = [
            Job(model, options.size, options.device, precision, engine)
            for model in options.models
            for precision in options.precisions
            for engine in options.engines
        ]
        compiled = compile_all(jobs, options.jobs, say)
        for model in options.models:
            for precision in options.precisions:
                say(f"{model}, {precision}: timing {options.repeats} steps of each")
                rows += measure(model, options.size, options.device, precision, compiled, options.repeats)
                # What was found is kept, should the device be taken away before the end.
                if options.json is not None:
                    save_json(options.json, rows, facts)
    return show(console, rows, facts, options.write)


def show(console: Console, rows: Sequence[GpuRow], facts: dict[str, str], write: bool) -> int:
    """Print the table, and write the page if asked to."""
    console.print(table(rows, facts))
    for row in rows:
        if row.note:
            console.print(f"{row.model}, {row.precision}, {row.engine}: {row.note}", markup=False, soft_wrap=True)
    if write:
        write_page(DOCUMENT, document(rows, facts))
        console.print(f"written: {DOCUMENT}", soft_wrap=True)
    return 0


def read_runs(paths: Sequence[Path]) -> tuple[list[GpuRow], dict[str, str]]:
    """The rows of several runs, each written by ``--json``, and what they depend on.

    Exits where two depend on something else, the device say: their figures do not belong into one table.
    """
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    facts = [run["environment"] for run in runs]
    commands = [fact.pop("command") for fact in facts]
    other = next((path for path, fact in zip(paths, facts, strict=True) if fact != facts[0]), None)
    if other is not None:
        sys.exit(f"{other} was measured with something else than {paths[0]}: they make no common table")
    rows = [GpuRow(**row) for run in runs for row in run["rows"]]
    return rows, {"command": "\n".join(commands), **facts[0]}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time models on a CUDA device: eager, torch.compile and retrograd.")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(SUITE), metavar="MODEL", help=", ".join(MODELS)
    )
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), metavar="PRECISION")
    parser.add_argument("--engines", nargs="+", choices=ENGINES[1:], default=list(ENGINES[1:]), metavar="ENGINE")
    parser.add_argument("--size", choices=SIZES, default="bench", help="test is to try the command")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is to try the command")
    parser.add_argument("--repeats", type=positive, default=30, help="steps timed per model, precision and engine")
    parser.add_argument("--jobs", type=positive, default=min(8, os.cpu_count() or 1), help="compilations at a time")
    parser.add_argument(
        "--keep-caches", action="store_true", help="use and fill the usual caches: compile times mean nothing then"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too, as they come")
    parser.add_argument(
        "--from", nargs="+", type=Path, dest="rows_from", metavar="FILE", help="measure nothing: show what --json wrote"
    )
    parser.add_argument("--write", action="store_true", help="write the table to docs/gpu-small.md")
    return parser.parse_args(arguments)


@contextlib.contextmanager
def caches(keep: bool) -> Iterator[None]:
    """Empty caches for both compilers while the block runs, unless those there are shall be kept."""
    if keep:
        yield
        return
    before = {name: os.environ.get(name) for name in CACHES}
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        os.environ.update({name: str(Path(folder, name.lower())) for name in CACHES})
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def environment(options: argparse.Namespace) -> dict[str, str]:
    """What the figures depend on, by name."""
    is_cuda = options.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if is_cuda else cpu_model(),
        **({"CUDA": str(torch.version.cuda)} if is_cuda else {}),
        "CPU": cpu_model(),
        "size": options.size,
        "steps timed": str(options.repeats),
        "compilations at a time": str(options.jobs),
        **releases(),
    }


def cells(row: GpuRow) -> list[str]:
    """The row as text, in the order of ``COLUMNS``."""
    return [
        row.model,
        row.precision,
        row.engine,
        number(row.forward_ms, ".2f"),
        number(row.backward_ms, ".2f"),
        number(row.ratio, ".2f"),
        number(row.compile_seconds, ".1f"),
        "-" if row.peak_bytes is None else format_bytes(row.peak_bytes),
        number(row.gradient_error, ".0e"),
    ]


def table(rows: Sequence[GpuRow], facts: dict[str, str]) -> Table:
    """All rows for a terminal, a rule after each model and precision."""
    result = Table(title=facts["device"], title_justify="left")
    for column in COLUMNS:
        is_name = column in COLUMNS[:3]
        result.add_column(column, justify="left" if is_name else "right", no_wrap=is_name)
    for i, row in enumerate(rows):
        is_last = i + 1 == len(rows) or (rows[i + 1].model, rows[i + 1].precision) != (row.model, row.precision)
        result.add_row(*cells(row), end_section=is_last)
    return result


def document(rows: Sequence[GpuRow], facts: dict[str, str]) -> list[str]:
    """The page that ``--write`` writes, in Markdown, by line."""
    depends = dict(facts)
    lines = heading_of(f"Small models on a GPU: {facts['device']}", depends.pop("command").splitlines(), EXPLANATION)
    lines += markdown_table(COLUMNS, 3, map(cells, rows))
    notes = [f"- {row.model}, {row.precision}, {row.engine}: {row.note}" for row in rows if row.note]
    lines += ["", *notes, ""] if notes else [""]
    return lines + measured_with(depends)


if __name__ == "__main__":
    sys.exit(main())
