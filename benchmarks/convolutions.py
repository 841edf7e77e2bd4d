# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Convolutions in kernels of our own at the sizes of ResNet-50, beside cuDNN, on a CUDA device.

python benchmarks/convolutions.py
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from kernels import TYPES, kernel_times
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

import retrograd

DOCUMENT = Path(__file__).parents[1] / "docs" / "gpu-convolutions.md"
EXPLANATION = """\
The convolutions of ResNet-50, and one of 256 channels, each with its gradients, of 64 images. Both take and give
tensors whose channels lie last; ours are compiled with kernels alone (`kernels=` without `library`), as a file has
them. Kernel times by `torch.profiler` in one process (TF32 off, cuDNN as it chooses by itself), the sum of a filter
gradient's parts among them; errors are the largest of the three, relative to the norm, from float64.
"""
KERNELS = ("columns", "convolutions", "products", "transposes")
WORK = ("results", "images", "filters")
BATCH = 64


@dataclass(frozen=True)
class Layer:
    """Channels and filters, taps along each axis, the stride, and the size of a plane."""

    channels: int
    filters: int
    taps: int
    stride: int
    size: int

    def __str__(self) -> str:
        strided = f", stride {self.stride}" * (self.stride > 1)
        return f"{self.channels} to {self.filters}, {self.taps} x {self.taps}{strided}, {self.size} x {self.size}"

    @property
    def flops(self) -> float:
        """Of any of the three."""
        places = BATCH * (-(-self.size // self.stride)) ** 2
        return 2.0 * places * self.channels * self.filters * self.taps**2

    def convolve(self, x: Tensor, w: Tensor) -> Tensor:
        """The convolution of tensors with channels last."""
        planes, filters = x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2)
        return F.conv2d(planes, filters, None, self.stride, self.taps // 2).permute(0, 2, 3, 1)

    def arguments(self, kind: str, device: str) -> list[Tensor]:
        """Random images and filters; the three colors of a picture have no gradient."""
        x = torch.randn(BATCH, self.size, self.size, self.channels, device=device).to(TYPES[kind])
        w = torch.randn(self.filters, self.taps, self.taps, self.channels, device=device).to(TYPES[kind])
        return [x.requires_grad_(self.channels > 3), (w / (self.channels * self.taps**2) ** 0.5).requires_grad_()]


LAYERS = (
    Layer(3, 64, 7, 2, 224),
    Layer(64, 64, 1, 1, 56),
    Layer(64, 64, 3, 1, 56),
    Layer(64, 256, 1, 1, 56),
    Layer(256, 64, 1, 1, 56),
    Layer(256, 128, 1, 1, 56),
    Layer(128, 128, 3, 2, 56),
    Layer(256, 512, 1, 2, 56),
    Layer(128, 512, 1, 1, 28),
    Layer(512, 128, 1, 1, 28),
    Layer(128, 128, 3, 1, 28),
    Layer(512, 256, 1, 1, 28),
    Layer(256, 256, 3, 2, 28),
    Layer(512, 1024, 1, 2, 28),
    Layer(256, 1024, 1, 1, 14),
    Layer(1024, 256, 1, 1, 14),
    Layer(256, 256, 3, 1, 14),
    Layer(1024, 512, 1, 1, 14),
    Layer(512, 512, 3, 2, 14),
    Layer(1024, 2048, 1, 2, 14),
    Layer(512, 2048, 1, 1, 7),
    Layer(2048, 512, 1, 1, 7),
    Layer(512, 512, 3, 1, 7),
    Layer(256, 256, 3, 1, 56),
)


@dataclass(frozen=True)
class ConvolutionRow:
    """A layer: microseconds of kernels by the work of ``WORK``, of cuDNN and of ours, and errors of both."""

    name: str
    library: tuple[float, ...]
    ours: tuple[float, ...]
    tflops: float
    errors: tuple[float, float]


def compile_layer(layer: Layer, kind: str, device: str) -> Any:
    return retrograd.compile_backward(layer.convolve, layer.arguments(kind, device), kernels=KERNELS, verify=False)


def compile_beforehand(layer: Layer, kind: str) -> None:
    """In a process of its own, for the cache."""
    compile_layer(layer, kind, "cuda")


def run(call: Callable[..., Any], args: Sequence[Tensor], tangent: Tensor) -> list[Tensor]:
    """The output and the gradients."""
    output = call(*args)
    return [output.detach(), *torch.autograd.grad(output, [t for t in args if t.requires_grad], tangent)]


def measure(layer: Layer, kind: str, repeats: int) -> ConvolutionRow:
    args = layer.arguments(kind, "cuda")
    compiled = compile_layer(layer, kind, "cuda")
    tangent = torch.randn_like(layer.convolve(*args))
    exact = run(layer.convolve, [t.detach().double().requires_grad_(t.requires_grad) for t in args], tangent.double())
    times = kernel_times(lambda: run(compiled, args, tangent), repeats)
    ours = dict.fromkeys(WORK, 0.0)
    for name, time in times.items():
        work = next((w for w, start in zip(WORK, ("convolve", "spread"), strict=False) if name.startswith(start)), None)
        ours[work or ("results" if name.startswith("forward") else "filters")] += time
    library = [sum(kernel_times(call, repeats).values()) for call in library_calls(layer, args, tangent)]
    errors = [
        max(float((g.double() - e).norm() / e.norm()) for g, e in zip(run(call, args, tangent), exact, strict=True))
        for call in (layer.convolve, compiled)
    ]
    spent = [time for time in ours.values() if time]
    return ConvolutionRow(
        f"{layer} {kind}",
        tuple(library),
        tuple(ours.values()),
        1e-6 * layer.flops * len(spent) / sum(spent),
        (errors[0], errors[1]),
    )


def library_calls(layer: Layer, args: Sequence[Tensor], tangent: Tensor) -> list[Callable[[], Any]]:
    """cuDNN's convolution and its gradients, one by one."""
    x, w, grad = (tensor.detach().permute(0, 3, 1, 2) for tensor in (*args, tangent))
    pairs = [layer.stride] * 2, [layer.taps // 2] * 2, [1, 1]
    backward = partial(torch.ops.aten.convolution_backward.default, grad, x, w, None, *pairs, False, [0, 0], 1)
    calls = [lambda: F.conv2d(x, w, None, layer.stride, layer.taps // 2), lambda: backward([False, True, False])]
    return [calls[0], *[lambda: backward([True, False, False])] * args[0].requires_grad, calls[1]]


def row_cells(row: ConvolutionRow) -> list[str]:
    library = row.library if len(row.library) == len(WORK) else (row.library[0], 0.0, row.library[1])
    pairs = list(zip(library, row.ours, strict=True))
    times = [f"{a:.0f} / {b:.0f}" if b else "" for a, b in pairs]
    return [row.name, *times, f"{ratio(row):.2f}", f"{row.tflops:.0f}", *(f"{error:.1e}" for error in row.errors)]


def ratio(row: ConvolutionRow) -> float:
    """Ours to cuDNN's speed, of all three together."""
    return sum(row.library) / sum(row.ours)


def document(rows: Sequence[ConvolutionRow], facts: dict[str, str]) -> list[str]:
    """The page, by line."""
    depends = dict(facts)
    title = f"Convolutions in kernels of our own: {facts['device']}"
    lines = heading_of(title, [depends.pop("command")], EXPLANATION)
    figures = [f"{work}: cuDNN / ours, us" for work in WORK]
    figures += ["to cuDNN's speed", "TFLOP/s", "cuDNN's error", "error"]
    lines += markdown_table(["convolution", *figures], 1, map(row_cells, rows))
    for kind in TYPES:
        own = [row for row in rows if row.name.endswith(kind)]
        if own:
            mean = math.prod(map(ratio, own)) ** (1 / len(own))
            whole = sum(sum(row.library) for row in own) / sum(sum(row.ours) for row in own)
            lines += ["", f"In {kind}: {mean:.2f} in the geometric mean, {whole:.2f} of the speed of all together."]
    return [*lines, "", *measured_with(depends)]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time convolutions in kernels of our own on a CUDA device.")
    parser.add_argument("--repeats", type=positive, default=11, help="calls timed")
    parser.add_argument("--jobs", type=positive, default=1, help="processes that compile beforehand")
    parser.add_argument("--kinds", nargs="+", choices=[*TYPES], default=[*TYPES], help="types of elements")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--write", action="store_true", help="write the table to docs/gpu-convolutions.md")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    need_cuda_device()
    facts = {"command": command_line("convolutions.py", arguments), **cuda_environment("timed", options.repeats)}
    wanted = [(layer, kind) for kind in options.kinds for layer in LAYERS]
    if options.jobs > 1:
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            list(pool.map(compile_beforehand, *zip(*wanted, strict=True)))
    rows: list[ConvolutionRow] = []
    for layer, kind in wanted:
        rows.append(measure(layer, kind, options.repeats))
        print(*row_cells(rows[-1]), sep=" | ", flush=True)
    if options.json is not None:
        save_json(options.json, rows, facts)
    if options.write:
        write_page(DOCUMENT, document(rows, facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
