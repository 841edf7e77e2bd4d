# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The sweep over PyTorch's operator database: its verdicts, and a share of what compiles, by the date."""

from __future__ import annotations

import datetime
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import op_check
import pytest
import torch
from op_cases import Case, Sample, all_cases, rotate
from op_sweep import sweep
from op_table import read_islands, read_native, read_verdicts, write_table

import retrograd

ROOT = Path(__file__).parents[2]
# One sample each takes a minute or two; `make coverage` takes all cases and samples.
FRACTION, SAMPLES = 0.1, 1


def same(value: Any) -> Any:
    return value


def case_of(name: str, function: Any, *inputs: torch.Tensor) -> Case:
    return Case(name, lambda: iter([Sample(function, (x.clone().requires_grad_(),), {}, same) for x in inputs]))


@pytest.mark.long
def test_a_tenth_of_what_is_native_stays_native(tmp_path: Path) -> None:
    options = [
        "--fraction",
        FRACTION,
        "--samples",
        SAMPLES,
        "--results",
        tmp_path / "verdicts.jsonl",
        "--listed",
        ROOT / "docs/coverage.md",
    ]
    options += ["--rotate", datetime.date.today(), "--timeout", 300, "--together", 32]
    run_alone(ROOT / "tests/coverage/op_sweep.py", *options)
    verdicts = read_verdicts(tmp_path / "verdicts.jsonl").values()
    assert len(verdicts) > 10
    assert [(v.name, v.outcome, v.failures) for v in verdicts if v.outcome != "native"] == []


def run_alone(*command: object) -> None:
    """In a Python of its own: what forks must have no threads, and other tests have left some here."""
    result = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.short_cases("cummax", "linalg.det")
@pytest.mark.parametrize("name", read_islands((ROOT / "docs/coverage.md").read_text(encoding="utf-8")))
def test_what_runs_in_torch_is_refused_by_name_where_it_may_not(name: str) -> None:
    """With the line and what to do about it. The database itself sets the state of random numbers in some, which is
    refused too."""
    (case,) = (case for case in all_cases() if case.name == name)
    said = next((said for said in map(refusal_of, case.samples()) if said is not None), "")
    assert re.search(r"\w+\.\S+ at \S+:\d+ is not compiled: .*\n  remedy: |random numbers, .*\n.*\n  remedy: ", said), (
        said
    )


def refusal_of(sample: Sample) -> str | None:
    """What is said where nothing may run in torch; nothing of what compiles, or has no gradient in eager."""
    reference = op_check._run_eager(sample)
    try:
        if reference is not None:
            op_check._compile([reference], "error")
    except op_check.REFUSALS as error:
        return str(error)
    return None


def test_a_share_is_of_its_size_and_goes_by_the_key() -> None:
    cases = all_cases()
    share = rotate(cases, 0.1, "2024-02-29")
    assert len(share) == round(len(cases) / 10)
    assert share == rotate(cases, 0.1, "2024-02-29")
    assert share != rotate(cases, 0.1, "2024-03-01")


@pytest.mark.long
def test_verdicts(tmp_path: Path) -> None:
    """A case that agrees, one that cannot be traced, one whose process dies, and what the table says of them."""
    program = (
        "import sys, pathlib\n"
        f"sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(ROOT / 'tests/coverage')!r}]\n"
        f"import test_coverage\ntest_coverage.check_verdicts(pathlib.Path({str(tmp_path)!r}))"
    )
    run_alone("-c", program)


def check_verdicts(folder: Path) -> None:
    """The body of the test above."""

    def killed(x: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return x

    def counted(x: torch.Tensor) -> torch.Tensor:
        return x * x.nonzero().shape[0]

    def spectrum(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.linalg.eigvals(torch.diag(x * torch.arange(1, 4))))

    cases = [
        case_of("fine", torch.sin, torch.ones(3), torch.ones(2, 2)),
        case_of("refused", counted, torch.ones(3)),
        case_of("island", spectrum, torch.ones(3)),
        case_of("killed", killed, torch.ones(3)),
        case_of("none", torch.detach, torch.ones(3)),
    ]
    verdicts = sweep(cases, folder / "verdicts.jsonl", jobs=2, samples=None, timeout=120)
    assert [v.outcome for v in verdicts] == ["native", "refused", "islands", "crashed", "none"]
    assert verdicts[0].native == verdicts[0].samples == 2
    assert (verdicts[2].native, verdicts[2].islands) == (0, 1)
    assert "complex64" in verdicts[2].failures[0][2]
    assert "SIGKILL" in verdicts[3].failures[0][2]
    # Kept verdicts are not worked out anew: there is no time to.
    assert sweep(cases, folder / "verdicts.jsonl", jobs=1, samples=None, timeout=0) == verdicts
    text = write_table(verdicts, None, 5)
    assert "native: 1\nislands: 1\nrefused: 1\nwrong: 0\ncrashed: 1\n" in text
    assert read_native(text) == {"fine"}
    assert "| `refused` | refused | 0 of 1 | data-dependent" in text


def test_cases_as_one_program() -> None:
    """All native, or nothing is said."""
    fine = case_of("fine", torch.sin, torch.ones(3), torch.ones(2, 2))
    also = case_of("also", torch.cos, torch.ones(3))
    verdicts = op_check.examine_together([fine, also], None)
    assert verdicts is not None
    assert [(v.name, v.outcome, v.native) for v in verdicts] == [("fine", "native", 2), ("also", "native", 1)]
    assert (
        op_check.examine_together([fine, case_of("refused", lambda x: x * x.nonzero().shape[0], torch.ones(3))], None)
        is None
    )


def test_a_difference_is_seen() -> None:
    right = torch.tensor([1.0, 2.0, float("nan")])
    assert op_check.difference(right.clone(), right, None) is None
    assert op_check.difference(right + 1e-3, right, None) is not None
    assert op_check.difference(right.nan_to_num(), right, None) is not None
    assert op_check.difference(right.double(), right, None) is not None
    # As far from f64 as eager is, or as far as it may ever be.
    exact = right.double() + 1e-3
    assert op_check.difference(right + 2e-3, right, exact) is None
    assert op_check.difference(right + 1.0, right, exact + 1.0) is None
    assert op_check.difference(right + 1.0, right, exact - 1.0) is not None
    counts = torch.tensor([1, 2])
    assert op_check.difference(counts + 1, counts, None) is not None


def test_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is compiled from another function than the one it is compared with."""
    real = retrograd.compile_backward

    def crooked(model: torch.nn.Module, args: Any, **options: Any) -> Any:
        forward = model.forward
        model.forward = lambda arguments: [r * 1.001 for r in forward(arguments)]
        return real(model, args, **options)

    case = case_of("sin", torch.sin, torch.linspace(0, 1, 5))
    assert op_check.examine(case, None).outcome == "native"
    monkeypatch.setattr(op_check, "compile_backward", crooked)
    verdict = op_check.examine(case, None)
    assert verdict.outcome == "wrong"
    assert "off by" in verdict.failures[0][2]
