# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Faults put into a compiler are found, named, cut out and reproduced; where there is none, none is found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from executables import compile_once
from torch import Tensor, nn

import retrograd
from retrograd import bisection
from retrograd.pipelines.devices.targets import Target
from retrograd.pipelines.stages import staged
from retrograd.pipelines.toolchain.lowering import lower_to_linalg
from retrograd.tools import cli

FACTORY = """\
import torch


def mlp():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.GELU()), (torch.randn(5, 4),)


def other():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.GELU(), torch.nn.Linear(6, 3)), (torch.randn(5, 4),)
"""


# A coefficient that bwd-expand-erf writes, and another in its place: up to one, and beyond.
FAULT_OF_ERF = ("0.128379121", "0.228379121")
FAULT_OF_ERF_BEYOND_ONE = ("0.999593079", "0.899593079")


def make_mlp() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3), nn.Softplus())
    return model, torch.randn(5, 4)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What these tests compile is wrong on purpose: nobody else may find it."""
    monkeypatch.setenv("RETROGRAD_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(staged, "compile_executable", compile_once)


@pytest.fixture
def miscompile(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Lets every lowering put one op in place of another."""

    def inject(right: str, wrong: str) -> None:
        def lower(source: bytes, target: Target, **options: Any) -> str:
            return lower_to_linalg(source, target, **options).replace(right, wrong)

        monkeypatch.setattr(staged, "lower_to_linalg", lower)
        monkeypatch.setattr(bisection, "lower_to_linalg", lower)

    return inject


def run_script(script: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run([script], env={**os.environ, "PATH": path}, capture_output=True, text=True)


def test_nothing_is_found_in_a_program_that_is_right() -> None:
    model, x = make_mlp()
    found = retrograd.bisect(model, (x,))
    assert not found
    assert found.trials == 0
    with pytest.raises(ValueError, match="no reproducer"):
        found.write("nowhere")


def test_what_cancels_out_is_not_blamed() -> None:
    """The gradient of a bias in front of a batch norm is rounding noise, and so is the mean of what is centred."""
    torch.manual_seed(0)

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(self.linear(x))
            centred = h - h.mean(0)
            total: torch.Tensor = (self.last(centred) + centred.mean()).sum()
            return total

    found = retrograd.bisect(Centred(), (torch.randn(64, 6) * 3,))
    assert not found, str(found)


@pytest.mark.long
def test_miscompiled_op_is_found_and_reproduced(miscompile: Callable[[str, str], None], tmp_path: Path) -> None:
    model, x = make_mlp()
    miscompile(*FAULT_OF_ERF)
    found = retrograd.bisect(model, (x,))
    assert (found.kind, found.function, found.op, found.ops) == ("values", "forward", "torch.aten.erf", 1)
    assert "activation.py" in found.location
    script = found.write(tmp_path / "reproducer")
    lines = script.read_text(encoding="utf-8").splitlines()
    assert lines[3].startswith("retrograd-opt slice.mlir")
    # Without the line that lowers anew, which would mend it: the lowering is what this test broke.
    script.write_text("\n".join([*lines[:3], *lines[4:]]), encoding="utf-8")
    shown = run_script(script)
    assert shown.returncode != 0
    assert "[FAILED]" in shown.stdout
    script.write_text("\n".join(lines), encoding="utf-8")
    mended = run_script(script)
    assert mended.returncode == 0, mended.stderr
    assert "[SUCCESS]" in mended.stdout


@pytest.mark.long
def test_miscompiled_op_of_the_backward_is_found(miscompile: Callable[[str, str], None]) -> None:
    """The backward is given what eager saved: a fault in the forward would be found there."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x @ w).square().sum()

    arguments = [torch.randn(3, 4), torch.randn(4, 2, requires_grad=True)]
    miscompile("arith.cmpf ole", "arith.cmpf oge")
    found = retrograd.bisect(model, arguments)
    assert (found.kind, found.function) == ("values", "backward")
    assert found.op in ("torch.aten.le.Scalar", "torch.aten.threshold_backward")


def test_verification_names_the_op(miscompile: Callable[[str, str], None]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3), nn.GELU()), torch.randn(5, 4)
    miscompile(*FAULT_OF_ERF)
    step = retrograd.compile_backward(model, (x,), verify=True, cache=False)
    with pytest.raises(retrograd.VerificationError, match=r"(?s)output: .* parts from eager's is torch\.aten\.erf"):
        step(x)


def test_a_step_bisects_itself(miscompile: Callable[[str, str], None], tmp_path: Path) -> None:
    torch.manual_seed(0)
    # Nine compilations, each of few kernels.
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Softplus()), torch.randn(5, 4)
    step = retrograd.compile_backward(model, (x,))
    assert not step.bisect(x)
    miscompile("math.exp ", "math.exp2 ")
    monkeyed = retrograd.compile_backward(model, (x * 1,), cache=False, partition="default")
    assert monkeyed.bisect(x).op == "torch.aten.exp"
    step.save(tmp_path / "mlp.vmfb")
    with pytest.raises(ValueError, match=r"use retrograd\.bisect"):
        retrograd.load(tmp_path / "mlp.vmfb", model).bisect(x)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::retrograd.EagerIslandWarning")
def test_fault_beside_islands_is_found(miscompile: Callable[[str, str], None], tmp_path: Path) -> None:
    """Eigenvalues are found by torch; what is compiled before and after is given eager's values of them."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        spectrum = torch.linalg.eigvals(torch.sinh(x @ w)).abs()
        return torch.erf(spectrum)

    torch.manual_seed(0)
    arguments = [torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)]
    step = retrograd.compile_backward(model, arguments)
    assert step.explain().to_dict()["islands"]
    assert not step.bisect(*arguments)
    with pytest.raises(retrograd.CaptureError, match="complex64, which executables do not have"):
        retrograd.bisect(model, arguments, fallback="error")
    miscompile(*FAULT_OF_ERF_BEYOND_ONE)
    # Compiled anew, with nothing in the cache that was right.
    found = retrograd.bisect(lambda x, w: model(x, w) * 2, arguments)
    assert (found.kind, found.op, found.ops) == ("values", "torch.aten.erf", 1)
    assert found.function.startswith("forward")
    assert run_script(found.write(tmp_path / "reproducer")).returncode == 0, "the tools themselves are right"


