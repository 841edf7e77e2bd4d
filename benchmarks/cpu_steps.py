# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Steps of models at the sizes that people train, on the CPU: eager, `torch.compile`, retrograd.

python benchmarks/cpu_steps.py
python benchmarks/cpu_steps.py --models gpt2-small --repeats 3
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import Contender, eager, first_line, inductor, retrograd_cpu, run_step, time_in_turn
from measure_memory import torch_peak
from models.bert import bert
from models.case import Case
from models.gpt import language_model
from models.llama import llama
from models.resnet import resnet50
from page import (
    command_line,
    environment,
    number,
    positive,
    save_json,
    steps_page,
    write_page,
)

from retrograd.runtime.steps.compiled import CompiledBackward

DOCUMENT = Path(__file__).parents[1] / "docs" / "cpu-steps.md"
MODELS: dict[str, Callable[[], Case]] = {
    "gpt2-small": lambda: language_model(4, 256, 768, 12, 12, 50257),
    "gpt": lambda: language_model(4, 256, 384, 6, 4, 8192),
    "bert-base": lambda: bert(8, 128, 768, 12, 12, 30522),
    "llama-block": lambda: llama(1, 512, 3072, 24, 8, 1, 32000),
    "resnet50": lambda: resnet50(8, 224, 1000),
}
EXPLANATION = """\
Each step is a forward with its loss and a backward, in float32; medians, the engines taking turns in one process.
*through*: eager PyTorch, `torch.compile` with Inductor, `compile_backward` with its defaults. *compile*: seconds to the
end of the first step, from no cache of either.

- *peak*: the most memory of a step, parameters and arguments not counted: of retrograd by IREE's counting allocator, or
  as predicted where libraries of PyTorch's have steps of their own, what they work in not counted; of the others by
  PyTorch's profiler, which does not see what oneDNN and MKL allocate by themselves.

GPT-2 small on 4 x 256 tokens; a GPT of 4 layers of 384 and 8,192 words on as many; BERT base on 8 x 128; one block of
Llama 3.2 3B's sizes with a vocabulary of 32,000 on 512 tokens; ResNet-50 on 8 images of 224 x 224.
"""
COLUMNS = ("model", "through", "compile s", "step ms", "to eager", "peak MiB", "to eager's")


def with_first_step(case: Case) -> Contender:
    """Compiled by retrograd, whose first call, in which it compares itself with the graph, belongs to its compiling."""
    contender = retrograd_cpu(case)
    assert contender.compile_seconds is not None
    return dataclasses.replace(
        contender, compile_seconds=contender.compile_seconds + sum(run_step(case, contender.call))
    )


ENGINES: dict[str, Callable[[Case], Contender]] = {"inductor": inductor, "retrograd": with_first_step}


@dataclass(frozen=True)
class StepRow:
    """A model through an engine: seconds of compiling, milliseconds of a step, MiB. None is what could not be had;
    ``note`` says why."""

    model: str
    through: str
    compile_s: float | None = None
    step_ms: float | None = None
    ratio: float | None = None
    peak_mib: float | None = None
    peak_ratio: float | None = None
    note: str = ""


def find_peak(case: Case, contender: Contender) -> float:
    """The peak of a step, in MiB."""
    if isinstance(contender.call, CompiledBackward):
        report = contender.report()
        return float(report["peak_bytes_measured"] or report["peak_bytes_predicted"]) / 2**20
    return torch_peak(case, contender.call) / 2**20


def measure(name: str, engines: Sequence[str], repeats: int) -> list[StepRow]:
    """A row for eager and for each engine."""
    torch.manual_seed(0)
    case = MODELS[name]()
    contenders: list[Contender] = [eager(case)]
    rows: list[StepRow] = []
    run_step(case, case.model)
    for engine in engines:
        try:
            contenders.append(ENGINES[engine](case))
        except (RuntimeError, ValueError) as error:
            rows.append(StepRow(name, engine, note=first_line(error)))
    time_in_turn(case, contenders, repeats)
    whole = {c.engine: statistics.median(map(sum, zip(c.forward, c.backward, strict=True))) for c in contenders}
    peaks = {c.engine: find_peak(case, c) for c in contenders}
    for c in contenders:
        step, peak = whole[c.engine], peaks[c.engine]
        compared = step / whole["eager"], peak, peak / peaks["eager"]
        rows.append(StepRow(name, c.engine, c.compile_seconds, 1e3 * step, *compared, c.note))
    return sorted(rows, key=lambda row: ["eager", *engines].index(row.through))


def cells(row: StepRow) -> list[str]:
    """The row as text, in the order of ``COLUMNS``."""
    figures = (row.compile_s, row.step_ms, row.ratio, row.peak_mib, row.peak_ratio)
    forms = (".0f", ".0f", ".2f", ".0f", ".2f")
    return [row.model, row.through, *(number(figure, form) for figure, form in zip(figures, forms, strict=True))]


def document(rows: Sequence[StepRow], facts: dict[str, str]) -> list[str]:
    """The page, by line."""
    title = "Steps at the sizes people train: a CPU"
    return steps_page(title, EXPLANATION, COLUMNS, [(cells(row), row.note) for row in rows], facts)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time steps of models at real sizes on the CPU.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--through", nargs="+", choices=ENGINES, default=list(ENGINES), help="beside eager")
    parser.add_argument("--repeats", type=positive, default=5, help="steps timed of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too, as they come")
    parser.add_argument("--write", action="store_true", help="write the table to docs/cpu-steps.md")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    facts = {"command": command_line("cpu_steps.py", arguments), **environment("real", options.repeats)}
    rows: list[StepRow] = []
    for model in options.models:
        for row in measure(model, options.through, options.repeats):
            rows.append(row)
            print(*cells(row), row.note, sep=" | ", flush=True)
        if options.json is not None:
            save_json(options.json, rows, facts)
    if options.write:
        write_page(DOCUMENT, document(rows, facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
