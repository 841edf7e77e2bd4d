# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels of our own, without a device: how products are divided, what Triton makes of them, who asks for them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from retrograd.contract.environment import CACHE_FOLDER
from retrograd.contract.trials import CompiledKernel
from retrograd.pipelines.conversions.convert_linalg_to_kernels import FAMILIES, ORDER
from retrograd.pipelines.devices.targets import find_target
from retrograd.pipelines.kernels import ptx
from retrograd.pipelines.kernels.choice import check_kernels, with_kernels
from retrograd.pipelines.kernels.dispatch import NO_PTX, write_executable
from retrograd.pipelines.kernels.kernel import KernelError
from retrograd.pipelines.kernels.ptx import adapt_ptx, compile_kernels, drop_vector_flags
from retrograd.pipelines.kernels.scatters import RANK, write_segments
from retrograd.pipelines.kernels.tiles import (
    ARCHITECTURES,
    Shape,
    Tiling,
    choose_tiling,
    estimate_seconds,
    list_tilings,
    pad,
)
from retrograd.pipelines.toolchain.executable import read_choices
from retrograd.pipelines.toolchain.lowering_steps import lowering_pipeline
from retrograd.tools.ptx import _mend_stages


@pytest.mark.parametrize(("size", "padded"), [(1, 64), (64, 64), (65, 128), (128, 128), (50257, 50304)])
def test_sizes_are_filled_up_to_tiles(size: int, padded: int) -> None:
    assert pad(size) == padded


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("element", ["f32", "bf16", "f16"])
def test_every_product_has_a_tiling_whose_parts_cover_it(architecture: str, element: str) -> None:
    for batch, m, n, k in [(1, 16, 16, 65536), (96, 512, 64, 512), (1, 4096, 50257, 768), (7, 33, 129, 4100)]:
        shape = Shape(batch, m, n, k, element)
        tiling = choose_tiling(shape, architecture)
        assert tiling.parts * tiling.steps(shape) * tiling.k >= k
        assert (tiling.parts - 1) * tiling.steps(shape) * tiling.k < pad(k)
        assert tiling.copied or (pad(m) % tiling.m, pad(n) % tiling.n) == (0, 0)
        assert not (tiling.copied and batch > 1)


def test_weight_gradients_are_split() -> None:
    """144 tiles are one round and a tenth for 132 multiprocessors, 6 are nothing at all."""
    assert choose_tiling(Shape(1, 768, 768, 4096, "f32"), "sm_90").parts > 1
    assert choose_tiling(Shape(1, 4096, 4096, 4096, "f32"), "sm_90").parts == 1


def test_tiles_of_two_accumulators_fill_the_multiprocessors() -> None:
    """Weights' gradients of 768 x 3072 are 120 tiles of 160 columns, and 72 of 256, for 132 multiprocessors."""
    tiling = choose_tiling(Shape(1, 768, 3072, 4096, "bf16"), "sm_90")
    assert tiling.specialized and (tiling.m, tiling.n, tiling.parts) == (128, 160, 1)
    assert tiling.constants == {"BM": 128, "N0": 128, "N1": 32, "BK": 64, "STAGES": 5}
    assert choose_tiling(Shape(1, 4096, 768, 3072, "f16"), "sm_90").n == 192
    # Batches have none, and neither have other architectures.
    assert not choose_tiling(Shape(8, 4096, 768, 3072, "bf16"), "sm_90").specialized
    assert not any(t.specialized for t in list_tilings(Shape(1, 768, 3072, 4096, "bf16"), "sm_120", 99))


@pytest.mark.parametrize("columns", [128, 160, 192, 256])
def test_both_accumulators_have_powers_of_two(columns: int) -> None:
    kinds = list_tilings(Shape(1, 4096, 4096, 4096, "bf16"), "sm_90", 99)
    constants = next(t for t in kinds if t.specialized and t.n == columns).constants
    first, second = constants["N0"], constants["N1"]
    assert first + second == columns and first & (first - 1) == second & (second - 1) == 0 and second >= 16


def test_an_estimate_counts_whole_rounds() -> None:
    tiling = Tiling("sm_90", 128, 128, 64, 8, 3, rate=100)
    full = Shape(1, 128 * 12, 128 * 11, 1024, "bf16")
    assert estimate_seconds(replace(full, n=full.n + 1), tiling) == pytest.approx(2 * estimate_seconds(full, tiling))
    # At the rate of the tiling, where there are as many tiles as multiprocessors.
    assert estimate_seconds(full, tiling) == pytest.approx(2 * full.m * full.n * full.k / 100e12)


PTX = """.visible .entry rank(
	.param .u64 .ptr .global .align 1 rank_param_0,
	.param .u64 .ptr .global .align 1 rank_param_1,
	.param .u32 rank_param_2,
	.param .u64 .ptr .global .align 1 rank_param_3,
	.param .u64 .ptr .global .align 1 rank_param_4
)
{
	ld.param.b64 %rd1, [rank_param_0];
	ld.param.b32 %r1, [rank_param_2];
}
"""


def test_scratch_memory_goes_behind_the_buffers() -> None:
    plain, scratched = adapt_ptx(PTX, RANK, 0), adapt_ptx(PTX, RANK, 128)
    assert ".visible .entry rank_places(" in plain and "[rank_places_param_2]" in plain
    order = [line.split("_")[-1].rstrip(",") for line in scratched.splitlines() if ".param .u" in line]
    assert order == ["0", "1", "3", "2"]
    assert "param_3" not in plain and "param_4" not in scratched


