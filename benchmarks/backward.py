# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Backward passes side by side: eager PyTorch, `torch.compile`, retrograd ahead of time and as backwards run, for each
model of the suite.

python benchmarks/backward.py
python benchmarks/backward.py --models mlp transformer --repeats 50 --json figures.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from measure import ENGINES, Row, measure
from models import SIZES
from page import (
    Progress,
    environment,
    heading,
    make_console,
    markdown_table,
    measured_with,
    number,
    positive,
    save_json,
    write_page,
)
from rich.table import Table
from suite import SUITE

from retrograd.runtime.reports.report import format_bytes

DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks.md"
COLUMNS = (
    "model",
    "through",
    "forward ms",
    "backward ms",
    "to eager",
    "compile s",
    "saved",
    "peak predicted",
    "peak measured",
    "gradient error",
)
EXPLANATION = """\
Each engine runs the same model on the same arguments in the same process; the engines take turns, step by step, and
each round begins with another one. Times are medians over the steps, the loss outside the model included.

- *to eager*: time of the backward divided by eager's; less than 1 is faster.
- *compile*: caches off. For Inductor and `retrograd.enable()` the first step, in which they compile.
- *saved*: bytes kept from the forward for the backward, without parameters, buffers and arguments, each storage once.
- *peak*: the most bytes alive at one time in a step: results, saved values, gradients and scratch memory, as predicted
  when compiling and as measured with IREE's allocator. Eager and Inductor have no such count on CPU.
- *gradient error*: the largest difference from eager's gradients, relative to the largest element of each. Where an
  input of a ReLU is within rounding of zero (the CNN has one of 4e-7), it may fall on the other side, in Inductor's
  code too.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.threads is not None:
        # IREE takes this number too, when its device is opened for the first program.
        torch.set_num_threads(options.threads)
    console = make_console(140)
    rows: list[Row] = []
    with console.status("") as status:
        for name in options.models:
            rows += measure(name, SUITE[name].make(options.size), options.repeats, Progress(console, status))
            # The table takes minutes to fill: each row is shown as soon as it is there.
            for row in rows[-len(ENGINES) :]:
                console.print(brief(row), markup=False, highlight=False, soft_wrap=True)
    facts = environment(options.size, options.repeats)
    console.print(table(rows, facts))
    for row in rows:
        if row.note:
            console.print(f"{row.model}, {row.engine}: {row.note}", markup=False, soft_wrap=True)
    if options.json is not None:
        save_json(options.json, rows, facts)
    if options.write:
        write_page(DOCUMENT, document(rows, facts, arguments))
        console.print(f"written: {DOCUMENT}", soft_wrap=True)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time backward passes: eager PyTorch, torch.compile and retrograd.")
    parser.add_argument(
        "--models", nargs="+", choices=SUITE, default=list(SUITE), metavar="MODEL", help=", ".join(SUITE)
    )
    parser.add_argument(
        "--size", choices=SIZES, default="bench", help="bench takes minutes, test is to try the command"
    )
    parser.add_argument("--repeats", type=positive, default=20, help="steps timed per model and engine")
    parser.add_argument("--threads", type=positive, help="threads of every engine; torch's own choice if not given")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--write", action="store_true", help="write the table to docs/benchmarks.md")
    return parser.parse_args(arguments)


def cells(row: Row) -> list[str]:
    """The row as text, in the order of ``COLUMNS``."""
    return [
        row.model,
        row.engine,
        number(row.forward_ms, ".2f"),
        number(row.backward_ms, ".2f"),
        number(row.ratio, ".2f"),
        number(row.compile_seconds, ".1f"),
        *(
            "-" if n is None else format_bytes(n)
            for n in (row.saved_bytes, row.peak_bytes_predicted, row.peak_bytes_measured)
        ),
        number(row.gradient_error, ".0e"),
    ]


def brief(row: Row) -> str:
    """The row in a line."""
    if row.backward_ms is None:
        return f"{row.model}, {row.engine}: {row.note}"
    return f"{row.model}, {row.engine}: backward {row.backward_ms:.2f} ms, {number(row.ratio, '.2f')} of eager's"


def table(rows: Sequence[Row], facts: dict[str, str]) -> Table:
    """All rows for a terminal, a rule after each model; the model's name stands in its first row only."""
    result = Table(title=f"{facts['CPU']}, {facts['threads']} threads", title_justify="left")
    for column in COLUMNS:
        is_name = column in ("model", "through")
        result.add_column(column, justify="left" if is_name else "right", no_wrap=is_name)
    for i, row in enumerate(rows):
        is_first = i == 0 or rows[i - 1].model != row.model
        is_last = i + 1 == len(rows) or rows[i + 1].model != row.model
        name, *rest = cells(row)
        result.add_row(name if is_first else "", *rest, end_section=is_last)
    return result


def document(rows: Sequence[Row], facts: dict[str, str], arguments: Sequence[str] | None) -> list[str]:
    """The page that ``--write`` writes, in Markdown, by line."""
    lines = heading("Backward passes side by side", "backward.py", arguments, EXPLANATION)
    lines += markdown_table(COLUMNS, 2, map(cells, rows))
    notes = [f"- {row.model}, {row.engine}: {row.note}" for row in rows if row.note]
    lines += ["", *notes, ""] if notes else [""]
    return lines + measured_with(facts)


if __name__ == "__main__":
    sys.exit(main())
