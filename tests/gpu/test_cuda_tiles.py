# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles by measurement on the device: right gradients, kept and from a file, under torch.compile, never wrong ones."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sanitize import Case, find_kernels, random
from steps import relative_error, require_device
from torch import Tensor

import retrograd
from retrograd.contract.environment import CACHE_FOLDER
from retrograd.contract.trials import Work
from retrograd.pipelines.devices.targets import cuda_architecture
from retrograd.pipelines.kernels.ptx import compile_kernels
from retrograd.pipelines.kernels.questions import Question
from retrograd.pipelines.kernels.tile_table import read_kept
from retrograd.runtime.cuda.trials import Bench, find_difference
from retrograd.tools.cli import main
from retrograd.tools.measure import DeviceTimer
from retrograd.tuning import make_work


def setup_module() -> None:
    require_device()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache of its own."""
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path))
    return tmp_path


def on_device(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()


def gradients(call: Callable[..., Any], *args: Tensor) -> list[Tensor]:
    output = call(*args)
    return [output.detach(), *torch.autograd.grad(output, args, torch.ones_like(output))]


def test_what_is_measured_is_right_and_kept(folder: Path) -> None:
    args, said = (on_device(640, 520), on_device(768, 520)), list[str]()
    compiled = retrograd.compile_backward(F.linear, args, kernels="products", tiles="measure", progress=said.append)
    lines = [line for line in compiled.explain().to_dict()["kernels"] if "product_" in line]
    assert lines and all(line.endswith("tiles by measurement") for line in lines)
    assert len(read_kept()) == len(lines) and any(line.startswith("measure tiles: 1 of") for line in said)
    exact = gradients(F.linear, *(a.detach().double().requires_grad_() for a in args))
    for mine, right in zip(gradients(compiled, *args), exact, strict=True):
        assert relative_error(mine, right) < 5e-3
    # From a file it is the same program.
    path = folder / "tiles.json"
    assert main(["tiles", str(path)]) == 0
    again = retrograd.compile_backward(F.linear, args, kernels="products", tiles=path, cache=False)
    assert again.explain().to_dict()["kernels"] == compiled.explain().to_dict()["kernels"]


def test_torch_compile_measures_where_it_is_told_to(folder: Path) -> None:
    args = on_device(640, 520), on_device(768, 520)
    compiled = torch.compile(lambda x, w: F.linear(x, w).relu(), backend="retrograd", mode="max-autotune")
    exact = gradients(lambda x, w: F.linear(x, w).relu(), *args)
    for mine, right in zip(gradients(compiled, *args), exact, strict=True):
        assert relative_error(mine, right.double()) < 1e-2
    assert read_kept()


def product_works() -> Iterator[Work]:
    """A product with the tiles that are taken unasked, and the same with a number of its kernel's changed."""
    architecture = cuda_architecture(*torch.cuda.get_device_capability())
    args = random(257, 264, dtype=torch.bfloat16), random(264, 264, dtype=torch.bfloat16)
    question: Question = find_kernels(Case("products", F.linear, args), architecture)[0]
    trial = question.trials[question.unasked]
    work = make_work(trial, compile_kernels([run.launch.kernel for run in trial.runs], architecture))
    yield work
    *calls, last = work.calls
    m, n, *rest = last.numbers
    yield replace(work, calls=(*calls, replace(last, numbers=(m - 1, n, *rest))))
    yield replace(work, calls=(*calls, replace(last, code=replace(last.code, shared=1 << 20))))


def test_tiles_with_which_results_are_others_are_found_out() -> None:
    bench = Bench(torch.device("cuda"))
    with ExitStack() as stack:
        timer = DeviceTimer(bench, list(product_works()), stack)
        assert timer.find_fault(0) is None
        # A row that is not written holds what was no number.
        assert "differs by inf" in (timer.find_fault(1) or "")
        assert "shared memory" in (timer.find_fault(2) or "")
        (times,) = timer.time([0], 3)
        assert len(times) == 3 and min(times) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1000, 520, 1096), (2056, 2056, 1544), (129, 136, 2056), (768, 3072, 4096)])
def test_tiles_that_warps_of_their_own_fetch(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """All layouts, with and without a bias; more tiles than multiprocessors, fewer, sums in parts: as other tiles."""
    architecture = cuda_architecture(*torch.cuda.get_device_capability())
    x, w, bias = random(m, k, dtype=dtype), random(n, k, dtype=dtype), random(n, dtype=dtype)
    bench, tried = Bench(torch.device("cuda")), 0
    for question in find_kernels(Case("products", F.linear, (x, w, bias)), architecture):
        trials = [t for tiles, t in question.trials.items() if " copied" in tiles][:1]
        trials += [trial for tiles, trial in question.trials.items() if "specialized" in tiles]
        compiled = compile_kernels([run.launch.kernel for trial in trials for run in trial.runs], architecture)
        with ExitStack() as stack:
            timer = DeviceTimer(bench, [make_work(trial, compiled) for trial in trials], stack)
            assert [timer.find_fault(number) for number in range(len(trials))] == [None] * len(trials)
        tried += len(trials) - 1
    assert tried >= 3 or architecture != "sm_90"


def test_differences_are_of_the_norm() -> None:
    x = torch.randn(100, device="cuda")
    assert find_difference([x], [x]) == 0 and abs(find_difference([x * 1.5], [x]) - 0.5) < 1e-5
    assert find_difference([x], [x.clone().index_fill_(0, torch.tensor([3], device="cuda"), float("inf"))]) == float(
        "inf"
    )
