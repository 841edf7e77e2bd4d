# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Memory against time: for each model the peak of live bytes and the backward's time at a range of budgets, beside
PyTorch's; a picture of what is in memory with `default` and within the smallest budget, and a trace for Perfetto.

python benchmarks/memory.py
python benchmarks/memory.py --models gpt2 --fractions 0.75 0.5 --repeats 50
python benchmarks/memory.py --size test --models all --fractions 0.5 --no-peers
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from measure_memory import SIZES, MemoryResult, MemoryRow, make_case, measure_model
from models import MODELS
from page import environment, heading, make_console, markdown_table, measured_with, positive, save_json, write_page

from retrograd.runtime.reports.report import format_bytes

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "memory.md"
PICTURES = ROOT / "docs" / "img"
COLUMNS = (
    "model",
    "how",
    "budget",
    "saved",
    "recomputed FLOPs",
    "peak planned",
    "predicted",
    "measured",
    "to eager's",
    "backward ms",
    "best ms",
    "to eager's",
    "gradient error",
)
EXPLANATION = """\
What you can count on, on a CPU, of a step that begins without gradients:

- **`min-cut`, which is what you get, has a peak of 0.84 to 1.00 of eager's** for an MLP, a ResNet-18, a GPT-2, a U-Net
  and an LSTM, and 1.04 for a ViT, whose attention eager computes with no matrix of scores. `default`, which computes
  nothing again, has 0.96 to 1.04, and 1.10 for the ResNet. Models whose tensors have less than 16 KiB take more: see
  [below](#small-models).
- **Between two steps gradients alone are there**, each a tensor with storage of its own: `torch.save`, `pickle` and
  `deepcopy` of one write that one, and `zero_grad()` frees it. On a CPU several may lie in one piece of memory, of
  which at most a sixteenth is left over, and which is there as long as one of them: `explain()` says so as *gradients
  in one storage*. Who keeps one of them for long keeps a `clone()` of it. Such a gradient cannot be resized, as one
  that came from NumPy cannot.
- **Nobody else sees what is written over**: with `retain_graph=True`, or where a hook or you have a saved tensor, the
  backward works in a copy, which takes as much as the residuals.
- **Gradients are the same bits** wherever values lie.
- **What `explain()` predicts is what is measured**, within 1%, where no part runs in torch; and a `memory_budget` is
  kept, or refused with the least that can be.

Not so: on CUDA a captured graph has the residuals, and a file leaves its memory to its caller ([below](#how)).
Functions whose tensors have 16 KiB at most each are called on copies, which are kept from step to step: as much as they
take and give, and no figure here counts it. What is measured of such models is what larger ones would take.

## Models

Bytes alive in one step: results, saved values, gradients and scratch memory; parameters and arguments are not counted.

- *planned*: by liveness over the partitioned graph, before anything is lowered; plans are chosen by it. *predicted*:
  from the buffers that IREE lays out, at compile time; budgets are kept by it. *measured*: by IREE's counting
  allocator, and for PyTorch by its profiler, which sees torch's own allocator, not what oneDNN and MKL allocate by
  themselves, as to pack the operands of a product. Where PyTorch's convolutions run among our stages, it is what the
  profiler sees, which is shown the scratch memory of each stage while that runs.
- `default` saves what eager saves and computes nothing again; `min-cut`, which is what you get, saves the fewest bytes,
  unless `default` has the lower peak by liveness: then it saves what that does.
- A budget is a fraction of what eager takes, as found on tensors without contents. The least is taken where it cannot
  be met.
- Times are of the backward with the loss, the engines taking turns step by step; *to eager's* compares the fastest
  steps, which a busy machine disturbs least.
- *gradient error*: the largest difference from eager's gradients, relative to the norm of each.
"""
HOW = """\
A function holds all that it takes and gives for as long as it runs, where eager frees residuals and makes gradients as
it goes. So these lie in one another, on a CPU:

- **Residuals one behind another**, where one function gives them and another takes them, those of 16 KiB or more, by
  their last use, in one or two storages (`analysis/kernels/arenas.py`): what is dead is one piece then. That is so
  where it saves 1% of what the backward takes. Each is a tensor of its own, and no view.
- **Buffers and gradients in what is dead**: a backward works in the memory of residuals and tangents after their last
  use (`bwd-pack-scratch`), and gradients of 16 KiB or more that are written later stay there, as far as they fill it
  but for a sixteenth; so do those of embeddings, which IREE fills with zeros first, and what is put together by copies.
- **Small gradients copied**: where that saves 1%, gradients of a sixteenth of the residuals together lie there while
  the backward runs, and are copied to storage of their own when it has returned. The MLP's are: 1.00 for 1.02.
- **Kernels one after another at the fullest step** (`bwd-part-groups`): IREE runs side by side what does not need one
  another, so that one writes what is large while another is the last to read what is as large. Such a group is parted
  where that saves 1%, the others stay: Llama's backward went from 1.09 to 1.04, the ViT's from 1.05 to 1.02. A step of
  that Llama took 1.02 of the processor's time (fastest tenth; 1.03 in the median) and 0.99 of the clock's (1.01), 190
  steps of each beside one another on a busy machine.
- **Stages** work in what their plan frees after them, and a result of the size of one of these lies there.
  `free_early=True` cuts functions into such. On a CPU that is the default where it saves 32 MiB, which of these models
  none does; [cpu-steps.md](cpu-steps.md) has others. A budget tries each plan in stages too.

Not so: between stages, where each residual is freed by itself; backwards that take two tangents or more, since a loss
without one of these outputs has another backward, which would not find the residuals as it takes them (that of all
outputs, beside that of a loss alone, writes over none). The forward does not know where residuals lie: its buffers lie
in single results before they are written.

What is left, by model:

- ViT: the forward, whose two matrices of scores are 1.5% larger than each residual, takes 1.04 of eager's peak by
  itself, and eager's attention makes no such matrix. Three are alive in the backward where the weights are transposed.
- Llama: four tensors as wide as the MLP, and gradients that fill the dead residuals as they come, with gaps.
- ResNet-18 in `default`: residuals are eager's to the byte; above them the padded input of the pooling and the taps of
  strided convolutions, up to 0.9 MiB, where the memory that oneDNN takes for eager is not counted. `default` does not
  take `min-cut`'s plan where that is leaner: it is what computes nothing again.

Tried, and not done: stages for less, from 4 MiB on that are an eighth of the peak, which took the BERT, Llama and
StarCoder2 to 1.07, 1.26 and 1.14, and 0.4 to 8% more of the processor's time in the fastest tenth of steps, 6.5 to 11%
in the median (`free_early=True` to 0.99, 1.18 and 1.06, and 9 to 15% in the median; the BERT's kernels are the same
ones in stages, where the time goes was not found). Memory laid out for kernels one at a time, as budgets have it: the
ViT 1.04 for 1.05, the Llama the same, for 2 to 30% more of the processor's time. Buffers that IREE fills or copies to
in storage for results, each of which takes 13 us to import for that (an arena takes it once): the ResNet-18 1.12 for
1.13.

Which buffers lie in what is dead is found by four rules where the first leaves more than it has to, and where the first
gradients of a backward would take the room of its fullest steps, they have storage of their own.

## Small models

The models of [models.md](models.md) have a width of 32, so that nothing of them has 16 KiB: all gradients have storage
of their own from the beginning, and peaks there are up to twice eager's. It is no property of the models: with a width
of 256, 1,024 within the MLP and 1,024 words, on 8 x 16 tokens, BERT, Llama and StarCoder2, whose gradients are larger
than their residuals, take 0.93, 1.04 and 0.92 of it in `default` (the Llama 1.03 in `min-cut`). To eager's peak, both
by PyTorch's profiler, which is shown what compiled functions work in, `min-cut`:

| width 32 | to eager's | what is more |
| --- | ---: | --- |
| BERT | 1.43 | gradients, all |
| Llama | 1.19 | gradients, all |
| DistilBERT | 1.60 | gradients, all |
| OPT | 1.48 | gradients, all |
| T5 | 1.51 | gradients, all |
| BART | 1.61 | gradients, all |
| ViT | 1.67 | gradients, all |
| ResNet | 1.87 | gradients, all; taps of convolutions |
| DeBERTa | 2.17 | gradients; 200 KiB where gradients of gathers are added up |
| diffusion U-Net | 1.91 | taps of convolutions, four times the residuals; oneDNN's memory is not counted for eager |
"""
GPU_TEXT = """\
On CUDA what our own kernels and IREE's work in is one piece of torch's memory for each function, which is there while
it runs. Buffers lie in storage for results before these are written, and in what one stage gave another, between
islands, after its last use; residuals are not written over, since a captured graph has them, and are freed when a
stage returns. [gpu-steps.md](gpu-steps.md) has the peak of each step there, beside eager's and Inductor's.

What is predicted there are these pieces, placed by first fit as launch plans place them, and what `explain()`
measures is what torch's allocator was asked for: on an H100 both are the same to the byte for whole functions, and
half of `default`'s peak, or the least, is kept by a CNN, a GPT-2 and a ResNet-18 (2026-11-26, `pytest
tests/gpu/test_cuda_models.py -k half_of_the_memory`). A file that `iree-run-module` runs takes its memory from IREE's
own allocator, which gives it back later: there the least was missed, by the CNN with 29,128 bytes for 24,596.

On CUDA `save_policy=retrograd.offload()` keeps residuals on the host between the halves
([guide](guide.md#what-to-save-by-hand)); the copies of one stage run beside the next, and peaks are predicted with
what is on its way. A budget's plan may do so too, where `offload(within_budget=True)` lets it. GPT-2 small takes 0.34
to 0.54 of eager's peak so, in 0.97 to 2.18 of its time ([gpu-steps.md](gpu-steps.md)).

Arenas as on a CPU are not there: at real sizes peaks are 0.62 to 0.95 of eager's already (GPT-2 small, BERT, Llama
blocks, ResNet-50; the 1.89 of [gpu-steps.md](gpu-steps.md) is that of a GPT of 9 MiB).
"""
FLOOR = ("model", "forward alone", "of eager's peak", "least peak found", "of eager's peak")
FLOOR_TEXT = """\
Every plan runs the forward, so that none has a lower peak than the forward has by itself: outputs and what its kernels
hand to one another, with nothing counted that is saved (of the smallest budget above). Where that is more than half of
eager's peak, half of it is no budget that any choice of what to save could meet; the activations of a convolutional
net's first layers, and padded copies of them, are alive together before anything is saved. So it is with
the backward, which holds what one of its steps takes: of the MLP two layers' activations and the gradients of both, 4
MiB each, so that its least budget is 0.81 of eager's peak. The error for a budget that cannot be met says which half
takes more than it, whatever is saved.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    console = make_console(140)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    names = list(MODELS) if options.models == ["all"] else options.models
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    results: dict[str, MemoryResult] = {}
    for name in names:
        case = make_case(name, options.size)
        result = measure_model(name, case, options.fractions, options.repeats, say, peers=not options.no_peers)
        results[name] = result
        for row in result.rows:
            say("  ".join(cells(row, result.rows)))
        # The run takes minutes: what is measured is written as soon as it is there.
        save_timelines(name, result, options.out)
        facts = environment(options.size, options.repeats)
        facts["load of the machine"] = f"{os.getloadavg()[2]:.1f} processes on {os.cpu_count()} cores"
        facts["minutes"] = f"{(time.perf_counter() - start) / 60:.1f}"
        save_rows(results, facts, options.out)
    # A page of some of the models takes the others' rows away.
    if options.write:
        write_document(results, facts, arguments, options.out)
    say(f"written: {options.out}{f' and {DOCUMENT}' if options.write else ''}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure peaks of memory and times of backwards within budgets.")
    parser.add_argument(
        "--models", nargs="+", choices=[*MODELS, "all"], default=list(SIZES), metavar="MODEL", help=", ".join(MODELS)
    )
    parser.add_argument("--size", choices=("memory", "test", "bench"), default="memory", help="memory has six models")
    parser.add_argument("--fractions", nargs="*", type=float, default=[0.75, 0.5], help="budgets, of eager's peak")
    parser.add_argument("--repeats", type=positive, default=20, help="steps timed per model and engine")
    parser.add_argument("--threads", type=positive, help="threads of every engine; torch's own choice if not given")
    parser.add_argument("--no-peers", action="store_true", help="leave Inductor out")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench-memory", metavar="FOLDER")
    parser.add_argument("--write", action="store_true", help="write docs/memory.md, and its pictures to docs/img")
    options = parser.parse_args(arguments)
    missing = [] if options.size != "memory" else sorted({*options.models} - SIZES.keys())
    if missing:
        parser.error(f"{', '.join(missing)}: --size memory has {', '.join(SIZES)}; take --size test or bench")
    if any(f <= 0 for f in options.fractions):
        parser.error("--fractions are above zero")
    return options


def save_rows(results: dict[str, MemoryResult], facts: dict[str, str], folder: Path) -> None:
    """All rows as JSON, and the picture of their peaks against their times."""
    save_json(folder / "rows.json", (row for result in results.values() for row in result.rows), facts)
    draw_curves(results, folder / "curves.png")


def save_timelines(name: str, result: MemoryResult, folder: Path) -> None:
    """What is in memory with `default` and within the smallest budget, as a picture and a trace."""
    before, after = result.reports["default"], result.reports[list(result.reports)[-1]]
    if "islands" in before.data or "islands" in after.data:
        # What torch has in memory while it runs its parts is not known step by step.
        return
    for suffix in (".png", ".json"):
        after.save_timeline(folder / f"{name}{suffix}", before=before)


def cells(row: MemoryRow, rows: Sequence[MemoryRow]) -> list[str]:
    """The row as text, in the order of ``COLUMNS``; compared with eager's among ``rows``."""
    eager = next(r for r in rows if r.how == "eager" and r.model == row.model)
    sizes = (row.budget_bytes, row.saved_bytes)
    peaks = (row.peak_planned, row.peak_predicted, row.peak_measured)
    return [
        row.model,
        row.how + (f" ({row.note})" if row.note else ""),
        *("-" if n is None else format_bytes(n) for n in sizes),
        "-" if row.recomputed_flops is None else f"{row.recomputed_flops:,}",
        *("-" if n is None else format_bytes(n) for n in peaks),
        ratio(row.peak_measured, eager.peak_measured),
        *("-" if t is None else f"{t:.2f}" for t in (row.backward_ms, row.best_ms)),
        ratio(row.best_ms, eager.best_ms),
        "-" if row.gradient_error is None else f"{row.gradient_error:.0e}",
    ]


