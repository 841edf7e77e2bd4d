# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A network compiled and explained by ``retrograd``, compared with eager and with IREE's own tool."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from iree_tools import RUN_MODULE

from retrograd.runtime.artifact import read_artifact
from retrograd.tools import cli

SOURCE = """\
import torch


def mlp():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    return model, (torch.randn(5, 4),)


def half():
    model, args = mlp()
    return model.bfloat16(), (args[0].bfloat16(),)


def scaled():
    return lambda x, *, scale: (x * scale).sin(), (torch.ones(3, requires_grad=True),), {"scale": torch.full((3,), 2.0)}


def branch():
    return lambda x: x.sin() if (x[:, None] @ x[None]).sum() > 0 else x, (torch.ones(3, requires_grad=True),)
"""


def retrograd(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "retrograd.tools.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@dataclass(frozen=True)
class Compiled:
    """A compiled network in ``folder``, its tensors by the names of the manifest, and what eager makes of them."""

    folder: Path
    file: Path
    output: str
    progress: str
    tensors: dict[str, torch.Tensor]

    def names(self, function: str, side: str) -> list[str]:
        spec = read_artifact(self.file).manifest.function(function)
        return [tensor.name for tensor in (spec.arguments if side == "arguments" else spec.results)]

    def npy(self, names: Sequence[str]) -> list[str]:
        """A .npy file for each name."""
        files = []
        for index, name in enumerate(names):
            files.append(str(self.folder / f"{index}.{name}.npy"))
            np.save(files[-1], self.tensors[name].detach().numpy())
        return files


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "cli_networks.py").write_text(SOURCE, encoding="utf-8")
    result = retrograd(
        *("compile", "cli_networks:mlp", "-o", "mlp.vmfb", "--verify"),
        *("--emit-mlir", "partitioned:partitioned.mlir", "linalg:linalg.mlir"),
        folder=folder,
    )
    assert result.returncode == 0, result.stderr
    return Compiled(folder, folder / "mlp.vmfb", result.stdout, result.stderr, run_eager())


def run_eager() -> dict[str, torch.Tensor]:
    names: dict[str, object] = {}
    exec(SOURCE, names)
    model, (x,) = names["mlp"]()  # type: ignore[operator]
    tensors = {**dict(model.named_parameters()), "args[0]": x}
    tanh = model[1](model[0](x))
    output = model[2](tanh)
    tangent = torch.linspace(-1, 1, output.numel()).reshape(output.shape)
    output.backward(tangent)
    tensors |= {"output": output, "saved.tanh": tanh, "tangent.output": tangent}
    return tensors | {f"grad.{name}": p.grad for name, p in model.named_parameters()}


