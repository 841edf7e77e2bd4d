# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Faults of stock iree-compile that this project mends. A test that fails here says that one is gone: the mend that it
names can go too."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from faulty_programs import HALF_NUMBER, NUMBERED, ONE_WINDOW, OUTER, SUM_OF_ROWS, TURNED, WEIGHTED_SUM
from iree_tools import RUN_MODULE
from numpy.typing import NDArray

from retrograd.pipelines.devices.targets import CPU, find_target
from retrograd.pipelines.toolchain.executable import iree_tool

Array = NDArray[np.float32]

MAP = """
#id = affine_map<(i) -> (i)>
func.func @main(%x: tensor<SIZExf32>) -> tensor<SIZExf32> {
  %e = tensor.empty() : tensor<SIZExf32>
  %r = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%x : tensor<SIZExf32>) outs(%e : tensor<SIZExf32>) {
  ^bb0(%a: f32, %c: f32):
    %d = OP %a : f32
    linalg.yield %d : f32
  } -> tensor<SIZExf32>
  return %r : tensor<SIZExf32>
}
"""


def compile_stock(folder: Path, text: str, *flags: str) -> Path:
    """What iree-compile makes of a module with these flags and no others of ours."""
    (folder / "main.mlir").write_text(text, encoding="utf-8")
    command = [str(iree_tool("iree-compile")), str(folder / "main.mlir"), "-o", str(folder / "main.vmfb"), *flags]
    subprocess.run(command, check=True)
    return folder / "main.vmfb"


def run_stock(folder: Path, text: str, argument: Array) -> Array:
    """What its ``@main`` gives on this machine's CPU."""
    module = compile_stock(folder, text, *CPU.flags)
    np.save(folder / "in.npy", argument)
    command = [*RUN_MODULE, f"--module={module}", "--function=main", f"--input=@{folder / 'in.npy'}"]
    subprocess.run([*command, f"--output=@{folder / 'out.npy'}", "--device=local-sync"], check=True)
    found: Array = np.load(folder / "out.npy")
    return found


def test_a_sum_beside_itself_along_another_axis(tmp_path: Path) -> None:
    """One kernel computes both, its diagonal alone is right: ``bwd-isolate-reductions``, ``bwd-isolate-arguments``."""
    a = np.arange(16, dtype=np.float32).reshape(4, 4)
    sums = a.sum(1)
    found = run_stock(tmp_path, OUTER, a)
    assert found.diagonal() == pytest.approx(np.outer(sums, sums).diagonal())
    assert found != pytest.approx(np.outer(sums, sums))


def test_tanh_is_off_by_four_units_in_the_last_place(tmp_path: Path) -> None:
    """On a CPU: ``bwd-expand-tanh``."""
    x = np.linspace(-9, 9, 100_000, dtype=np.float32)
    found = run_stock(tmp_path, MAP.replace("SIZE", str(len(x))).replace("OP", "math.tanh"), x)
    assert np.abs(found - np.tanh(x.astype(np.float64))).max() > 2e-7


def test_sines_of_large_numbers_lose_digits(tmp_path: Path) -> None:
    """On a CPU: ``bwd-expand-sines``."""
    x = np.linspace(1e5, 1e7, 1000, dtype=np.float32)
    found = run_stock(tmp_path, MAP.replace("SIZE", str(len(x))).replace("OP", "math.sin"), x)
    assert np.abs(found - np.sin(x.astype(np.float64))).max() > 1e-4


@pytest.mark.parametrize("op", ["math.sin %a", "math.cos %a", "math.asin %a", "math.acos %a", "math.atan2 %a, %a"])
def test_some_functions_of_float64_are_not_linked(tmp_path: Path, capfd: pytest.CaptureFixture[str], op: str) -> None:
    """For a CPU: ``_NAMED_IN_F64`` in ``frontend/islands/island_choice.py``."""
    text = MAP.replace("SIZE", "8").replace("OP %a", op).replace("f32", "f64")
    with pytest.raises(subprocess.CalledProcessError):
        compile_stock(tmp_path, text, *CPU.flags)
    assert "undefined symbol" in capfd.readouterr().err


def test_asinh_of_large_negative_numbers_is_infinite(tmp_path: Path) -> None:
    """On a CPU: ``frontend/decompositions/functions.py``."""
    x = np.linspace(-6000, -4500, 1000, dtype=np.float32)
    assert np.isinf(run_stock(tmp_path, MAP.replace("SIZE", str(len(x))).replace("OP", "math.asinh"), x)).any()