def ratio(value: float | None, whole: float | None) -> str:
    return "-" if value is None or not whole else f"{value / whole:.2f}"


def draw_curves(results: dict[str, MemoryResult], path: Path) -> None:
    """For each model the measured peak of each row against the time of its backward; what of retrograd's trades one
    for the other is joined by a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = -(-len(results) // 3)
    figure = Figure(figsize=(10.5, 0.6 + 3.0 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, 3, squeeze=False).flatten()
    for axis in axes[len(results) :]:
        axis.remove()
    ways = list(dict.fromkeys(row.how for result in results.values() for row in result.rows if row.best_ms))
    for axis, (name, result) in zip(axes, results.items(), strict=False):
        ours: list[tuple[float, float]] = []
        for row in result.rows:
            if row.best_ms is None or row.peak_measured is None:
                continue
            point = (row.best_ms, row.peak_measured / 2**20)
            mine = row.peak_predicted is not None
            ours += [point] if mine else []
            color = f"C{ways.index(row.how)}"
            axis.plot(*point, marker="o" if mine else "x", color=color, linestyle="", label=row.how)
        axis.plot(*zip(*ours, strict=True), color="#cccccc", zorder=0)
        axis.set_title(name, fontsize="medium")
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
        axis.set_xlabel("backward, ms", fontsize="small")
        axis.set_ylabel("peak, MiB", fontsize="small")
    shown = {
        label: handle for axis in figure.axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    figure.savefig(path, dpi=90)


def write_document(
    results: dict[str, MemoryResult], facts: dict[str, str], arguments: Sequence[str] | None, folder: Path
) -> None:
    """The page and its pictures, from what was just measured."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    shown = ["curves", *(name for name in ("gpt2", "resnet18") if (folder / f"{name}.png").exists())]
    for name in shown:
        (PICTURES / f"memory-{name}.png").write_bytes((folder / f"{name}.png").read_bytes())
    lines = heading("What a step takes", "memory.py", arguments, EXPLANATION)
    lines += ["![peak against time](img/memory-curves.png)", ""]
    lines += markdown_table(COLUMNS, 2, (cells(row, r.rows) for r in results.values() for row in r.rows))
    lines += ["", "## How", "", HOW, "## What no plan goes below", "", FLOOR_TEXT]
    lines += markdown_table(FLOOR, 1, floors(results))
    lines += [
        "",
        "## On a GPU",
        "",
        GPU_TEXT,
        "## Prediction",
        "",
        *prediction(results),
        "",
        "## What is in memory, kernel by kernel",
        "",
    ]
    lines += [f"![{name}](img/memory-{name}.png)\n" for name in shown[1:]]
    lines += ["`step.explain().save_timeline(path)` draws this for any model.", ""]
    write_page(DOCUMENT, lines + measured_with(facts))