def run_here(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """The command in this process: loading torch takes most of its time."""
    status = cli.main([str(argument) for argument in arguments])
    return status, *capsys.readouterr()


def test_compile_tells_what_it_does(compiled: Compiled) -> None:
    lines = [line for line in compiled.progress.splitlines() if line.startswith("retrograd: ")]
    assert lines[:3] == ["retrograd: loading torch", "retrograd: capture", "retrograd: import"]
    assert lines[-2:] == ["retrograd: write linalg.mlir", "retrograd: write mlp.vmfb"]
    assert "retrograd: iree-compile" in lines
    assert "retrograd: compare with eager" in lines
    assert "retrograd: Sequential" in compiled.output
    assert "not run yet" not in compiled.output  # verifying is running


def test_emitted_mlir(compiled: Compiled) -> None:
    assert '"bwd.save"' in (compiled.folder / "partitioned.mlir").read_text(encoding="utf-8")
    linalg = (compiled.folder / "linalg.mlir").read_text(encoding="utf-8")
    assert "linalg." in linalg
    assert '"bwd.' not in linalg


@pytest.mark.parametrize("function", ["forward", "backward"])
def test_iree_runs_a_compiled_file(compiled: Compiled, function: str) -> None:
    inputs = compiled.npy(compiled.names(function, "arguments"))
    outputs = compiled.npy(compiled.names(function, "results"))
    iree = [*RUN_MODULE, f"--module={compiled.file}", "--device=local-task"]
    iree += [f"--function={function}", *(f"--input=@{file}" for file in inputs)]
    result = subprocess.run(
        [*iree, *(f"--expected_output=@{file}" for file in outputs)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr

    wrong = compiled.folder / f"wrong-{function}.npy"
    np.save(wrong, np.load(outputs[-1]) + 0.5)
    result = subprocess.run(
        [*iree, *(f"--expected_output=@{file}" for file in (*outputs[:-1], wrong))], capture_output=True, text=True
    )
    assert result.returncode != 0


def test_explain(compiled: Compiled, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_here(capsys, "explain", compiled.file)
    assert (status, err) == (0, "")
    artifact = read_artifact(compiled.file)
    for text in ("arguments of forward", "results of backward", "tangent.output", "grad.2.bias", artifact.digest):
        assert text in out
    status, out, _ = run_here(capsys, "explain", compiled.file, "--json")
    data = json.loads(out)
    assert status == 0
    assert data["sha256"] == artifact.digest
    assert data["versions"] == artifact.manifest.versions
    assert data["report"]["name"] == "Sequential"
    assert [f["name"] for f in data["functions"]] == ["forward", "backward"]


def test_timelines(compiled: Compiled, capsys: pytest.CaptureFixture[str]) -> None:
    picture, trace = compiled.folder / "memory.png", compiled.folder / "memory.json"
    status, out, err = run_here(
        capsys, "explain", compiled.file, "--timeline", picture, trace, "--before", compiled.file
    )
    assert (status, out, err) == (0, "", "")
    assert picture.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    report = read_artifact(compiled.file).manifest.report
    most = max(e["args"]["bytes"] for e in events if e["name"] == "bytes allocated")
    assert most == report["peak_bytes_predicted"]
    assert {e["pid"] for e in events} == {1, 2}
    status, _, err = run_here(capsys, "explain", compiled.file, "--timeline", compiled.folder / "memory.xyz")
    assert status == 1
    assert "Format 'xyz' is not supported" in err


def test_altered_file_is_refused(compiled: Compiled, capsys: pytest.CaptureFixture[str]) -> None:
    altered = compiled.folder / "altered.vmfb"
    data = bytearray(compiled.file.read_bytes())
    data[len(data) // 2] ^= 1
    altered.write_bytes(data)
    status, out, err = run_here(capsys, "explain", altered)
    assert (status, out) == (1, "")
    assert "altered.vmfb: altered" in err


def test_compile_with_keyword_arguments_and_without_cache(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(compiled.folder)
    monkeypatch.setenv("RETROGRAD_CACHE_DIR", str(tmp_path / "cache"))
    line = ["compile", "cli_networks.py:scaled", "-o", tmp_path / "scaled.vmfb", "--partition", "default"]
    status, out, err = run_here(capsys, *line, "--no-cache", "--verify")
    assert status == 0, err
    assert not (tmp_path / "cache").exists()
    assert "default" in out
    manifest = read_artifact(tmp_path / "scaled.vmfb").manifest
    assert [a.name for a in manifest.function("forward").arguments] == ["args[0]", "kwargs['scale']"]


def test_model_that_cannot_be_captured(compiled: Compiled, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "branch.vmfb"
    status, out, err = run_here(capsys, "compile", f"{compiled.folder / 'cli_networks.py'}:branch", "-o", file)
    assert (status, out) == (1, "")
    assert "retrograd: error: capture: data-dependent" in err
    assert "cli_networks.py" in err
    assert "remedy:" in err
    assert "Traceback" not in err
    assert not file.exists()


def find_children(pid: int) -> dict[int, str]:
    """The running children of a process and their command lines."""
    children = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # The name in parentheses may hold spaces; the parent is the second field behind it.
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid:
                children[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue
    return children


@pytest.mark.long
def test_interrupt_leaves_no_child_and_no_file(compiled: Compiled, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "retrograd.tools.cli", "compile", "cli_networks:mlp", "--no-cache"]
    process = subprocess.Popen(
        [*command, "-o", str(tmp_path / "never.vmfb")],
        cwd=compiled.folder,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    child = None
    while child is None and process.poll() is None:
        tools = [pid for pid, line in find_children(process.pid).items() if "retrograd.tools.lower" in line]
        child = tools[0] if tools else None
        time.sleep(0.005)
    assert child is not None, "the lowering was never seen"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "retrograd: error: interrupted"
    assert not Path(f"/proc/{child}").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(("never", ".never", "retrograd"))] == []
