# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The GPU benchmark's own measuring and reporting, on the CPU and with no compiler in it."""

import json
import os
from pathlib import Path
from typing import Any

import gpu
import gpu_steps
import measure_gpu
import pytest
import torch
from measure_gpu import ENGINES, Job, Runner, difference, gradients, measure
from models import MODELS, Case
from models.precision import PRECISIONS, Precision, convert
from page import BY_HAND

CPU = ["--device", "cpu", "--models", "mlp", "--size", "test", "--repeats", "2"]


@pytest.fixture(autouse=True)
def fake_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(engine: str, case: Case) -> Runner:
        if engine == "inductor":
            raise RuntimeError("no compiler\nand a long log")
        return Runner(engine, case.model if engine == "eager" else lambda *args: 2 * case.model(*args), (3, 5))

    monkeypatch.setattr(measure_gpu, "prepare", prepare)
    monkeypatch.setattr(gpu, "compile_all", lambda jobs, processes, say: dict.fromkeys(jobs, 1.5))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_of_each_precision_are_near_those_of_float32(precision: Precision) -> None:
    exact = gradients(convert(MODELS["transformer"].make("test"), "cpu", "f32"))
    case = convert(MODELS["transformer"].make("test"), "cpu", precision)
    parameters = {leaf.dtype for leaf in case.leaves().values()}
    assert parameters == {torch.bfloat16 if precision == "bf16" else torch.float32}
    error = difference(gradients(case), exact)
    assert error == 0 if precision == "f32" else 1e-4 < error < 0.1


def test_rows_tell_of_wrong_gradients_failures_and_what_was_left_out() -> None:
    compiled: dict[Job, float | str] = {Job("mlp", "test", "cpu", "f32", name): 2.0 for name in ENGINES[1:]}
    eager, failed, wrong = measure("mlp", "test", "cpu", "f32", compiled, 2)
    assert (eager.ratio, eager.gradient_error, eager.compile_seconds, eager.peak_bytes) == (1.0, 0.0, None, None)
    assert failed.note == "failed: RuntimeError: no compiler" and failed.backward_ms is None
    assert wrong.gradient_error is not None and wrong.gradient_error > 0.1 and wrong.compile_seconds == 2.0
    notes = [row.note for row in measure("mlp", "test", "cpu", "f32", {compiled_job(): "failed: by itself"}, 1)]
    assert notes == ["", "left out", "failed: by itself"]


def compiled_job() -> Job:
    return Job("mlp", "test", "cpu", "f32", "retrograd")


def test_a_missing_gradient_is_refused() -> None:
    exact = gradients(compiled_job().make())
    with pytest.raises(AssertionError, match="expected"):
        difference({name: g for name, g in exact.items() if "bias" not in name}, exact)


def test_caches_are_empty_for_the_run_and_as_before_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = gpu.CACHES
    monkeypatch.setenv(first, "/mine")
    monkeypatch.delenv(second, raising=False)
    with gpu.caches(keep=False):
        assert os.environ[first] != "/mine" and second in os.environ
    assert os.environ[first] == "/mine" and second not in os.environ
    with gpu.caches(keep=True):
        assert os.environ[first] == "/mine"


def test_command_writes_json_and_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DOCUMENT", tmp_path / "gpu.md")
    arguments = [*CPU, "--precisions", "f32", "bf16", "--json", str(tmp_path / "figures.json"), "--write"]
    assert gpu.main(arguments) == 0
    rows = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["precision"], row["engine"]) for row in rows] == [(p, e) for p in ("f32", "bf16") for e in ENGINES]
    document = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert f"python benchmarks/gpu.py {' '.join(arguments)}" in document
    assert "| mlp | bf16 | retrograd |" in document and "failed: RuntimeError: no compiler" in document
    # The same page from what was kept of the run, and with it what stands there by hand.
    notes = f"\n{BY_HAND}\n\n## Limits\n"
    (tmp_path / "gpu.md").write_text(f"# Old\n{notes}", encoding="utf-8")
    assert gpu.main(["--from", str(tmp_path / "figures.json"), "--write"]) == 0
    assert (tmp_path / "gpu.md").read_text(encoding="utf-8") == document + notes


def test_runs_on_different_devices_make_no_common_table(tmp_path: Path) -> None:
    for name in ("first", "second"):
        content = {"environment": {"command": name, "device": name}, "rows": []}
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(SystemExit, match=r"second was measured with something else than .*first"):
        gpu.read_runs([tmp_path / "first", tmp_path / "second"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so() -> None:
    with pytest.raises(SystemExit, match="no CUDA device"):
        gpu.main(["--models", "mlp"])


@pytest.mark.parametrize("arguments", [["--models", "no_such"], ["--precisions", "f7"], ["--jobs", "0"]])
def test_bad_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        gpu.main(arguments)
    assert stopped.value.code == 2
    assert arguments[1] in capsys.readouterr().err


def test_steps_at_real_sizes_make_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that fails leaves a note, and graphs, whose memory is there before a step, no peak."""

    def refuse(case: Case) -> Any:
        raise RuntimeError("no compiler\nand a long log")

    def small(name: str, precision: str = "") -> Case:
        return convert(MODELS["mlp"].make("test"), "cpu", "f32")

    monkeypatch.setattr(gpu_steps, "make_case", small)
    monkeypatch.setattr(gpu_steps, "kernel_times", lambda call, repeats: {"kernel": 1500.0})
    monkeypatch.setattr(gpu_steps, "measure_peak", lambda case, runner: 3 << 20)
    monkeypatch.setattr(gpu_steps, "ENGINES", {"inductor": refuse, "graphs": lambda case: case.model})
    rows = gpu_steps.measure("mlp:f32", ["inductor", "graphs"], 2)
    assert [row.through for row in rows] == ["eager", "inductor", "graphs"]
    assert rows[1].note == "RuntimeError: no compiler" and rows[1].step_ms is None
    assert rows[0].peak_mib == 3 and rows[0].peak_ratio == 1 and rows[2].peak_mib is None
    assert rows[0].error is not None and 0 < rows[0].error < 1e-5
    page = "\n".join(
        gpu_steps.document(rows, {"command": "python it", "device": "a device", "torch": "2"}, of_packages=False)
    )
    assert "| mlp:f32 | inductor | - | - | - | - | - | - |" in page
    assert "- mlp:f32, inductor: RuntimeError: no compiler" in page
    assert "# Steps at the sizes people train: a device" in page
