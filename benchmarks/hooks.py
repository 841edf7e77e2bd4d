# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""`retrograd.enable()` beside eager and compiled autograd: what a backward and a hook cost, how often is compiled, and
how much memory hooks that are inlined save.

python benchmarks/hooks.py
python benchmarks/hooks.py --write     # docs/hooks.md
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from measure_hooks import CASES, ENGINES
from page import cpu_model, heading, markdown_table, measured_with, releases, write_page

DOCUMENT = Path(__file__).parents[1] / "docs" / "hooks.md"
EXPLANATION = """\
Each figure is from a process of its own, one after the other. *us* of a step is time of the calling thread's CPU, the
least of several rounds, so that other work on the machine does not count; the forward is part of a step. *peak* is what
the process's resident memory rises to in one step, above what it was when the step began, as the kernel counts it:
torch's tensors, IREE's and Inductor's buffers, whatever their allocators. *compiled autograd* is
`torch._dynamo.compiled_autograd` with the backend named.

The aims for *ours* are 20 us for a backward and 6 us for a stage without its hook; a stage here is with it. These
tensors are small, as are those of a backward that is over in microseconds: up to 4 KiB they are copied to memory that
IREE knows already, since importing one takes as long as copying 10 KiB; with larger ones a stage takes some 2 us more.
Called in a loop, with nothing in between, the same code takes half as long: between two steps other code has the
caches.
The last table has the machine's load: what other processes were running meanwhile.

Under *packed*, ours frees what a hook packed after its last use, as eager does, and holds less besides: values between
two nodes are values inside a compiled function. Compiled autograd hands it over in a tuple that C++ code keeps until
the backward ends; ours takes tensors out of it that nobody else has.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What hooks cost under retrograd.enable().")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--write", action="store_true", help="write the tables to docs/hooks.md")
    parser.add_argument("--measure", nargs=2, metavar=("CASE", "ENGINE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        case, engine = options.measure
        print(json.dumps(CASES[case](engine)))
        return 0
    tables, before = [], os.getloadavg()[0]
    for case in options.cases:
        rows = {engine: run_apart(case, engine) for engine in engines_of(case)}
        tables.append(table(case, CASES[case], rows))
        print("\n".join(tables[-1]), flush=True)
    if options.write:
        load = f"{before:.1f} before, {os.getloadavg()[0]:.1f} at the end"
        facts = {"CPU": f"{cpu_model()}, {os.cpu_count()} cores", "load average": load, **releases()}
        body = [line for lines in tables for line in lines]
        top = heading("What hooks cost", "hooks.py", arguments, EXPLANATION)
        write_page(DOCUMENT, [*top, *body, *measured_with(facts)])
        print(f"written: {DOCUMENT}")
    return 0


def engines_of(case: str) -> Sequence[str]:
    """The engines that a case is about."""
    return ENGINES if getattr(CASES[case], "compares", True) else ("retrograd",)


def run_apart(case: str, engine: str) -> dict[str, Any]:
    """The figures of one case and engine, from a process of its own; what it said last where it failed."""
    # Freed memory goes back to the kernel at once, so that the resident size says what is alive.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, "--measure", case, engine]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if ended.returncode:
        lines = ended.stderr.strip().splitlines()
        return {"failed": lines[-1] if lines else f"exit {ended.returncode}"}
    figures: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return figures


def table(case: str, measure: Callable[[str], dict[str, Any]], rows: dict[str, dict[str, Any]]) -> list[str]:
    """The lines of one case as Markdown."""
    columns = list(dict.fromkeys(column for figures in rows.values() for column in figures))
    cells = [[engine, *(str(figures.get(column, "")) for column in columns)] for engine, figures in rows.items()]
    text = textwrap.wrap(" ".join((measure.__doc__ or "").split()), 112, break_on_hyphens=False)
    return [f"## {case}", "", *text, "", *markdown_table(["", *columns], 1, cells), ""]


if __name__ == "__main__":
    sys.exit(main())
