# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention in kernels of our own, from a saved file, beside PyTorch's kernels, on a CUDA device.

python benchmarks/attention.py
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from retrograd.frontend.layers.dropped_attention import on_grid
from retrograd.frontend.layers.random_ops import draw_seed, uniform

DOCUMENT = Path(__file__).parents[1] / "docs" / "gpu-attention.md"
EXPLANATION = """\
Attention and its gradients, causal, of queries batch x heads x rows x width and keys of as many heads, or of fewer.
Ours is from a file that was saved and loaded, in which no library computes anything. Kernel times of a forward and a
backward by `torch.profiler`, in the same process as PyTorch's own kernels (cuDNN's, flash or memory-efficient ones,
whichever it chooses; TF32 off); peaks are of the memory that a step takes from PyTorch's allocator; errors are the
largest of output and gradients, relative to the norm, from float64, of one of the batch. Of dropout PyTorch's mask is
not known, and neither is its error; ours draws numbers anew in each of three kernels, four at once by seven rounds of
Philox.
"""


@dataclass(frozen=True)
class Size:
    """Heads of queries and of keys, rows and columns, and how wide a head is."""

    batch: int
    heads: int
    shared: int
    rows: int
    width: int
    kind: str
    dropout: float = 0.0

    def __str__(self) -> str:
        keys = f", keys of {self.shared}" * (self.shared != self.heads)
        dropped = f", dropout of {self.dropout}" if self.dropout else ""
        return f"{self.batch} x {self.heads} x {self.rows} x {self.width}{keys} {self.kind}{dropped}"


SIZES = (
    Size(8, 12, 12, 1024, 64, "bf16"),
    Size(8, 12, 12, 1024, 64, "bf16", dropout=0.1),
    Size(8, 12, 12, 4096, 64, "bf16"),
    Size(8, 12, 12, 4096, 64, "bf16", dropout=0.1),
    Size(4, 32, 8, 2048, 128, "bf16"),
    Size(8, 12, 12, 1024, 64, "f32"),
    Size(4, 16, 16, 1024, 128, "f32"),
    Size(4, 16, 16, 1024, 128, "f32", dropout=0.1),
    Size(2, 8, 8, 2048, 256, "bf16"),
)
SEED = 3


@dataclass(frozen=True)
class AttentionRow:
    """A size: milliseconds of kernels, MiB at the fullest moment of a step, and errors, of PyTorch's and of ours."""

    name: str
    times: tuple[float, float]
    peaks: tuple[float, float]
    errors: tuple[float, float]
    kernels: tuple[str, ...]


def run(call: Callable[..., Any], args: Sequence[Tensor], tangent: Tensor) -> list[Tensor]:
    """The output and the gradients."""
    output = call(*args)
    return [output.detach(), *torch.autograd.grad(output, args, tangent)]


