# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Elementwise ops on CUDA: which loops are transposes', and how large the workgroups are that iree-compile makes."""

import re
import subprocess
from pathlib import Path

import pytest

from retrograd.pipelines.devices.elementwise_tiles import collapse, elementwise_rules, find_transposes
from retrograd.pipelines.devices.kernel_rules import write_library
from retrograd.pipelines.devices.targets import find_target
from retrograd.pipelines.toolchain.executable import iree_tool


def test_transposes_are_found() -> None:
    text = """
  %1 = linalg.transpose ins(%0 : tensor<4x6xf32>) outs(%e : tensor<6x4xf32>) permutation = [1, 0]
  %3 = linalg.transpose ins(%2 : tensor<2x3x4x5xbf16>) outs(%e : tensor<2x4x3x5xbf16>) permutation = [0, 2, 1, 3]
  %5 = linalg.transpose ins(%4 : tensor<?x6xf32>) outs(%e : tensor<6x?xf32>) permutation = [1, 0]
  %7 = linalg.transpose ins(%6 : tensor<8x5x2x64xf32>) outs(%e : tensor<8x2x5x64xf32>) permutation = [0, 2, 1, 3]
"""
    assert list(find_transposes(text)) == [((4, 6), (1, 0)), ((2, 3, 4, 5), (0, 2, 1, 3))]


@pytest.mark.parametrize(
    ("shape", "order", "loops"),
    [
        ((4, 6), (1, 0), [(6, 4)]),
        ((4, 1, 6), (2, 1, 0), [(6, 4)]),
        # The first two axes, and the last two, may be one.
        ((2, 3, 4, 5), (2, 3, 0, 1), [(4, 5, 2, 3), (4, 5, 6), (20, 2, 3), (20, 6)]),
        ((2, 3), (0, 1), [(2, 3)]),
    ],
)
def test_loops_of_a_transpose(shape: tuple[int, ...], order: tuple[int, ...], loops: list[tuple[int, ...]]) -> None:
    assert collapse(shape, order) == loops


