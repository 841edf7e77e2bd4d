# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sums of ``bwd-combine-scatters``: run on a CPU."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from iree_tools import RUN_MODULE

from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.pipelines.devices.targets import CPU
from retrograd.pipelines.infra.runner import run_pipeline
from retrograd.pipelines.toolchain.executable import compile_executable

SCATTER = """
func.func @f(%updates: tensor<{updates}>, %places: tensor<{count}x{depth}xi64>) -> tensor<{tensor}> {{
  %zeros = arith.constant dense<0.0> : tensor<{tensor}>
  %0 = "tm_tensor.scatter"(%updates, %places, %zeros) ({{
  ^bb0(%new: f32, %old: f32):
    %sum = arith.addf %old, %new : f32
    "tm_tensor.yield"(%sum) : (f32) -> ()
  }}) {{dimension_map = array<i64: {axes}>, operandSegmentSizes = array<i32: 2, 1>, unique_indices = false}}
    : (tensor<{updates}>, tensor<{count}x{depth}xi64>, tensor<{tensor}>) -> tensor<{tensor}>
  return %0 : tensor<{tensor}>
}}
"""


def combined(count: int, depth: int, tensor: tuple[int, ...]) -> str:
    """A scatter of ``count`` updates at places of ``depth`` indices, after the pass."""
    slices = (1,) * depth + tensor[depth:]
    text = SCATTER.format(
        count=count,
        depth=depth,
        axes=", ".join(map(str, range(depth))),
        tensor="x".join(map(str, tensor)) + "xf32",
        updates="x".join(map(str, (count, *slices))) + "xf32",
    )
    with make_context(allow_unregistered_dialects=True):
        module = ir.Module.parse(text)
        run_pipeline(module, "builtin.module(bwd-combine-scatters)")
        return str(module)


@pytest.mark.parametrize(
    ("count", "depth", "tensor"),
    [(24, 1, (10, 6)), (24, 2, (4, 3)), (1, 1, (3, 2)), (24, 1, (5,)), (24, 2, (4, 3, 2, 3))],
)
def test_the_sums_are_those_of_the_updates(tmp_path: Path, count: int, depth: int, tensor: tuple[int, ...]) -> None:
    generator = np.random.default_rng(0)
    updates = generator.standard_normal((count, *(1,) * depth, *tensor[depth:]), dtype=np.float32)
    places = np.stack([generator.integers(0, size, count) for size in tensor[:depth]], axis=1)
    text = combined(count, depth, tensor)
    assert ("unique_indices = true" in text) == (count > 1)
    (tmp_path / "f.vmfb").write_bytes(compile_executable(text, CPU).vmfb)
    np.save(tmp_path / "updates.npy", updates)
    np.save(tmp_path / "places.npy", places)
    inputs = [f"--input=@{tmp_path / name}.npy" for name in ("updates", "places")]
    command = [*RUN_MODULE, f"--module={tmp_path / 'f.vmfb'}", "--function=f", *inputs]
    subprocess.run([*command, f"--output=@{tmp_path / 'out.npy'}", "--device=local-sync"], check=True)
    expected = np.zeros(tensor)
    np.add.at(expected, tuple(places.T), updates.reshape(count, *tensor[depth:]).astype(np.float64))
    assert np.load(tmp_path / "out.npy") == pytest.approx(expected, rel=1e-5, abs=1e-6)
