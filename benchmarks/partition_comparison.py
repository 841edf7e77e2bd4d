# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What is saved and what is recomputed: retrograd's policies beside PyTorch's partitioners, on the same joint graphs.

python benchmarks/partition_comparison.py
python benchmarks/partition_comparison.py --models gpt2 unet --size test --layers 2
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from measure_memory import SIZES, make_case
from measure_memory import Scale as ModelSize
from measure_partitions import Row, Scale, compare_partitions, make_problem, measure_scale
from models import MODELS
from page import heading, make_console, markdown_table, measured_with, positive, releases, save_json, write_page
from suite import SUITE

DOCUMENT = Path(__file__).parents[1] / "docs" / "partition-comparison.md"
COMPARED = tuple(dict.fromkeys((*SIZES, *SUITE)))
COLUMNS = ("model", "partitioner", "budget", "saved", "peak", "FLOPs recomputed", "ms recomputed", "seconds to decide")
EQUAL = ("model", "PyTorch's", "budget", "FLOPs recomputed", "saved", "saved by retrograd", "ratio")
MODEL_COLUMNS = (
    "model",
    "min-cut saves",
    "its peak",
    "least peak of budgets",
    "ms recomputed for it",
    "seconds to decide",
)
SCALE = ("what", "ops", "nodes", "seconds", "CPU seconds")
EXPLANATION = """\
PyTorch's are those of `torch._functorch.partitioners`; *budget* is its `activation_memory_budget`. Each partitioner
decides on the joint graph that was captured; nothing is compiled or run. All decisions are judged by the same measure:

- *saved*: bytes kept for the backward, without parameters and inputs, which are alive anyway; views of one tensor once.
- *peak*: live bytes of a step as `liveness` works them out, in the better of two orders: as the graph has it, and with
  each recomputation right before its first use.
- *ms recomputed*: by the cost model, of 100 GFLOP/s and 20 GB/s.

`--json FILE` writes every decision; retrograd's *budget* there is a fraction of the peak of its `default`.

Sizes are those of [memory.md](memory.md) for its models and those of [benchmarks.md](benchmarks.md) for the others.
"""
EQUAL_TEXT = """\
For each decision of PyTorch's the fewest bytes that retrograd's integer program saves with no more FLOPs: that of
`pipelines/analysis/partition/recompute_program.py`, by which the budget's search fills the gaps of its curve. They are
the fewest there are, or as few as two units of its effort, about seconds, lead to. Repeated decisions are left out.
Where retrograd saves more, the graphs are not the same: PyTorch merges what both halves compute alike before it
decides, retrograd what is alike within a half.
"""
SCALE_TEXT = """\
A GPT of {layers} layers. `budget` works out the whole curve of peak against recomputation. The limits are not of time
but of effort, so that the same graph has the same plan: see `BudgetOptions` in
`pipelines/analysis/partition/budget.py`.
"""


