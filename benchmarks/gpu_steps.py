# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Steps of models at the sizes that people train, on a CUDA device: eager, `torch.compile`, retrograd, its graphs.

python benchmarks/gpu_steps.py
python benchmarks/gpu_steps.py --models gpt2-small:f32 --through retrograd --repeats 5
python benchmarks/gpu_steps.py --packages --through inductor retrograd
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernels import kernel_times
from measure import first_line
from measure_gpu import EnabledModel, Runner, gradients, measure_peak, run_step, time_in_turn
from models.bert import bert
from models.case import Case
from models.gpt import language_model
from models.llama import llama
from models.packages import PACKAGE_RUNS, PACKAGES
from models.precision import convert
from models.resnet import resnet50
from page import (
    command_line,
    cuda_environment,
    need_cuda_device,
    number,
    positive,
    save_json,
    steps_page,
    write_page,
)
from torch import Tensor

import retrograd

DOCUMENTS = Path(__file__).parents[1] / "docs"
MODELS: dict[str, Callable[[], Case]] = {
    "gpt2-small": lambda: language_model(8, 512, 768, 12, 12, 50257),
    "bert-base": lambda: bert(32, 128, 768, 12, 12, 30522),
    "llama-blocks": lambda: llama(4, 1024, 3072, 24, 8, 2, 32000),
    "resnet50": lambda: resnet50(64, 224, 1000),
    "gpt-tiny": lambda: language_model(1, 128, 256, 4, 2, 1000),
    **PACKAGES,
}
RUNS = (
    *("gpt2-small:f32", "gpt2-small:autocast", "bert-base:f32", "bert-base:autocast", "llama-blocks:bf16"),
    *("resnet50:f32", "resnet50:autocast", "gpt-tiny:f32"),
)


def load_file(case: Case) -> Callable[..., Any]:
    """A step from a file that was saved, in which no library computes anything."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.rgd"
        retrograd.compile_backward(case.model, case.args, verify=False).save(path)
        return retrograd.load(path, case.model if isinstance(case.model, torch.nn.Module) else None)


def save_on_cpu(case: Case) -> Callable[..., Any]:
    """The model in eager, with what it saves in pinned memory of the host."""

    def run(*args: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return case.model(*args)

    return run


ENGINES: dict[str, Callable[[Case], Callable[..., Any]]] = {
    "inductor": lambda case: torch.compile(case.model),
    "retrograd": lambda case: retrograd.compile_backward(case.model, case.args),
    "graphs": lambda case: retrograd.compile_backward(case.model, case.args, cuda_graphs=True),
    "auto": lambda case: retrograd.compile_backward(case.model, case.args, cuda_graphs="auto"),
    "early": lambda case: retrograd.compile_backward(case.model, case.args, free_early=True),
    "offload": lambda case: retrograd.compile_backward(case.model, case.args, save_policy=retrograd.offload()),
    "save_on_cpu": save_on_cpu,
    "enable": lambda case: EnabledModel(case.model),
    "tiles": lambda case: retrograd.compile_backward(case.model, case.args, tiles="measure"),
    "file": load_file,
    "off": lambda case: retrograd.compile_backward(case.model, case.args, kernels="off"),
}
# Compiled as "retrograd" is.
CAPTURED = ("graphs", "auto")
# Sums of atomic additions differ by less than a thousandth of this.
RANDOM = 0.1
# `cuda_graphs="auto"` decides after six.
WARM_UP_STEPS = 9
EXPLANATION = """\
Each step is a forward, the mean of the squared outputs and a backward, from and to an idle device; medians, the engines
taking turns in one process. TF32 is off. *through*: eager PyTorch, `torch.compile` with Inductor, `compile_backward`
with its defaults, with `cuda_graphs=True` (*graphs*) and `cuda_graphs="auto"` (*auto*), from a file that was saved
(*file*), with `free_early=True` (*early*), with residuals on the host (*offload*; in eager *save_on_cpu*), with
`kernels="off"`, and in eager with the backward inside of `enable()`.

- *kernels*: the sum of kernel times of a step, by `torch.profiler`.
- *peak*: the most memory of a step beyond what was there before it, by torch's count; a graph's memory is there before,
  so that it has no such figure.
- *from float64*: the median over all gradients of the distance to the model's in float64, relative to the norm.
"""
OWN_MODELS = """\
GPT-2 small on 8 x 512 tokens; BERT base on 32 x 128; two blocks of Llama 3.2 3B's sizes with a vocabulary of 32,000 on
4 x 1024; ResNet-50 on 64 images of 224 x 224; a GPT of two layers of 256 on 128 tokens, which is all launches.
"""
PACKAGE_MODELS = """\
Models of transformers (*hf-*) and torchvision (*tv-*) with random parameters, as the packages have them, their dropout
included (`benchmarks/models/packages.py` has the sizes). Where eager itself gives other gradients at each call, the
last column is empty: the first call of each half was compared with eager's for the same random numbers all the same.
"""
COLUMNS = ("model", "through", "step ms", "to eager", "kernels ms", "peak MiB", "to eager's", "from float64")


@dataclass(frozen=True)
class StepRow:
    """A model in a precision through an engine: milliseconds of a step and of its kernels, MiB. None is what could not
    be had; ``note`` says why."""

    model: str
    through: str
    step_ms: float | None = None
    ratio: float | None = None
    kernels_ms: float | None = None
    peak_mib: float | None = None
    peak_ratio: float | None = None
    error: float | None = None
    note: str = ""


def make_case(name: str, precision: str = "") -> Case:
    """A model of ``MODEL:PRECISION``, the same each time; ``precision`` in place of its own."""
    model, _, own = name.partition(":")
    torch.manual_seed(0)
    return convert(MODELS[model](), "cuda", precision or own)  # type: ignore[arg-type]


def exact_gradients(name: str) -> dict[str, Tensor]:
    """Gradients in float64, on the host."""
    case = make_case(name, "f32")
    doubled = case.model.double() if isinstance(case.model, torch.nn.Module) else case.model
    args = [a.detach().double().requires_grad_(a.requires_grad) if a.is_floating_point() else a for a in case.args]
    found = gradients(Case(doubled, tuple(args), case.loss))
    return {name: gradient.cpu() for name, gradient in found.items()}


def is_random(case: Case) -> bool:
    """Whether eager's gradients are others at each call, by more than rounding."""
    first = {name: gradient.cpu().double() for name, gradient in gradients(case).items()}
    return distance(gradients(case), first) > RANDOM


