# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The benchmarks' own measuring and reporting, with no compiler in it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import backward
import cpu_steps
import hooks
import measure
import pytest
import torch
from measure import Contender, Row, count_saved_bytes, gradients, time_in_turn
from models import MODELS, SIZES, Case
from models.precision import convert
from suite import SUITE
from torch import Tensor, nn


@pytest.fixture
def linear() -> Case:
    return SUITE["linear_regression"].make("test")


@pytest.fixture
def fake_engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    def failing(case: Case) -> Contender:
        raise RuntimeError("no lowering for aten.fold\nand a long log")

    def wrong(case: Case) -> Contender:
        return Contender("wrong", lambda *args: 2 * case.model(*args), 1.5, lambda: {"peak_bytes_predicted": 2048})

    engines = {"eager": measure.eager, "failing": failing, "wrong": wrong}
    for module in (measure, backward):
        monkeypatch.setattr(module, "ENGINES", engines)
    return engines


@pytest.mark.parametrize("name", MODELS)
def test_case_is_differentiable_and_the_same_each_time(name: str) -> None:
    state = torch.random.get_rng_state()
    first, second = MODELS[name].make("test"), MODELS[name].make("test")
    assert torch.equal(torch.random.get_rng_state(), state)
    ours, theirs = gradients(first, first.model), gradients(second, second.model)
    assert ours.keys() == theirs.keys() == first.leaves().keys()
    for key, gradient in ours.items():
        assert torch.equal(gradient, theirs[key]), key
        assert gradient.abs().max() > 0, key


@pytest.mark.parametrize("name", MODELS)
def test_every_size_is_given(name: str) -> None:
    assert set(MODELS[name].sizes) == set(SIZES)
    assert MODELS[name].name == name
    assert MODELS[name].sizes["test"].keys() == MODELS[name].sizes["bench"].keys()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_works_where_its_arguments_are(name: str) -> None:
    """What it makes itself is not left on the CPU: on the meta device tensors of both are refused, as on a GPU."""
    case = convert(MODELS[name].make("test"), "meta", "f32")
    case.loss(case.model(*case.args)).backward()
    assert all(leaf.grad is not None and leaf.grad.is_meta for leaf in case.leaves().values())


def test_leaves_of_a_function_are_its_arguments() -> None:
    assert set(SUITE["several_outputs"].make("test").leaves()) == {"args[0]['right']", "args[1][0]", "args[1][1]"}


def test_tied_parameters_are_one_leaf() -> None:
    names = SUITE["language_model"].make("test").leaves()
    assert ("embedding.weight" in names) and ("head.weight" not in names)


def test_saved_bytes_leave_out_parameters_and_arguments(linear: Case) -> None:
    assert count_saved_bytes(linear, linear.model) == 0


def test_saved_bytes_count_each_storage_once() -> None:
    def model(x: Tensor) -> Tensor:
        y = x.exp()
        return y * y.t() + y.relu()

    # Kept: the result of exp, seen also through a transpose, and the result of relu.
    case = Case(model, (torch.randn(5, 5, requires_grad=True),), lambda y: y.sum())
    assert count_saved_bytes(case, model) == 2 * 5 * 5 * 4


def test_each_round_begins_with_another(linear: Case) -> None:
    order: list[str] = []

    def recording(name: str) -> Contender:
        def call(x: Tensor) -> Any:
            order.append(name)
            return linear.model(x)

        return Contender(name, call)

    contenders = [recording(name) for name in "abc"]
    time_in_turn(linear, contenders, repeats=4)
    assert "".join(order) == "abcbcacababc"
    assert [len(c.forward) == len(c.backward) == 4 for c in contenders] == [True] * 3


def test_rows_report_wrong_gradients_and_failures(linear: Case, fake_engines: dict[str, Any]) -> None:
    eager, wrong, failing = measure.measure("linear", linear, 3, lambda text: None)
    assert (eager.engine, eager.ratio, eager.gradient_error, eager.compile_seconds) == ("eager", 1.0, 0.0, None)
    assert wrong.gradient_error is not None and wrong.gradient_error > 0.1
    assert (wrong.compile_seconds, wrong.peak_bytes_predicted, wrong.peak_bytes_measured) == (1.5, 2048, None)
    assert failing == Row("linear", "failing", note="failed: RuntimeError: no lowering for aten.fold")