MODELS_TEXT = """\
PyTorch's and, behind it, retrograd's. The least peak is that of all budgets that were tried, of PyTorch's from 0.9 down
to 0; seconds are those of all of a partitioner's budgets, which retrograd finds together.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print the tables, and write the page if that is asked for."""
    options = parse(arguments)
    console = make_console(140)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    start = time.perf_counter()
    scale = list(measure_scale(options.layers))
    for line in markdown_table(SCALE, 1, map(scale_cells, scale)):
        say(line)
    rows: list[Row] = []
    for name in options.models:
        size: ModelSize = "bench" if options.size == "memory" and name not in SIZES else options.size
        problem = make_problem(name, make_case(name, size))
        rows += compare_partitions(problem)
        say(f"{name}: {len(problem.retrograd.graph.ops)} ops")
        for line in markdown_table(COLUMNS, 2, (cells(row) for row in rows if row.model == name)):
            say(line)
    load = f"{os.getloadavg()[2]:.1f} processes on {os.cpu_count()} cores"
    facts = {**releases(), "load of the machine": load, "minutes": f"{(time.perf_counter() - start) / 60:.1f}"}
    if options.json:
        save_json(options.json, rows, facts)
    if options.write:
        write_page(DOCUMENT, document(rows, scale, options.layers, facts, arguments))
        say(f"written: {DOCUMENT}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare partitions with those of PyTorch, on the same joint graphs.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=COMPARED, metavar="MODEL")
    parser.add_argument("--size", choices=("memory", "test", "bench"), default="memory", help="memory: as in the page")
    parser.add_argument("--layers", type=positive, default=48, help="of the large GPT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows to a file")
    parser.add_argument("--write", action="store_true", help="write docs/partition-comparison.md")
    return parser.parse_args(arguments)


def cells(row: Row) -> list[str]:
    """The row as text, in the order of ``COLUMNS``."""
    return [
        row.model,
        f"{row.engine} `{row.policy}`",
        "-" if row.budget is None else f"{row.budget:.2f}",
        f"{row.saved_bytes:,}",
        f"{row.peak_bytes:,}",
        f"{row.recomputed_flops:,}",
        f"{1e3 * row.recompute_seconds:.3f}",
        f"{row.seconds:.3f}",
    ]


def equal_cells(row: Row) -> list[str]:
    """The row as text, in the order of ``EQUAL``."""
    ours = row.equal_flops_bytes or 0
    return [
        row.model,
        f"`{row.policy}`",
        "-" if row.budget is None else f"{row.budget:.1f}",
        f"{row.recomputed_flops:,}",
        f"{row.saved_bytes:,}",
        f"{ours:,}",
        f"{ours / row.saved_bytes:.2f}" if row.saved_bytes else "-",
    ]


def model_cells(rows: Sequence[Row]) -> list[str]:
    """The decisions on one model as text, in the order of ``MODEL_COLUMNS``."""
    both = [[row for row in rows if row.engine == engine] for engine in ("torch", "retrograd")]
    cuts = [next((row for row in own if row.policy == "min-cut"), None) for own in both]
    budgets = [[row for row in own if row.policy == "budget"] for own in both]
    least = [min(own, key=lambda row: row.peak_bytes, default=None) for own in budgets]
    seconds = [sum(row.seconds for row in budgets[0]), max((row.seconds for row in budgets[1]), default=0.0)]
    pairs = [
        [f"{row.saved_bytes:,}" if row else "-" for row in cuts],
        [f"{row.peak_bytes:,}" if row else "-" for row in cuts],
        [f"{row.peak_bytes:,}" if row else "-" for row in least],
        [f"{1e3 * row.recompute_seconds:.3f}" if row else "-" for row in least],
        [f"{second:.3f}" for second in seconds],
    ]
    return [rows[0].model, *map("; ".join, pairs)]


def median(rows: Sequence[Row]) -> float:
    """Of the bytes that retrograd saves at equal FLOPs to PyTorch's, over the decisions that save any."""
    return statistics.median((row.equal_flops_bytes or 0) / row.saved_bytes for row in rows if row.saved_bytes)


def scale_cells(scale: Scale) -> list[str]:
    """The row as text, in the order of ``SCALE``."""
    nodes = "-" if scale.nodes is None else f"{scale.nodes:,}"
    return [scale.what, f"{scale.ops:,}", nodes, f"{scale.seconds:.2f}", f"{scale.cpu_seconds:.2f}"]


def distinct(rows: Sequence[Row]) -> list[Row]:
    """PyTorch's decisions, without those that are like the one before."""
    found: list[Row] = []
    for row in rows:
        shown = (row.model, row.saved_bytes, row.recomputed_flops)
        if row.equal_flops_bytes is not None and (
            not found or shown != (found[-1].model, found[-1].saved_bytes, found[-1].recomputed_flops)
        ):
            found.append(row)
    return found


def document(
    rows: Sequence[Row], scale: Sequence[Scale], layers: int, facts: dict[str, str], arguments: Sequence[str] | None
) -> list[str]:
    """The page that ``--write`` writes, in Markdown, by line."""
    lines = heading("What is saved, beside PyTorch's partitioners", "partition_comparison.py", arguments, EXPLANATION)
    theirs = distinct(rows)
    more = [row for row in theirs if (row.equal_flops_bytes or 0) > row.saved_bytes]
    lines += [
        "## At equal FLOPs",
        "",
        EQUAL_TEXT,
        f"Of {len(theirs)} decisions, retrograd saves more for {len(more)}. The median ratio is {median(theirs):.2f}.",
        "",
    ]
    lines += [*markdown_table(EQUAL, 2, map(equal_cells, theirs)), "", "## Large graphs", ""]
    lines += [SCALE_TEXT.format(layers=layers), *markdown_table(SCALE, 1, map(scale_cells, scale)), ""]
    models = dict.fromkeys(row.model for row in rows)
    lines += ["## Each model", "", MODELS_TEXT]
    lines += [*markdown_table(MODEL_COLUMNS, 1, (model_cells([r for r in rows if r.model == m]) for m in models)), ""]
    return lines + measured_with(facts)


if __name__ == "__main__":
    sys.exit(main())