def test_op_that_does_not_lower_is_cut_out(tmp_path: Path) -> None:
    @torch.library.custom_op("retrograd_tests::cube", mutates_args=())
    def cube(x: Tensor) -> Tensor:
        return x**3

    cube.register_fake(torch.empty_like)
    cube.register_autograd(
        lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )

    def model(x: Tensor) -> Tensor:
        cubes: Tensor = cube((x @ x.T).tanh())
        return cubes.sum()

    found = retrograd.bisect(model, (torch.randn(3, 3, requires_grad=True),), fallback="error")
    assert (found.kind, found.function, found.ops) == ("lower", "forward", 1)
    assert found.op == "torch.retrograd_tests.cube"
    assert "test_bisect.py" in found.location
    shown = run_script(found.write(tmp_path / "reproducer"))
    assert shown.returncode != 0
    assert "failed to legalize" in shown.stderr


def test_bfloat16_and_booleans_are_reproduced(miscompile: Callable[[str, str], None], tmp_path: Path) -> None:
    def model(x: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, x.exp(), x * 2)

    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    miscompile("math.exp", "math.exp2")
    found = retrograd.bisect(model, (x, torch.rand(4, 8) > 0.2))
    assert found.op == "torch.aten.exp"
    folder = tmp_path / "reproducer"
    assert run_script(found.write(folder)).returncode == 0
    values = torch.from_numpy(np.fromfile(folder / "expected.exp.bin", dtype=np.uint8)).view(torch.bfloat16)
    assert torch.equal(values.reshape(4, 8), x.detach().exp())


def test_command(
    miscompile: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "nets.py").write_text(FACTORY, encoding="utf-8")
    assert cli.main(["bisect", "nets.py:mlp"]) == 0
    assert "every value agrees" in capsys.readouterr().out
    assert not Path("reproducer").exists()
    miscompile(*FAULT_OF_ERF)
    assert cli.main(["compile", "nets.py:mlp", "-o", "wrong.vmfb", "--no-cache"]) == 0
    capsys.readouterr()
    assert cli.main(["bisect", "nets.py:mlp", "--artifact", "wrong.vmfb", "-o", "found"]) == 1
    assert "torch.aten.erf" in capsys.readouterr().out
    assert (tmp_path / "found" / "reproduce.sh").exists()
    assert cli.main(["bisect", "nets.py:other", "--artifact", "wrong.vmfb"]) == 1
    assert "not compiled from this model" in capsys.readouterr().err