def attend_exactly(size: Size, args: Sequence[Tensor], tangent: Tensor) -> list[Tensor]:
    """The output and the gradients of the first of the batch in float64, with the mask that the seed stands for."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not size.dropout:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=size.heads != size.shared)
        torch.manual_seed(SEED)
        kept = uniform(draw_seed().cuda(), 0, (1, size.heads, size.rows, size.rows)) >= on_grid(size.dropout)
        scores = q @ k.transpose(-1, -2) / size.width**0.5
        ahead = torch.ones(size.rows, size.rows, device="cuda", dtype=torch.bool).triu(1)
        weights: Tensor = scores.masked_fill(ahead, -math.inf).softmax(-1) * kept / (1 - size.dropout)
        return weights @ v

    return run(attend, [t[:1].detach().double().requires_grad_() for t in args], tangent[:1].double())


def measure(size: Size, repeats: int, tiles: str) -> AttentionRow:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        how = {"is_causal": True, "dropout_p": size.dropout, "enable_gqa": size.heads != size.shared}
        return F.scaled_dot_product_attention(q, k, v, **how)  # type: ignore[arg-type]

    dtype = TYPES[size.kind]
    shapes = [(size.batch, heads, size.rows, size.width) for heads in (size.heads, size.shared, size.shared)]
    args = [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape in shapes]
    tangent = torch.randn(shapes[0], device="cuda").to(dtype)
    compiled = retrograd.compile_backward(attend, args, verify=False, tiles=tiles)
    with tempfile.TemporaryDirectory() as folder:
        compiled.save(Path(folder) / "attention.rgd")
        loaded = retrograd.load(Path(folder) / "attention.rgd")
        calls = (attend, loaded)
        times = [kernel_times(lambda call=call: run(call, args, tangent), repeats) for call in calls]  # type: ignore[misc]
        peaks = [find_peak(lambda call=call: run(call, args, tangent)) for call in calls]  # type: ignore[misc]
        torch.manual_seed(SEED)
        results = [run(call, args, tangent) for call in reversed(calls)][::-1]
    exact = attend_exactly(size, args, tangent)
    errors = [
        max(float((g[:1].double() - e).norm() / e.norm()) for g, e in zip(found, exact, strict=True))
        for found in results
    ]
    if size.dropout:
        errors[0] = math.nan
    eager, ours = (sum(found.values()) / 1e3 for found in times)
    names = tuple(name for name in times[1] if name.startswith("attention"))
    return AttentionRow(str(size), (eager, ours), (peaks[0], peaks[1]), (errors[0], errors[1]), names)


def find_peak(call: Callable[[], Any]) -> float:
    """MiB that a step takes besides what there is before it, at the fullest."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def document(rows: Sequence[AttentionRow], facts: dict[str, str]) -> list[str]:
    """The page, by line."""
    depends = dict(facts)
    lines = heading_of(f"Attention in kernels of our own: {facts['device']}", [depends.pop("command")], EXPLANATION)
    figures = ["PyTorch ms", "ours ms", "to PyTorch's speed", "PyTorch MiB", "ours MiB", "PyTorch's error", "error"]
    lines += markdown_table(["attention", *figures], 1, map(row_cells, rows))
    dropped = [row for row in rows if "dropout" in row.name]
    plain = [row for row in rows if row not in dropped]
    said = f"The geometric mean of the speeds is {mean_speed(plain):.2f}"
    said += f", with dropout {mean_speed(dropped):.2f}" if dropped else ""
    return [*lines, "", f"{said}.", "", *measured_with(depends)]


def mean_speed(rows: Sequence[AttentionRow]) -> float:
    """The geometric mean of our speed, PyTorch's being 1."""
    return math.prod(row.times[0] / row.times[1] for row in rows) ** (1 / max(len(rows), 1))


def row_cells(row: AttentionRow) -> list[str]:
    times = [f"{row.times[0]:.3f}", f"{row.times[1]:.3f}", f"{row.times[0] / row.times[1]:.2f}"]
    peaks = [f"{peak:.0f}" for peak in row.peaks]
    return [row.name, *times, *peaks, *("" if math.isnan(error) else f"{error:.1e}" for error in row.errors)]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time attention in kernels of our own on a CUDA device.")
    parser.add_argument("--repeats", type=positive, default=11, help="calls timed")
    parser.add_argument("--sizes", type=positive, default=len(SIZES), help="how many of the sizes, from the first on")
    parser.add_argument("--tiles", action="store_true", help="with tiles that are measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--write", action="store_true", help="write the table to docs/gpu-attention.md")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    need_cuda_device()
    facts = {"command": command_line("attention.py", arguments), **cuda_environment("timed", options.repeats)}
    rows: list[AttentionRow] = []
    for size in SIZES[: options.sizes]:
        rows.append(measure(size, options.repeats, "measure" if options.tiles else "auto"))
        print(*row_cells(rows[-1]), *rows[-1].kernels, sep=" | ", flush=True)
    if options.json is not None:
        save_json(options.json, rows, facts)
    if options.write:
        write_page(DOCUMENT, document(rows, facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