def test_powers_are_computed_by_the_logarithm(tmp_path: Path) -> None:
    """So that of a negative number there is none, and at zero the wrong infinity: ``bwd-expand-powers``."""
    x = np.array([-2, 0], dtype=np.float32)
    text = MAP.replace("SIZE", "2")
    assert np.isnan(run_stock(tmp_path, text.replace("OP %a", "math.powf %a, %a"), x)).all()
    whole = "%two = arith.constant -2 : i32\n    %d = math.fpowi %a, %two : f32, i32"
    assert run_stock(tmp_path, text.replace("%d = OP %a : f32", whole), x)[1] == -np.inf


def test_the_angle_of_zero_is_none(tmp_path: Path) -> None:
    """And of ``(-0, -1)`` it is pi, not minus pi: ``bwd-expand-angles``."""
    x = np.array([0, -0.0, -1], dtype=np.float32)
    text = MAP.replace("SIZE", "3")
    assert np.isnan(run_stock(tmp_path, text.replace("OP %a", "math.atan2 %a, %a"), x)[:2]).all()
    behind = "%one = arith.constant -1.0 : f32\n    %d = math.atan2 %a, %one"
    assert run_stock(tmp_path, text.replace("%d = OP %a", behind), x)[1] > 0


def test_a_rounding_that_is_widened_again_is_left_out(tmp_path: Path) -> None:
    """On a CPU, so that numbers are not those of another kernel: ``bwd-keep-roundings``."""
    x = np.linspace(1, 2, 1000, dtype=np.float32)
    rounds = "arith.truncf %a : f32 to bf16\n    %e2 = arith.extf %d : bf16 to f32"
    text = MAP.replace("SIZE", str(len(x))).replace("OP %a : f32", rounds).replace("yield %d", "yield %e2")
    assert (run_stock(tmp_path, text, x) == x).all()


def test_a_sum_over_a_product_with_a_row_does_not_compile(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """For a CPU: ``bwd-negate-products``."""
    with pytest.raises(subprocess.CalledProcessError):
        compile_stock(tmp_path, WEIGHTED_SUM, *CPU.flags)
    assert "invalid accumulator/result vector shape" in capfd.readouterr().err


def test_a_single_window_of_a_tensor_does_not_compile(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without a check of the IR it writes behind its result: ``bwd-crop-windows``."""
    with pytest.raises(subprocess.CalledProcessError):
        compile_stock(tmp_path, ONE_WINDOW, *CPU.flags)
    assert "to be 3, but found 2" in capfd.readouterr().err


def test_one_result_of_two_that_is_turned_round_does_not_compile(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """On any device: the barrier in ``pipelines/conversions/pool_forms.py``."""
    with pytest.raises(subprocess.CalledProcessError):
        compile_stock(tmp_path, TURNED, *CPU.flags)
    assert "expected number of yield values (2)" in capfd.readouterr().err


def test_a_number_of_bfloat16_on_the_host_does_not_compile(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On any device: ``hide_zero`` of ``transforms/helpers/barriers.py`` takes an integer of the same bits."""
    with pytest.raises(subprocess.CalledProcessError):
        compile_stock(tmp_path, HALF_NUMBER, *CPU.flags)
    assert "failed to legalize operation 'arith.constant'" in capfd.readouterr().err


def test_elementwise_kernels_for_cuda_have_workgroups_of_one_warp(tmp_path: Path) -> None:
    """Which an H100 starts too slowly: ``pipelines/devices/elementwise_tiles.py``."""
    text = MAP.replace("SIZE", "1048576").replace("OP", "math.absf")
    compile_stock(tmp_path, text, *find_target("cuda:sm_90").flags, f"--iree-hal-dump-executable-files-to={tmp_path}")
    (ptx,) = (path.read_text(encoding="utf-8") for path in tmp_path.glob("*.ptx"))
    assert re.findall(r"\.maxntid (\d+)", ptx) == ["32"]


@pytest.mark.parametrize(
    ("text", "said"),
    [(SUM_OF_ROWS, "failed to distribute"), (NUMBERED, "Cannot select")],
    ids=["a sum of all numbers: bwd-sum-by-rows", "quotients of 16 bits: bwd-join-indices"],
)
def test_code_for_cuda_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, said: str) -> None:
    """With the flags that are tried first: the pass that an id names has it compile."""
    target = find_target("cuda:sm_90")
    with pytest.raises(subprocess.CalledProcessError):
        compile_stock(tmp_path, text, *target.flags, *target.ladder[0])
    assert said in capfd.readouterr().err