@pytest.mark.parametrize(
    ("text", "scratch", "what"),
    [
        ("", 0, "has no kernel"),
        (PTX.replace("\t.param .u32 rank_param_2,\n", ""), 0, "takes 4 arguments"),
        (PTX.replace("[rank_param_0]", "[rank_param_3]"), 0, "does not pass"),
        (PTX.replace("[rank_param_0]", "[rank_param_4]"), 128, "does not pass"),
    ],
)
def test_ptx_of_another_form_is_refused(text: str, scratch: int, what: str) -> None:
    with pytest.raises(KernelError, match=what):
        adapt_ptx(text, RANK, scratch)


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("  %2 = shl nuw nsw <2 x i32> %1, <i32 31, i32 1>", "  %2 = shl <2 x i32> %1, <i32 31, i32 1>"),
        ("  %2 = or disjoint <16 x i32> %0, %1, !dbg !3", "  %2 = or <16 x i32> %0, %1, !dbg !3"),
        ("  %2 = zext nneg <2 x i32> %1 to <2 x i64>", "  %2 = zext <2 x i32> %1 to <2 x i64>"),
        ("  %2 = shl nuw nsw i32 %1, 5", None),
        ("  %2 = fadd fast <2 x float> %0, %1", None),
        ('  call void asm "= shl nuw <x"()', None),
    ],
)
def test_what_llvm_promises_of_vectors_is_dropped(given: str, left: str | None) -> None:
    """Of one number a promise is about what is read."""
    assert drop_vector_flags(given) == (given if left is None else left)


def test_triton_makes_ptx_of_what_is_left() -> None:
    stages: dict[str, Any] = {"llir": None, "ptx": lambda llvm, _metadata: f"ptx of {llvm}"}
    assert _mend_stages() == _mend_stages(None, stages, None, None, 90)
    assert stages["ptx"]("%1 = add nsw <2 x i32> %0, %0", {}) == "ptx of %1 = add <2 x i32> %0, %0"


def test_an_executable_has_its_ptx_as_data() -> None:
    compiled = CompiledKernel(PTX, threads=256, shared=1024, scratch=0)
    text = write_executable(RANK, compiled, "sm_90", updates=False)
    assert PTX.encode().hex() in text and f"vector<{len(PTX.encode())}xi8>" in text
    assert "workgroup_local_memory = 1024 : index" in text and "workgroup_size = [256 : index" in text
    # An operand that is updated is the result.
    updating = write_executable(write_segments(300, False), NO_PTX, "sm_90", updates=True)
    assert updating.count("#hal.pipeline.binding<") == 4 and updating.count("ReadOnly") == 3


def test_kernels_are_had_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrograd.pipelines.kernels.choice.find_triton", lambda: "3.6.0")
    cuda, cpu, old = find_target("cuda:sm_90"), find_target("cpu"), find_target("cuda:sm_75")
    families = ("attention", "columns", "convolutions", "norms", "products", "rows", "scatters", "transposes")
    assert with_kernels(cuda, "auto").kernels == families
    assert with_kernels(cuda, "off").kernels == ()
    assert with_kernels(cuda, ["scatters"]).kernels == ("scatters",)
    assert with_kernels(cpu, "auto") == cpu and with_kernels(old, "auto") == old
    with pytest.raises(ValueError, match="for one CUDA device"):
        with_kernels(find_target("cpu,cuda:sm_90"), "products")
    with pytest.raises(ValueError, match="sm_75"):
        with_kernels(old, ["products"])
    with pytest.raises(ValueError, match="did you mean 'products'"):
        check_kernels(["product"])
    with pytest.raises(TypeError, match=r"kernels is one of 'auto', 'off', 'attention', .* or a list of .*, got 3"):
        check_kernels(3)  # type: ignore[arg-type]
    monkeypatch.setattr("retrograd.pipelines.kernels.choice.find_triton", lambda: None)
    assert with_kernels(cuda, "auto") == cuda
    with pytest.raises(ValueError, match=r"pip install retrograd\[cuda\]"):
        with_kernels(cuda, "products")


def test_the_lowering_has_the_pass_for_what_is_asked_for() -> None:
    cuda = find_target("cuda:sm_90")
    assert "convert-linalg-to-kernels" not in lowering_pipeline(cuda)
    text = lowering_pipeline(replace(cuda, kernels=("products", "scatters")))
    # Scatters before updates are combined, products when they are narrow and before they are padded.
    order = [
        "families=scatters}",
        "bwd-combine-scatters",
        "bwd-narrow-products",
        "families=products}",
        "bwd-pad-products",
    ]
    assert sorted(order, key=text.index) == order
    # The pass takes several families as the pipeline does.
    text = lowering_pipeline(replace(cuda, kernels=tuple(FAMILIES)))
    assert sorted(FAMILIES, key=ORDER.index) == sorted(FAMILIES, key=lambda name: text.index(f"families={name}}}"))


def test_choices_are_read_from_a_module() -> None:
    assert read_choices('module attributes {bwd.kernels = ["a: b", "c", "a: b"], other = ["d"]} {}') == ("a: b", "c")
    assert read_choices("module {}") == ()


def test_without_triton_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path))
    monkeypatch.setattr(ptx, "find_triton", lambda: None)
    with pytest.raises(KernelError, match=r"pip install retrograd\[cuda\]"):
        compile_kernels([RANK], "sm_90")
