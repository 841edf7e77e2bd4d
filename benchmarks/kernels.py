# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels of our own at the sizes that people train, on a CUDA device: products beside cuBLAS, steps beside eager.

python benchmarks/kernels.py
python benchmarks/kernels.py --models gpt2-small:f32 --products none --repeats 5
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models.bert import bert
from models.case import Case
from models.gpt import language_model
from models.llama import llama
from models.precision import convert
from models.resnet import resnet
from page import command_line, cpu_model, heading_of, markdown_table, measured_with, positive, releases, write_page
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import retrograd
from retrograd.pipelines.kernels.tiles import Shape, choose_tiling, estimate_seconds

DOCUMENT = Path(__file__).parents[1] / "docs" / "gpu-kernels.md"
MODELS: dict[str, Callable[[], Case]] = {
    "gpt2-small": lambda: language_model(8, 512, 768, 12, 12, 50257),
    "llama-blocks": lambda: llama(4, 1024, 2048, 16, 16, 4, 32000),
    "bert-base": lambda: bert(32, 128, 768, 12, 12, 30522),
    "resnet34": lambda: resnet(64, 4, 3, 64, 224, 1000),
}
"""Real sizes: GPT-2 small on 8 x 512 tokens, four blocks as wide as Llama's, BERT base on 32 x 128, images of 224."""

RUNS = (
    "gpt2-small:f32",
    "gpt2-small:autocast",
    "llama-blocks:bf16",
    "bert-base:f32",
)
SIZES = ((4096, 4096, 4096), (4096, 3072, 768), (4096, 768, 3072), (768, 3072, 4096), (4096, 50257, 768))
LAYOUTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nn": lambda a, b: a @ b,
    "nt": lambda a, b: a @ b.t(),
    "tn": lambda a, b: a.t() @ b,
}
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# What a copy on an H100 reaches, in bytes a second: for predictions alone.
BANDWIDTH = 2.8e12
EXPLANATION = """\
Kernel times, by `torch.profiler`, of a product and of all that prepares its operands, beside PyTorch's own (cuBLAS,
TF32 off) in the same process; errors relative to the norm, from float64. *predicted* is what `tiles.py` estimates and
the bytes of the preparation take. Steps are forward and backward, medians, from and to an idle device; *kernels* is
the sum of kernel times. *off* is retrograd with `kernels="off"`. Gradients are compared with eager's: the largest
difference relative to the norm.
"""


@dataclass(frozen=True)
class ProductRow:
    """A product: times in microseconds of kernels."""

    name: str
    library: float
    ours: float
    predicted: float
    tflops: float
    library_error: float
    error: float


@dataclass(frozen=True)
class StepRow:
    """A step of a model: times in milliseconds."""

    name: str
    kernels: str
    eager: float
    ours: float
    eager_kernels: float
    our_kernels: float
    difference: float