MODULE = """
#rows = affine_map<(i, j) -> (i, j)>
#row = affine_map<(i, j) -> (i)>
#images = affine_map<(n, c, s) -> (n, c, s)>
#channel = affine_map<(n, c, s) -> (c)>
#flat = affine_map<(i) -> (i)>
func.func @centred(%x: tensor<64x768xf32>, %m: tensor<64xf32>) -> tensor<64x768xf32> {
  %e = tensor.empty() : tensor<64x768xf32>
  %r = linalg.generic {indexing_maps = [#rows, #row, #rows], iterator_types = ["parallel", "parallel"]}
      ins(%x, %m : tensor<64x768xf32>, tensor<64xf32>) outs(%e : tensor<64x768xf32>) {
  ^bb0(%a: f32, %b: f32, %c: f32):
    %d = arith.subf %a, %b : f32
    linalg.yield %d : f32
  } -> tensor<64x768xf32>
  return %r : tensor<64x768xf32>
}
func.func @scaled(%x: tensor<4x16x784xf32>, %m: tensor<16xf32>) -> tensor<4x16x784xf32> {
  %e = tensor.empty() : tensor<4x16x784xf32>
  %r = linalg.generic {indexing_maps = [#images, #channel, #images], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%x, %m : tensor<4x16x784xf32>, tensor<16xf32>) outs(%e : tensor<4x16x784xf32>) {
  ^bb0(%a: f32, %b: f32, %c: f32):
    %d = arith.mulf %a, %b : f32
    linalg.yield %d : f32
  } -> tensor<4x16x784xf32>
  return %r : tensor<4x16x784xf32>
}
func.func @two(%x: tensor<4096xf32>) -> (tensor<4096xf32>, tensor<4096xf32>) {
  %e = tensor.empty() : tensor<4096xf32>
  %r:2 = linalg.generic {indexing_maps = [#flat, #flat, #flat], iterator_types = ["parallel"]}
      ins(%x : tensor<4096xf32>) outs(%e, %e : tensor<4096xf32>, tensor<4096xf32>) {
  ^bb0(%a: f32, %b: f32, %c: f32):
    %d = arith.addf %a, %a : f32
    %f = arith.mulf %a, %a : f32
    linalg.yield %d, %f : f32, f32
  } -> (tensor<4096xf32>, tensor<4096xf32>)
  return %r#0, %r#1 : tensor<4096xf32>, tensor<4096xf32>
}
func.func @joined(%x: tensor<4x64x64xf32>, %y: tensor<4x64x64xf32>) -> tensor<4x64x128xf32> {
  %r = tensor.concat dim(2) %x, %y : (tensor<4x64x64xf32>, tensor<4x64x64xf32>) -> tensor<4x64x128xf32>
  return %r : tensor<4x64x128xf32>
}
func.func @odd(%x: tensor<1001xf32>) -> tensor<1001xf32> {
  %e = tensor.empty() : tensor<1001xf32>
  %r = linalg.generic {indexing_maps = [#flat, #flat], iterator_types = ["parallel"]}
      ins(%x : tensor<1001xf32>) outs(%e : tensor<1001xf32>) {
  ^bb0(%a: f32, %c: f32):
    %d = arith.addf %a, %a : f32
    linalg.yield %d : f32
  } -> tensor<1001xf32>
  return %r : tensor<1001xf32>
}
func.func @mean(%x: tensor<64x1024xf32>) -> tensor<64xf32> {
  %e = tensor.empty() : tensor<64xf32>
  %zero = arith.constant 0.0 : f32
  %size = arith.constant 1024.0 : f32
  %f = linalg.fill ins(%zero : f32) outs(%e : tensor<64xf32>) -> tensor<64xf32>
  %s = linalg.generic {indexing_maps = [#rows, #row], iterator_types = ["parallel", "reduction"]}
      ins(%x : tensor<64x1024xf32>) outs(%f : tensor<64xf32>) {
  ^bb0(%a: f32, %c: f32):
    %d = arith.addf %a, %c : f32
    linalg.yield %d : f32
  } -> tensor<64xf32>
  %r = linalg.generic {indexing_maps = [#flat, #flat], iterator_types = ["parallel"]}
      ins(%s : tensor<64xf32>) outs(%e : tensor<64xf32>) {
  ^bb0(%a: f32, %c: f32):
    %d = arith.divf %a, %size : f32
    linalg.yield %d : f32
  } -> tensor<64xf32>
  return %r : tensor<64xf32>
}
func.func @turned(%x: tensor<1024x512xf32>, %y: tensor<512x1024xf32>) -> tensor<512x1024xf32> {
  %e = tensor.empty() : tensor<512x1024xf32>
  %t = linalg.transpose ins(%x : tensor<1024x512xf32>) outs(%e : tensor<512x1024xf32>) permutation = [1, 0]
  %r = linalg.generic {indexing_maps = [#rows, #rows, #rows], iterator_types = ["parallel", "parallel"]}
      ins(%t, %y : tensor<512x1024xf32>, tensor<512x1024xf32>) outs(%e : tensor<512x1024xf32>) {
  ^bb0(%a: f32, %b: f32, %c: f32):
    %d = arith.mulf %a, %b : f32
    linalg.yield %d : f32
  } -> tensor<512x1024xf32>
  return %r : tensor<512x1024xf32>
}
"""  # noqa: E501


def threads(folder: Path, *options: str) -> dict[str, int]:
    """The threads of each function's workgroups."""
    source = folder / "in.mlir"
    source.write_text(MODULE, encoding="utf-8")
    flags = [*find_target("cuda:sm_90").flags, f"--iree-hal-dump-executable-files-to={folder}", *options]
    subprocess.run([str(iree_tool("iree-compile")), str(source), "-o", str(folder / "out.vmfb"), *flags], check=True)
    text = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.ptx"))
    found = re.findall(r"\.entry (\w+?)_dispatch_\w+\(.*?\.maxntid (\d+), (\d+)", text, re.DOTALL)
    return {name: int(across) * int(down) for name, across, down in found}


def test_workgroups_of_elementwise_kernels_alone_are_large(tmp_path: Path) -> None:
    library = write_library(elementwise_rules(MODULE))
    assert library is not None
    rules = tmp_path / "rules.mlir"
    rules.write_text(library, encoding="utf-8")
    usual = threads(tmp_path)
    found = threads(tmp_path, f"--iree-codegen-transform-dialect-library={rules}")
    assert found.keys() == usual.keys() == {"centred", "scaled", "two", "joined", "odd", "mean", "turned"}
    assert found["centred"] == 768 // 4
    assert found["scaled"] == 8 * 112 // 4
    assert found["two"] == 1024 // 4
    # Copies of slices are of memory, not of tensors.
    for kept in ("joined", "odd", "mean", "turned"):
        assert found[kept] == usual[kept]