def distance(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The median distance of gradients, relative to the norm, of those that are not zero."""
    norms = {name: float(gradient.norm()) for name, gradient in exact.items()}
    known = [name for name, norm in norms.items() if norm > 0]
    return statistics.median(float((found[n].cpu().double() - exact[n]).norm()) / norms[n] for n in known)


def measure(name: str, engines: Sequence[str], repeats: int) -> list[StepRow]:
    """A row for eager and for each engine."""
    exact = {} if is_random(make_case(name, "f32")) else exact_gradients(name)
    torch.cuda.empty_cache()
    case = make_case(name)
    runners = [Runner("eager", case.model)]
    rows = []
    for engine in engines:
        torch._dynamo.reset()
        try:
            runner = Runner(engine, ENGINES[engine](case))
            for _ in range(WARM_UP_STEPS):
                run_step(case, runner.call)
        except (RuntimeError, ValueError) as error:
            rows.append(StepRow(name, engine, note=first_line(error)))
        else:
            runners.append(runner)
    run_step(case, case.model)
    time_in_turn(case, runners, repeats)
    peaks = {runner.engine: (measure_peak(case, runner) or 0) / 2**20 for runner in runners}
    for runner in runners:
        kernels = sum(kernel_times(partial(run_step, case, runner.call), 2).values()) / 1e3
        found = distance(gradients(case, runner.call), exact) if exact else None
        peak = None if runner.engine in CAPTURED else peaks[runner.engine]
        times = 1e3 * runner.median, runner.median / runners[0].median
        of_eager = None if peak is None else peak / peaks["eager"]
        rows.append(StepRow(name, runner.engine, *times, kernels, peak, of_eager, found))
    order = ["eager", *engines]
    return sorted(rows, key=lambda row: order.index(row.through))


def cells(row: StepRow) -> list[str]:
    """The row as text, in the order of ``COLUMNS``."""
    figures = (row.step_ms, row.ratio, row.kernels_ms, row.peak_mib, row.peak_ratio, row.error)
    forms = (".1f", ".2f", ".1f", ".0f", ".2f", ".1e")
    return [row.model, row.through, *(number(figure, form) for figure, form in zip(figures, forms, strict=True))]


def document(rows: Sequence[StepRow], facts: dict[str, str], of_packages: bool) -> list[str]:
    """The page, by line."""
    title = "Steps of models of transformers and torchvision" if of_packages else "Steps at the sizes people train"
    explanation = f"{EXPLANATION}\n{PACKAGE_MODELS if of_packages else OWN_MODELS}"
    return steps_page(
        f"{title}: {facts['device']}", explanation, COLUMNS, [(cells(row), row.note) for row in rows], facts
    )


def compile_all(jobs: Sequence[tuple[str, str]], at_once: int) -> None:
    """Fill the caches, each job in a process of its own; what fails does so once more when it is measured."""
    waiting = list(jobs)
    running: list[subprocess.Popen[bytes]] = []
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(subprocess.Popen([sys.executable, __file__, "--compile", *waiting.pop(0)]))
        running.pop(0).wait()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time steps of models at real sizes on a CUDA device.")
    parser.add_argument("--models", nargs="+", metavar="MODEL:PRECISION", help=", ".join(MODELS))
    parser.add_argument("--packages", action="store_true", help="models of transformers and torchvision")
    default = ["inductor", "retrograd", "graphs", "auto"]
    parser.add_argument("--through", nargs="+", choices=ENGINES, default=default, help="beside eager")
    parser.add_argument("--repeats", type=positive, default=11, help="steps timed of each")
    parser.add_argument("--jobs", type=positive, default=min(8, os.cpu_count() or 1), help="compilations at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too, as they come")
    parser.add_argument("--write", action="store_true", help="write docs/gpu-steps.md or docs/gpu-packages.md")
    parser.add_argument("--compile", nargs=2, metavar=("MODEL:PRECISION", "ENGINE"), help="only fill the caches")
    options = parser.parse_args(arguments)
    options.models = options.models or list(PACKAGE_RUNS if options.packages else RUNS)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    need_cuda_device()
    if options.compile:
        case = make_case(options.compile[0])
        run_step(case, ENGINES[options.compile[1]](case))
        return 0
    facts = {"command": command_line("gpu_steps.py", arguments), **cuda_environment("steps timed", options.repeats)}
    compile_all([(m, e) for m in options.models for e in options.through if e not in CAPTURED], options.jobs)
    rows: list[StepRow] = []
    for model in options.models:
        for row in measure(model, options.through, options.repeats):
            rows.append(row)
            print(*cells(row), row.note, sep=" | ", flush=True)
        if options.json is not None:
            save_json(options.json, rows, facts)
    if options.write:
        page = "gpu-packages.md" if options.packages else "gpu-steps.md"
        write_page(DOCUMENTS / page, document(rows, facts, options.packages))
    return 0


if __name__ == "__main__":
    sys.exit(main())
