# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels of our own at the sizes that people train, on a CUDA device: products beside cuBLAS.

python benchmarks/kernels.py --tiles
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from page import (
    command_line,
    cuda_environment,
    heading_of,
    markdown_table,
    measured_with,
    need_cuda_device,
    positive,
    save_json,
    write_page,
)
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import retrograd
from retrograd.pipelines.kernels.tiles import Shape, choose_tiling, estimate_seconds

DOCUMENT = Path(__file__).parents[1] / "docs" / "gpu-kernels.md"
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
the bytes of the preparation take; *measured tiles* is ours with `tiles="measure"`, by how much less it takes.
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
    tiled: float | None = None


def kernel_times(call: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Microseconds of each kernel in a call."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    return {k.key: k.self_device_time_total / repeats for k in found.key_averages() if k.self_device_time_total > 0}


def measure_product(kind: str, layout: str, size: tuple[int, int, int], repeats: int, *, tiles: bool) -> ProductRow:
    m, n, k = size
    function, dtype = LAYOUTS[layout], TYPES[kind]
    a = torch.randn((k, m) if layout[0] == "t" else (m, k), device="cuda").to(dtype).requires_grad_()
    b = torch.randn((n, k) if layout[1] == "t" else (k, n), device="cuda").to(dtype)
    compiled = retrograd.compile_backward(function, (a, b))
    tiled = retrograd.compile_backward(function, (a, b), tiles="measure") if tiles else None
    a.requires_grad_(False)
    exact = function(a.double(), b.double())
    errors = [float((call(a, b).detach().double() - exact).norm() / exact.norm()) for call in (function, compiled)]
    library, ours = (sum(kernel_times(partial(call, a, b), repeats).values()) for call in (function, compiled))
    shape = Shape(1, m, n, k, kind)
    moved = sum(10 * t.numel() for t in (a, b)) if shape.parts > 1 else 0
    predicted = 1e6 * (estimate_seconds(shape, choose_tiling(shape, "sm_90")) + moved / BANDWIDTH)
    name = f"{m} x {n} x {k} {layout} {kind}"
    fastest = None if tiled is None else sum(kernel_times(partial(tiled, a, b), repeats).values())
    return ProductRow(name, library, ours, predicted, 2e-6 * m * n * k / ours, errors[0], errors[1], fastest)


def document(products: Sequence[ProductRow], facts: dict[str, str]) -> list[str]:
    """The page, by line."""
    depends = dict(facts)
    lines = heading_of(f"Kernels of our own: {facts['device']}", [depends.pop("command")], EXPLANATION)
    figures = ["cuBLAS us", "ours us", "predicted us", "TFLOP/s", "to cuBLAS's speed", "cuBLAS's error", "error"]
    lines += markdown_table(["product", *figures, "measured tiles"], 1, map(product_cells, products))
    return [*lines, "", *measured_with(depends)]


def product_cells(row: ProductRow) -> list[str]:
    figures = [f"{row.library:.0f}", f"{row.ours:.0f}", f"{row.predicted:.0f}", f"{row.tflops:.0f}"]
    tiled = "" if row.tiled is None else f"{row.ours / row.tiled:.2f}"
    return [row.name, *figures, f"{row.library / row.ours:.2f}", f"{row.library_error:.1e}", f"{row.error:.1e}", tiled]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time kernels of our own on a CUDA device.")
    parser.add_argument("--repeats", type=positive, default=11, help="calls timed")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES), help="of elements")
    parser.add_argument("--sizes", type=positive, default=len(SIZES), help="how many of the sizes, from the first on")
    parser.add_argument("--tiles", action="store_true", help="with tiles that are measured, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--write", action="store_true", help="write the table to docs/gpu-kernels.md")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    need_cuda_device()
    facts = {"command": command_line("kernels.py", arguments), **cuda_environment("timed", options.repeats)}
    products: list[ProductRow] = []
    for kind in options.types:
        for size in SIZES[: options.sizes]:
            for layout in LAYOUTS:
                products.append(measure_product(kind, layout, size, options.repeats, tiles=options.tiles))
                print(*product_cells(products[-1]), sep=" | ", flush=True)
    if options.json is not None:
        save_json(options.json, products, facts)
    if options.write:
        write_page(DOCUMENT, document(products, facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
