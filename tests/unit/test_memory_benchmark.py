# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What `make bench-memory` measures and writes, with no compiler in it."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import budget_steps
import measure_memory
import memory
import predict_memory
import pytest
import torch
from budget_steps import Step, Sweep, find_violations
from measure import Contender
from measure_memory import SIZES, MemoryResult, MemoryRow, make_case, max_error, torch_peak
from models import MODELS, Case
from predict_memory import Prediction
from torch import Tensor

from retrograd.runtime.reports.report import Report

HALF = {"held": {"outputs": 8}, "scratch": 64, "steps": [["matmul", "model.py:3", 64]]}
REPORT = Report({"name": "Net", "partition": "default", "timeline": {"forward": [HALF], "backward": [HALF]}})


def fake_result(name: str) -> MemoryResult:
    rows = [
        MemoryRow(name, "eager", peak_measured=500, backward_ms=2.0, best_ms=1.0, gradient_error=0.0),
        MemoryRow(name, "default", None, 100, 0, 995, 1000, 1000, 4.0, 2.0, 1e-7),
        MemoryRow(name, "budget 0.5", 500, 10, 12345, 400, 480, 500, 5.0, 2.2, 2e-7),
        MemoryRow(name, "budget 0.1", 100, note="infeasible: the least is 450 B"),
    ]
    return MemoryResult(rows, {"default": REPORT, "budget 0.5": REPORT})


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_those_of_the_models(name: str) -> None:
    assert SIZES[name].keys() == MODELS[name].sizes["test"].keys()
    first, second = make_case(name, "test"), MODELS[name].make("test")
    assert all(torch.equal(a, b) for a, b in zip(first.leaves().values(), second.leaves().values(), strict=True))


def test_peak_of_torch_counts_what_is_alive_at_once() -> None:
    x = torch.randn(1000, requires_grad=True)

    def model(x: Tensor) -> Tensor:
        y = x.exp()  # 4,000 bytes, kept for the backward
        return y * 1  # 4,000 more

    # Beside them one gradient at a time: that of the sum is expanded.
    peak = torch_peak(Case(model, (x,), lambda y: y.sum()), model)
    assert 3 * 4000 <= peak < 3 * 4000 + 1000


def test_errors_leave_out_gradients_that_are_zero() -> None:
    reference = {"a": torch.ones(4), "b": torch.full((4,), 1e-9)}
    found = {"a": torch.full((4,), 1.5), "b": torch.zeros(4)}
    assert max_error(found, reference) == pytest.approx(0.5)


def test_rows_are_compared_with_eager() -> None:
    rows = fake_result("mlp").rows
    by_how = {row.how: dict(zip(memory.COLUMNS[:8], memory.cells(row, rows)[:8], strict=True)) for row in rows}
    assert by_how["budget 0.5"]["budget"] == "500 B" and by_how["budget 0.5"]["recomputed FLOPs"] == "12,345"
    assert memory.cells(rows[1], rows)[8] == "2.00" and memory.cells(rows[2], rows)[11] == "2.20"
    assert memory.cells(rows[0], rows)[5:7] == ["-", "-"]
    assert memory.cells(rows[3], rows)[1] == "budget 0.1 (infeasible: the least is 450 B)"


def test_prediction_counts_what_is_near() -> None:
    planned, predicted = memory.prediction({"mlp": fake_result("mlp")})[2:]
    assert planned == "| planned | 1 of 2 | 1 of 2 | -20.0% | -0.5% |"
    assert predicted == "| predicted | 1 of 2 | 2 of 2 | -4.0% | +0.0% |"


