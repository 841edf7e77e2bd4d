# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Code for CUDA, compiled where there need be no GPU, and its PTX."""

import warnings
from pathlib import Path

import pytest
import torch
from ptx_modules import read_ptx
from torch import Tensor, nn

import retrograd
from retrograd.pipelines.devices.targets import find_target
from retrograd.pipelines.infra.errors import CompileError
from retrograd.pipelines.toolchain.executable import compile_executable
from retrograd.pipelines.toolchain.vmfb import read_formats
from retrograd.runtime.artifact import read_artifact

EXPONENTIAL = """
func.func @f(%x: tensor<4xf32>) -> tensor<4xf32> {
  %r = math.exp %x : tensor<4xf32>
  return %r : tensor<4xf32>
}
"""
FUSED_SCATTER = """
#map = affine_map<(d0, d1) -> (d0, d1)>
func.func @f(%x: tensor<24x8xbf16>, %rows: tensor<24x1xi64>, %table: tensor<10x8xf32>) -> tensor<10x8xf32> {
  %empty = tensor.empty() : tensor<24x8xf32>
  %wide = linalg.generic {indexing_maps = [#map, #map], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<24x8xbf16>) outs(%empty : tensor<24x8xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %y = arith.extf %in : bf16 to f32
    linalg.yield %y : f32
  } -> tensor<24x8xf32>
  %r = iree_linalg_ext.scatter dimension_map = [0] unique_indices(false)
      ins(%wide, %rows : tensor<24x8xf32>, tensor<24x1xi64>) outs(%table : tensor<10x8xf32>) {
  ^bb0(%new: f32, %old: f32):
    %sum = arith.addf %old, %new : f32
    iree_linalg_ext.yield %sum : f32
  } -> tensor<10x8xf32> loc("model.py":7:3)
  return %r : tensor<10x8xf32>
}
"""

PRODUCT = """
func.func @f(%x: tensor<64x96xf32>, %y: tensor<64x96xf32>) -> tensor<64x64xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<64x64xf32>
  %start = linalg.fill ins(%zero : f32) outs(%empty : tensor<64x64xf32>) -> tensor<64x64xf32>
  %turned = tensor.empty() : tensor<96x64xf32>
  %z = linalg.transpose ins(%y : tensor<64x96xf32>) outs(%turned : tensor<96x64xf32>) permutation = [1, 0]
  %r = linalg.matmul ins(%x, %z : tensor<64x96xf32>, tensor<96x64xf32>) outs(%start : tensor<64x64xf32>) -> tensor<64x64xf32>
  return %r : tensor<64x64xf32>
}
"""  # noqa: E501

# A gather that widens (from 32 bits in to 64 out), and of what it gives another.
GATHERS = """
#id = affine_map<(d0) -> (d0)>
func.func @f(%places: tensor<48xi32>, %table: tensor<90xi64>) -> tensor<48xi64> {
  %empty = tensor.empty() : tensor<48xi64>
  %first = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%places : tensor<48xi32>) outs(%empty : tensor<48xi64>) {
  ^bb0(%in: i32, %out: i64):
    %at = arith.index_cast %in : i32 to index
    %value = tensor.extract %table[%at] : tensor<90xi64>
    linalg.yield %value : i64
  } -> tensor<48xi64>
  BARRIER
  %second = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%places : tensor<48xi32>) outs(%empty : tensor<48xi64>) {
  ^bb0(%in: i32, %out: i64):
    %at = arith.index_cast %in : i32 to index
    %value = tensor.extract %first[%at] : tensor<48xi64>
    linalg.yield %value : i64
  } -> tensor<48xi64>
  return %second : tensor<48xi64>
}
"""