def floors(results: dict[str, MemoryResult]) -> Iterator[list[str]]:
    """The rows of ``FLOOR``: the forward's outputs and scratch memory, and the least of the measured peaks of ours."""
    for name, result in results.items():
        report = list(result.reports.values())[-1].to_dict()
        if "islands" in report:
            continue
        forward = report["timeline"]["forward"]
        alone = max(s["scratch"] + sum(n for kind, n in s["held"].items() if kind != "residuals") for s in forward)
        peaks = {row.how: row.peak_measured for row in result.rows if row.peak_measured}
        whole, least = peaks["eager"], min(peak for how, peak in peaks.items() if how in result.reports)
        yield [name, format_bytes(alone), ratio(alone, whole), format_bytes(least), ratio(least, whole)]


def prediction(results: dict[str, MemoryResult]) -> list[str]:
    """How far planned and predicted peaks are from measured ones."""
    rows = [r for result in results.values() for r in result.rows if r.peak_predicted and r.peak_measured]
    lines = [
        "| peak | within 1% | within 5% | furthest below | furthest above |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, peaks in (
        ("planned", [(r.peak_planned or 0) / (r.peak_measured or 1) for r in rows]),
        ("predicted", [(r.peak_predicted or 0) / (r.peak_measured or 1) for r in rows]),
    ):
        near = [sum(abs(p - 1) <= bound for p in peaks) for bound in (0.01, 0.05)]
        lines.append(
            f"| {name} | {near[0]} of {len(peaks)} | {near[1]} of {len(peaks)} "
            f"| {min(peaks) - 1:+.1%} | {max(peaks) - 1:+.1%} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
