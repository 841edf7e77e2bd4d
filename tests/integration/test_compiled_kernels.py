# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels of our own, compiled by Triton and taken by IREE into a file, without a device."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from ptx_modules import read_ptx

from retrograd.api import compile_backward
from retrograd.contract.convolution import Convolution
from retrograd.contract.environment import CACHE_FOLDER
from retrograd.pipelines.kernels import ptx
from retrograd.pipelines.kernels.convolution_tiles import CONVOLVE, CORRELATE, SPREAD, choose_tile
from retrograd.pipelines.kernels.convolutions import Geometry, write_kernel, write_sum_kernel
from retrograd.pipelines.kernels.dispatch import NO_PTX
from retrograd.pipelines.kernels.kernel import Kernel
from retrograd.pipelines.kernels.ptx import compile_kernels, find_triton
from retrograd.pipelines.kernels.scatters import (
    RANK,
    SUM_BEFORE,
    write_parts,
    write_place,
    write_segments,
    write_tally,
)
from retrograd.pipelines.kernels.tiles import Shape, Tiling, choose_tiling, list_tilings
from retrograd.runtime.artifact import read_artifact

needs_triton = pytest.mark.skipif(find_triton() is None, reason="Triton is not installed")
# Shared memory of a workgroup, in bytes.
SHARED = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10, "sm_120": 99 << 10}


@pytest.mark.short_cases("sm_80")
@needs_triton
@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90", "sm_120"])
def test_kernels_compile_for(architecture: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton's assembler accepts the PTX, and a workgroup has the shared memory that it takes."""
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path))
    kernels = [*product_kernels(architecture), *convolution_kernels(architecture), *scatter_kernels()]
    kernels.append(write_sum_kernel("bf16", 9 * 64 * 64, is_aligned=True))
    found = compile_kernels(kernels, architecture)
    for kernel in kernels:
        compiled = found[kernel]
        assert f".target {architecture}" in compiled.ptx and f".entry {kernel.label}(" in compiled.ptx
        # Warps that only fetch are beside the others, four at a time.
        fetching = 4 * (kernel.source == "specialized_products")
        assert compiled.shared <= SHARED[architecture] and compiled.threads == 32 * (kernel.warps + fetching)
    units = "wgmma.mma_async" if architecture == "sm_90" else "mma.sync"
    assert all(units in found[kernel].ptx for kernel in kernels if "BK" in dict(kernel.constants))


def scatter_kernels() -> list[Kernel]:
    """All of that family, of rows of 12 numbers."""
    sorting = [write(is_first) for write in (write_tally, write_place) for is_first in (True, False)]
    return [RANK, SUM_BEFORE, *sorting, write_parts(12), *(write_segments(12, parts) for parts in (True, False))]


def convolution_kernels(architecture: str) -> list[Kernel]:
    """A convolution and its gradients, of f32 and of bf16; of three colors."""
    kernels = []
    for element in ("f32", "bf16"):
        deep, filters = (element, (64, 128, 28, 28)), (element, (128, 128, 3, 3))
        colors, taps, wide = (element, (64, 3, 224, 224)), (element, (64, 3, 7, 7)), (element, (64, 64, 112, 112))
        same = Convolution(deep, filters, deep, (1, 1), (1, 1), (1, 1), groups=1)
        stem = Convolution(colors, taps, wide, (2, 2), (3, 3), (1, 1), groups=1)
        for kind, known in ((CONVOLVE, same), (SPREAD, same), (CORRELATE, same), (CONVOLVE, stem)):
            geometry = Geometry(known)
            kernels.append(write_kernel(kind, geometry, choose_tile(geometry.work(kind), architecture), "xwy"))
    return kernels