class Words(nn.Module):
    """Embedding, layer norm, dropout and a scatter in bf16, and sums in f64."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(8, dtype=torch.bfloat16)
        self.dropout = nn.Dropout(0.25)

    def forward(self, words: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.dropout(self.norm(self.table(words)))
        return rows.new_zeros(10, 8).index_add(0, words, rows), x.var(0) + x.softmax(-1).sum()


def make_arguments() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randint(0, 10, (12,)), torch.randn(6, 4, dtype=torch.float64, requires_grad=True)


def test_bf16_random_numbers_and_f64_compile_to_ptx(tmp_path: Path) -> None:
    step = retrograd.compile_backward(Words(), make_arguments(), target="cuda:sm_90", kernels="off", portable=True)
    step.save(tmp_path / "words.vmfb")
    artifact = read_artifact(tmp_path / "words.vmfb")
    assert artifact.manifest.targets == ("cuda:sm_90",)
    # No flags but the first set's: none of these falls back to slower code.
    assert artifact.manifest.report["flags"] == list(find_target("cuda:sm_90").ladder[0])
    assert set(read_formats(artifact.vmfb)) == {"cuda-nvptx-fb"}
    (ptx,) = read_ptx(artifact.vmfb)
    assert ptx.target == "sm_90"
    kernels = " ".join(ptx.kernels)
    assert "forward_dispatch" in kernels and "backward_dispatch" in kernels and "scatter" in kernels
    # `f` and `f_into` share their kernels.
    assert not any("_into_dispatch" in name for name in ptx.kernels)
    assert ptx.local_bytes == 0
    if not torch.cuda.is_available():
        with pytest.raises(retrograd.DeviceError, match="cuda"):
            retrograd.load(tmp_path / "words.vmfb", Words())


def test_kernels_take_no_more_buffers_than_drivers_load() -> None:
    """iree-compile makes one kernel of more results than these load, until it is told to make one for each."""
    x = torch.randn(64, 64, requires_grad=True)
    step = retrograd.compile_backward(many_results, (x,), target="cuda:sm_80")
    assert "--iree-dispatch-creation-fuse-multi-use=false" in step.explain().to_dict()["flags"]


def many_results(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple((x * float(i)).exp() for i in range(17))


@pytest.mark.parametrize("architecture", ["sm_75", "sm_120"])
def test_other_cards_have_ptx_of_their_own(architecture: str) -> None:
    (ptx,) = read_ptx(compile_executable(EXPONENTIAL, find_target(f"cuda:{architecture}")).vmfb)
    assert (ptx.target, len(ptx.kernels)) == (architecture, 1)


def test_kernels_stand_beside_results_that_are_put_together() -> None:
    """Which are written by adding a number that is in no tensor."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(8, 24), nn.Linear(40, 3)

        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            joined = torch.cat([self.layer(a), b.sin()], 1)
            return joined, self.head(joined.exp())

    args = torch.randn(4, 8, requires_grad=True), torch.randn(4, 16, requires_grad=True)
    # Where kernels of our own are in the way, a warning says that there are none.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        retrograd.compile_backward(Joined(), args, target="cuda:sm_90", verify=False, cache=False)


def test_what_does_not_compile_is_named_with_its_line() -> None:
    """As a gradient of an embedding would be without ``bwd-isolate-scatters``: once this compiles, the pass can go."""
    with pytest.raises(CompileError, match=r"model\.py:7:3.* error: ") as error:
        compile_executable(FUSED_SCATTER, find_target("cuda:sm_80"))
    assert error.value.replay.startswith("python -m retrograd.tools.iree_compile ")


def test_gathers_are_kernels_apart_behind_a_barrier() -> None:
    """As ``bwd-isolate-gathers`` writes them; once they are without, the pass can go."""
    barrier = "%hidden = util.optimization_barrier %first : tensor<48xi64>"
    apart = GATHERS.replace("extract %first", "extract %hidden").replace("BARRIER", barrier)
    kernels = [
        read_ptx(compile_executable(text, find_target("cuda:sm_90")).vmfb)[0].kernels
        for text in (GATHERS.replace("BARRIER", ""), apart)
    ]
    assert [len(k) for k in kernels] == [1, 2]


@pytest.mark.parametrize(("m", "k"), [(64, 96), (61, 97)])
def test_products_of_float32_share_their_operands(m: int, k: int) -> None:
    """A workgroup's threads read them from shared memory, in our tiles; iree-compile's own read from global memory."""
    attempts: list[tuple[str, ...]] = []
    target = find_target("cuda:sm_90")
    product = PRODUCT.replace("64", str(m)).replace("96", str(k))
    (ptx,) = read_ptx(compile_executable(product, target, on_attempt=attempts.append).vmfb)
    assert attempts == [target.ladder[0]]
    assert ptx.shared_loads > 0 and ptx.local_bytes == 0
    assert [name.endswith(f"{m}x{m}x{k}_f32") for name in ptx.kernels] == [True]


def test_products_in_files_for_several_devices_have_the_tiles_of_each() -> None:
    executable = compile_executable(PRODUCT, find_target(("cpu", "cuda:sm_90")))
    (ptx,) = read_ptx(executable.vmfb)
    assert ptx.shared_loads == 0
    assert set(read_formats(executable.vmfb)) == {"embedded-elf", "cuda-nvptx-fb"}