def kernel_times(call: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Microseconds of each kernel in a call."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    return {k.key: k.self_device_time_total / repeats for k in found.key_averages() if k.self_device_time_total > 0}


def measure_product(kind: str, layout: str, size: tuple[int, int, int], repeats: int) -> ProductRow:
    m, n, k = size
    function, dtype = LAYOUTS[layout], TYPES[kind]
    a = torch.randn((k, m) if layout[0] == "t" else (m, k), device="cuda").to(dtype).requires_grad_()
    b = torch.randn((n, k) if layout[1] == "t" else (k, n), device="cuda").to(dtype)
    compiled = retrograd.compile_backward(function, (a, b))
    a.requires_grad_(False)
    exact = function(a.double(), b.double())
    errors = [float((call(a, b).detach().double() - exact).norm() / exact.norm()) for call in (function, compiled)]
    library, ours = (sum(kernel_times(partial(call, a, b), repeats).values()) for call in (function, compiled))
    shape = Shape(1, m, n, k, kind)
    moved = sum(10 * t.numel() for t in (a, b)) if shape.parts > 1 else 0
    predicted = 1e6 * (estimate_seconds(shape, choose_tiling(shape, "sm_90")) + moved / BANDWIDTH)
    name = f"{m} x {n} x {k} {layout} {kind}"
    return ProductRow(name, library, ours, predicted, 2e-6 * m * n * k / ours, errors[0], errors[1])


def make_case(name: str) -> Case:
    model, _, precision = name.partition(":")
    torch.manual_seed(0)
    return convert(MODELS[model](), "cuda", precision)  # type: ignore[arg-type]


def compile_case(case: Case, kernels: str) -> Any:
    return retrograd.compile_backward(case.model, case.args, kernels=kernels)


def run_step(case: Case, call: Callable[..., Any]) -> None:
    for leaf in case.leaves().values():
        leaf.grad = None
    case.loss(call(*case.args)).backward()


def median_ms(case: Case, call: Callable[..., Any], repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run_step(case, call)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * sorted(times[2:])[repeats // 2]


def measure_step(name: str, kernels: str, repeats: int) -> StepRow:
    case = make_case(name)
    compiled = compile_case(case, kernels)
    eager, theirs = median_ms(case, case.model, repeats), gradients(case)
    ours, mine = median_ms(case, compiled, repeats), gradients(case)
    difference = max(float((mine[n].double() - g.double()).norm() / g.double().norm()) for n, g in theirs.items())
    sums = [sum(kernel_times(partial(run_step, case, call), 2).values()) / 1e3 for call in (case.model, compiled)]
    return StepRow(name, kernels, eager, ours, sums[0], sums[1], difference)


def gradients(case: Case) -> dict[str, Tensor]:
    """The gradients that are not zero."""
    return {
        name: leaf.grad.clone() for name, leaf in case.leaves().items() if leaf.grad is not None and leaf.grad.any()
    }


def compile_all(jobs: Sequence[tuple[str, str]], at_once: int) -> None:
    """Fill the cache, each case in a process of its own."""
    waiting = list(jobs)
    running: list[subprocess.Popen[bytes]] = []
    while waiting or running:
        while waiting and len(running) < at_once:
            name, kernels = waiting.pop(0)
            running.append(subprocess.Popen([sys.executable, __file__, "--compile", name, kernels]))
        running.pop(0).wait()


def document(products: Sequence[ProductRow], steps: Sequence[StepRow], facts: dict[str, str]) -> list[str]:
    """The page, by line."""
    depends = dict(facts)
    lines = heading_of(f"Kernels of our own: {facts['device']}", [depends.pop("command")], EXPLANATION)
    figures = ["cuBLAS us", "ours us", "predicted us", "TFLOP/s", "to cuBLAS's speed", "cuBLAS's error", "error"]
    lines += markdown_table(["product", *figures], 1, map(product_cells, products))
    columns = ["step", "kernels", "eager ms", "ours ms", "to eager", "kernels of eager / ours, ms", "gradients differ"]
    lines += ["", *markdown_table(columns, 2, map(step_cells, steps)), ""]
    return lines + measured_with(depends)


def product_cells(row: ProductRow) -> list[str]:
    figures = [f"{row.library:.0f}", f"{row.ours:.0f}", f"{row.predicted:.0f}", f"{row.tflops:.0f}"]
    return [row.name, *figures, f"{row.library / row.ours:.2f}", f"{row.library_error:.1e}", f"{row.error:.1e}"]


def step_cells(row: StepRow) -> list[str]:
    both = f"{row.eager_kernels:.1f} / {row.our_kernels:.1f}"
    figures = [f"{row.eager:.1f}", f"{row.ours:.1f}", f"{row.ours / row.eager:.2f}", both, f"{row.difference:.0e}"]
    return [row.name, row.kernels, *figures]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time kernels of our own on a CUDA device.")
    parser.add_argument("--models", nargs="*", default=list(RUNS), metavar="MODEL:PRECISION", help=", ".join(MODELS))
    parser.add_argument("--products", choices=("all", "none"), default="all")
    parser.add_argument("--kernels", nargs="+", default=["auto", "off"], help="what models are compiled with")
    parser.add_argument("--repeats", type=positive, default=11, help="steps timed, and calls of a product")
    parser.add_argument("--jobs", type=positive, default=min(8, os.cpu_count() or 1), help="compilations at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--write", action="store_true", help="write the tables to docs/gpu-kernels.md")
    parser.add_argument("--compile", nargs=2, metavar=("MODEL:PRECISION", "KERNELS"), help="only fill the cache")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        sys.exit("no CUDA device to run on")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if options.compile:
        compile_case(make_case(options.compile[0]), options.compile[1])
        return 0
    facts = {"command": command_line("kernels.py", arguments), "device": torch.cuda.get_device_name()}
    facts |= {"CUDA": str(torch.version.cuda), "CPU": cpu_model(), "timed": str(options.repeats), **releases()}
    jobs = [(name, kernels) for name in options.models for kernels in options.kernels]
    compile_all(jobs, options.jobs)
    products: list[ProductRow] = []
    for kind in TYPES if options.products == "all" else ():
        for size in SIZES:
            for layout in LAYOUTS:
                products.append(measure_product(kind, layout, size, options.repeats))
                print(*product_cells(products[-1]), sep=" | ", flush=True)
    steps: list[StepRow] = []
    for name, kernels in jobs:
        steps.append(measure_step(name, kernels, options.repeats))
        print(*step_cells(steps[-1]), sep=" | ", flush=True)
    if options.json is not None:
        rows = {"products": list(map(asdict, products)), "steps": list(map(asdict, steps)), "environment": facts}
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    if options.write:
        write_page(DOCUMENT, document(products, steps, facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