def product_kernels(architecture: str) -> list[Kernel]:
    """One of f32, on three parts, and of bf16 one for each way to fetch tiles, of specialized ones all, with rows of
    odd length too; and one each that rounds."""
    shape = Shape(1, 4096, 4096, 4096, "bf16")
    kinds = {
        tiling.way if not tiling.specialized else str(tiling): tiling
        for tiling in list_tilings(shape, architecture, 99)
    }
    tilings = [choose_tiling(replace(shape, element="f32"), architecture), *kinds.values()]
    plain = [write_product(number, replace(tiling, parts=1)) for number, tiling in enumerate(tilings)]
    others = [replace(tiling, parts=1) for tiling in tilings if tiling.copied]
    odd = [write_product(len(plain) + n, tiling, odd=True) for n, tiling in enumerate(others) if tiling.specialized]
    ways = {tiling.way: tiling for tiling in others}.values()
    rounding = [write_product(len(plain) + len(others) + n, tiling, rounded=True) for n, tiling in enumerate(ways)]
    return [*plain, *odd, *rounding]


def write_product(number: int, tiling: Tiling, *, odd: bool = False, rounded: bool = False) -> Kernel:
    """A product of three parts, if it is the first, or of bf16, with a second matrix that is transposed."""
    constants: dict[str, int | None] = {"TA": 0, "TB": 1, "BIAS": 0, "bias": None, **tiling.constants}
    constants |= {"ROUND": int(rounded)} if tiling.copied else {"PARTS": 1 if number else 3, "WHOLE": 0}
    constants |= {"EVEN": int(not odd)} if tiling.specialized else {}
    return Kernel(
        f"product_{number}",
        "specialized_products" if tiling.specialized else "products",
        f"product_{tiling.way}" if tiling.way else "product",
        (("a", "bf16"), ("b", "bf16"), ("c", "bf16" if tiling.specialized and not rounded else "f32")),
        ("M", "N", "high_a", "pitch_a", "high_b", "pitch_b", "steps", "parts" if tiling.copied else "count"),
        ("a", "b", "c", *["N"] * (not odd), "pitch_a", "pitch_b"),
        tuple(constants.items()),
        tiling.warps,
        tiling.stages,
    )


@needs_triton
def test_a_kernel_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path))
    first = compile_kernels([RANK], "sm_90")
    (path,) = (tmp_path / "kernels").iterdir()
    monkeypatch.setattr(ptx, "_run_program", lambda kernels, architecture: [NO_PTX] * len(kernels))
    assert compile_kernels([RANK], "sm_90") == first
    # What was altered is compiled anew.
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "ptx": fields["ptx"] + " "}))
    assert compile_kernels([RANK], "sm_90") == {RANK: NO_PTX}


@pytest.mark.long
@needs_triton
def test_iree_takes_the_kernels_with_the_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The PTX is in the executable: nothing of Triton's is needed to run it."""
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path))
    x, w = (torch.randn(256, 512, requires_grad=True) for _ in range(2))
    compiled = compile_backward(
        torch.nn.functional.linear, (x, w), target="cuda:sm_90", kernels="products", cache=False
    )
    report = compiled.explain().to_dict()
    assert any("product_nt_f32" in line for line in report["kernels"]) and not report["notes"]
    assert "product_nt_f32" in str(compiled.explain())
    path = tmp_path / "linear.rgd"
    compiled.save(path)
    kernels = [name for module in read_ptx(read_artifact(path).vmfb) for name in module.kernels]
    assert {"split_f32"} < set(kernels) and any(name.startswith("product_nt_f32") for name in kernels)


@pytest.mark.short_cases("cuda:sm_90")
@needs_triton
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90"])
def test_kernels_of_rows_are_written_and_compile(target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path))
    logits, places = torch.randn(300, 1001, requires_grad=True), torch.randint(0, 1001, (300,))
    entropy = torch.nn.functional.cross_entropy
    compiled = compile_backward(entropy, (logits, places), target=target, kernels="rows", cache=False)
    report = compiled.explain().to_dict()
    assert {"rows_maximum", "rows_sum", "rows_map"} <= {
        "_".join(line.split(": ")[1].split("_")[:2]) for line in report["kernels"]
    }
    assert not report["notes"]
    path = tmp_path / "entropy.rgd"
    compiled.save(path)
    assert any(name.startswith("rows_map") for module in read_ptx(read_artifact(path).vmfb) for name in module.kernels)