def test_missing_gradient_is_refused(linear: Case) -> None:
    assert isinstance(linear.model, nn.Module)
    reference = gradients(linear, linear.model)
    with pytest.raises(AssertionError, match="bias"):
        measure._difference(linear, Contender("wrong", lambda x: x @ linear.leaves()["weight"].T), reference)


def test_dynamo_fallbacks_are_noted() -> None:
    counters: dict[str, dict[str, int]] = {"graph_break": {}, "unimplemented": {}, "frames": {"total": 1, "ok": 1}}
    assert measure.left_to_eager(counters) == ""
    counters |= {"frames": {"total": 1}, "unimplemented": {"no LSTM\n  Hint: none": 1}}
    assert measure.left_to_eager(counters) == "in part or whole eager: no LSTM"


def test_command_writes_json_and_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake_engines: dict[str, Any]
) -> None:
    monkeypatch.setattr(backward, "DOCUMENT", tmp_path / "docs" / "benchmarks.md")
    figures = tmp_path / "figures.json"
    arguments = ["--models", "mlp", "--size", "test", "--repeats", "2", "--json", str(figures), "--write"]
    assert backward.main(arguments) == 0
    content = json.loads(figures.read_text(encoding="utf-8"))
    assert [row["engine"] for row in content["rows"]] == ["eager", "wrong", "failing"]
    assert set(content["rows"][0]) == {field.name for field in dataclasses.fields(Row)}
    assert content["environment"]["steps timed"] == "2"
    document = (tmp_path / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert f"python benchmarks/backward.py {' '.join(arguments)}" in document
    assert "| mlp | wrong |" in document and "no lowering for aten.fold" in document
    assert "no lowering for aten.fold" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--models", "no_such"], ["--repeats", "0"], ["--size", "huge"]])
def test_bad_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        backward.main(arguments)
    assert stopped.value.code == 2
    assert arguments[1] in capsys.readouterr().err


def test_a_table_of_hooks_names_what_failed() -> None:
    def figures(engine: str) -> dict[str, Any]:
        """What it
        measures."""
        return {}

    rows: dict[str, dict[str, Any]] = {"eager": {"us": 1.5}, "retrograd": {"failed": "RuntimeError: no such op"}}
    assert hooks.table("overhead", figures, rows) == [
        "## overhead",
        "",
        "What it measures.",
        "",
        "|  | us | failed |",
        "| --- | ---: | ---: |",
        "| eager | 1.5 |  |",
        "| retrograd |  | RuntimeError: no such op |",
        "",
    ]
    assert hooks.engines_of("share") == ("retrograd",) and "eager" in hooks.engines_of("packed")


def test_steps_at_real_sizes_on_a_cpu_make_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(case: Case) -> Contender:
        raise RuntimeError("no compiler\nand a long log")

    def same(case: Case) -> Contender:
        return Contender("retrograd", case.model, 1.5)

    monkeypatch.setattr(cpu_steps, "MODELS", {"mlp": lambda: MODELS["mlp"].make("test")})
    monkeypatch.setattr(cpu_steps, "ENGINES", {"inductor": refuse, "retrograd": same})
    rows = cpu_steps.measure("mlp", ["inductor", "retrograd"], 2)
    assert [row.through for row in rows] == ["eager", "inductor", "retrograd"]
    assert rows[1].note == "RuntimeError: no compiler" and rows[1].step_ms is None
    assert rows[0].compile_s is None and rows[2].compile_s == 1.5
    assert rows[0].ratio == rows[0].peak_ratio == rows[2].peak_ratio == 1
    page = "\n".join(cpu_steps.document(rows, {"command": "python it", "torch": "2"}))
    assert "| mlp | inductor | - | - | - | - | - |" in page
    assert "- mlp, inductor: RuntimeError: no compiler" in page