def test_predictions_are_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def predict(name: str, case: Case, *, in_order: bool) -> Iterator[Prediction]:
        yield Prediction(name, "default", 995, 1000)
        yield Prediction(name, "min-cut", 1100, 1000)

    monkeypatch.setattr(predict_memory, "predict", predict)
    assert predict_memory.main(["--models", "mlp", "--size", "test"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:4] == ["| mlp | default | 995 | 1,000 | 0.995 |", "| mlp | min-cut | 1,100 | 1,000 | 1.100 |"]
    assert lines[-1] == "within 1%: 1 of 2, within 5%: 1 of 2, within 15%: 2 of 2"


def test_command_writes_rows_pictures_traces_and_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def measured(name: str, case: Case, *rest: Any, peers: bool) -> MemoryResult:
        asked.append((name, rest[0], rest[1], peers))
        return fake_result(name)

    monkeypatch.setattr(memory, "measure_model", measured)
    monkeypatch.setattr(memory, "DOCUMENT", tmp_path / "memory.md")
    monkeypatch.setattr(memory, "PICTURES", tmp_path / "img")
    line = ["--size", "test", "--models", "mlp", "gpt2", "--fractions", "0.5", "--no-peers", "--write", "--out"]
    assert memory.main([*line, str(tmp_path / "out")]) == 0
    assert asked == [("mlp", [0.5], 20, False), ("gpt2", [0.5], 20, False)]
    content = json.loads((tmp_path / "out" / "rows.json").read_text(encoding="utf-8"))
    assert [row["how"] for row in content["rows"]] == 2 * ["eager", "default", "budget 0.5", "budget 0.1"]
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["curves.png", "gpt2.json", "gpt2.png", "mlp.json", "mlp.png", "rows.json"]
    document = (tmp_path / "memory.md").read_text(encoding="utf-8")
    # Of the forward 8 bytes of outputs and 64 of scratch memory.
    assert "| gpt2 | 72 B | 0.14 | 500 B | 1.00 |" in document
    assert "| gpt2 | budget 0.5 | 500 B |" in document and "img/memory-gpt2.png" in document
    assert sorted(path.name for path in (tmp_path / "img").iterdir()) == ["memory-curves.png", "memory-gpt2.png"]
    assert "written" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--models", "no_such"], "invalid choice: 'no_such'"),
        (["--models", "bert"], "bert: --size memory has mlp"),
        (["--fractions", "0"], "--fractions are above zero"),
    ],
)
def test_bad_options_are_refused(line: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        memory.main(line)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_what_inductor_cannot_compile_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(case: Case) -> Contender:
        raise RuntimeError("no compiler\nand a long log")

    monkeypatch.setattr(measure_memory, "inductor", failing)
    monkeypatch.setattr(measure_memory, "halved_inductor", lambda case: Contender("inductor", case.model))
    result = MemoryResult()
    found = measure_memory.compile_peers("mlp", make_case("mlp", "test"), result, lambda text: None)
    assert [c.engine for c in found] == ["inductor, budget 0.5"]
    assert [row.note for row in result.rows] == ["RuntimeError: no compiler"]


def test_sweeps_are_kept_for_the_page(tmp_path: Path) -> None:
    whole = Sweep("mlp", 100, (Step(100, 90, 0.0, 8), Step(90, 70, 1e-3, 4)), 2.0)
    for found in (replace(whole, model="cnn"), whole):
        budget_steps.keep(found, tmp_path)
    assert list(budget_steps.read_kept(tmp_path)) == [whole, replace(whole, model="cnn")]


def test_steps_of_the_budget_that_break_its_promise_are_found() -> None:
    kept = (Step(100, 90, 0.0, 8), Step(90, 90, 0.0, 8), Step(80, 70, 1e-3, 4))
    assert find_violations(kept) == []
    assert budget_steps.cells(Sweep("net", 100, kept, 2.0)) == ["net", "100", "70", "0.70", "2", "1.000", "0", "2"]
    broken = (Step(100, 80, 2.0, 8), Step(90, 95, 1.0, 4))
    assert find_violations(broken) == [
        "90: peak 95",
        "90: peak 95, above 80 for 100",
        "100: 2 s recomputed, above 1 for 90",
    ]