def attend(x: torch.Tensor, mask: torch.Tensor, dropout: float) -> torch.Tensor:
    """Attention of the parts of a projection, with a mask."""
    q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in x.chunk(3, -1))
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    return attended.transpose(1, 2).flatten(2)


@needs_triton
@pytest.mark.parametrize(
    ("dropout", "learned"), [(0.0, False), pytest.param(0.1, False, marks=pytest.mark.long), (0.1, True)]
)
def test_a_file_has_attention_in_kernels_and_no_scores(
    dropout: float, learned: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is saved and scratch are smaller than a matrix of scores, 2 x 300 x 300, but for their gradient."""
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path))
    x, mask = torch.randn(1, 300, 96, requires_grad=True), torch.randn(300, 300, requires_grad=learned)
    compiled = compile_backward(
        partial(attend, dropout=dropout), (x, mask), target="cuda:sm_90", kernels="attention", cache=False
    )
    report = compiled.explain().to_dict()
    assert [line.split(": ")[1].split("_16_")[0] for line in report["kernels"]] == [
        "attention_f32",
        "attention_delta_f32",
    ]
    scratch = [report[name] for name in ("forward_transient_bytes", "backward_transient_bytes", "saved_bytes")]
    assert max(scratch) < 4 * 2 * 300 * 300 * (1 + learned), scratch
    backward = ("bwd.dropped_attention_backward" if dropout else "bwd.attention_backward") + "_with_mask" * learned
    assert f'"{backward}"' in compiled.mlir("linalg")
    path = tmp_path / "attention.rgd"
    compiled.save(path)
    kernels = [name for module in read_ptx(read_artifact(path).vmfb) for name in module.kernels]
    assert len([name for name in kernels if name.startswith("attention_")]) == 4


def convolve(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A small convolution, and one that a library computes in this process."""
    return torch.nn.functional.conv2d(torch.nn.functional.conv2d(x, w, stride=2).relu(), v, padding=1)


@needs_triton
def test_a_file_has_convolutions_in_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With channels last throughout, as the library has them: images and filters are turned around, nothing else."""
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path))
    x, w, v = (torch.randn(shape, requires_grad=True) for shape in ((4, 3, 34, 34), (32, 3, 4, 4), (64, 32, 3, 3)))
    compiled = compile_backward(convolve, (x, w, v), target="cuda:sm_90", cache=False)
    path = tmp_path / "convolutions.rgd"
    compiled.save(path)
    kernels = {name for module in read_ptx(read_artifact(path).vmfb) for name in module.kernels}
    functions = {name.split("_f32_")[0] for name in kernels}
    assert {"convolve", "spread", "correlate"} <= functions
    assert not [name for name in kernels if "conv" in name and not name.startswith("convolve_f32")], kernels


def rotated(x: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
    """Both halves of rows, computed of both halves, as a query is rotated by its place."""
    left, right = (x * turned).chunk(2, -1)
    return torch.cat([left * turned - right, right * turned + left], -1).to(torch.bfloat16)


def test_halves_of_rows_are_joined_without_copies(tmp_path: Path) -> None:
    x, turned = torch.randn(2, 3, 8, 16, requires_grad=True), torch.randn(8, 1)
    path = tmp_path / "rotated.rgd"
    compile_backward(rotated, (x, turned), target="cuda", kernels="off", cache=False).save(path)
    kernels = [name for module in read_ptx(read_artifact(path).vmfb) for name in module.kernels]
    assert kernels
    assert not [name for name in kernels if "memcpy" in name]
