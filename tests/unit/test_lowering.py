# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Lowering to linalg in a process of its own: what comes out, and how it fails."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from retrograd.pipelines.infra.errors import CompileError
from retrograd.pipelines.toolchain import lowering, lowering_steps
from retrograd.pipelines.toolchain.lowering import first_error, keep_for_replay, lower_to_linalg
from retrograd.pipelines.toolchain.subprocesses import ToolResult
from retrograd.pipelines.toolchain.warm_tool import WarmTool

TYPE = "!torch.vtensor<[4],f32>"
MODULE = f"""
func.func @forward(%x: {TYPE} {{bwd.role = "input", bwd.name = "x"}})
    -> ({TYPE} {{bwd.role = "output", bwd.name = "out"}}) {{
  %0 = OP loc("net.py":12:3)
  return %0 : {TYPE}
}}
"""
GOOD = MODULE.replace("OP", f"torch.aten.exp %x : {TYPE} -> {TYPE}")
# No op of the torch dialect has this name, and no decomposition either.
BAD = MODULE.replace("OP", f'torch.operator "torch.aten.erfcx"(%x) : ({TYPE}) -> {TYPE}')


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder that temporary files go to."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def run_replay(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a replay command as a user of this environment does."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path}
    return subprocess.run(
        shlex.split(command), capture_output=True, text=True, env=environment, cwd=folder, check=False
    )


def test_a_function_and_its_twin_on_linalg(scratch: Path) -> None:
    linalg = lower_to_linalg(GOOD.encode())
    assert "func.func @forward(" in linalg
    assert "func.func @forward_into(" in linalg
    assert "math.exp" in linalg
    assert "torch." not in linalg
    assert 'loc("net.py":12:3)' in linalg
    assert list(scratch.iterdir()) == []


def test_a_twin_alone() -> None:
    assert re.findall(r"func.func @(\w+)", lower_to_linalg(GOOD.encode(), twins_alone=True)) == ["forward_into"]


def test_no_module_is_looked_for_twice(tmp_path: Path) -> None:
    """The bindings look for a dialect's module again at each op, as long as it cannot be imported: for 15,000 of them
    that took ten times as long as the passes."""
    source = tmp_path / "staged.mlir"
    source.write_text(
        MODULE.replace(
            "OP",
            f"""torch.aten.exp %x : {TYPE} -> {TYPE}
  %axis = torch.constant.int 0
  %none = torch.constant.none
  %1 = torch.aten.cumsum %0, %axis, %none : {TYPE}, !torch.int, !torch.none -> {TYPE}
""",
        ).replace("return %0", "return %1")
    )
    script = f"""
import collections, runpy, sys
looked_for = collections.Counter()
class Finder:
    def find_spec(self, name, path, target=None):
        looked_for[name] += 1
sys.meta_path.insert(0, Finder())
sys.argv = ["lower", {str(source)!r}, "-o", {str(tmp_path / "linalg.mlir")!r},
            "--pass-pipeline={lowering_steps.lowering_pipeline()}", "--allow-unregistered-dialect"]
try:
    runpy.run_module("retrograd.tools.lower", run_name="__main__")
except SystemExit as end:
    assert end.code == 0, end.code
print(*[name for name, count in looked_for.items() if count > 1])
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout.split()) == (0, []), found.stderr
    assert "tm_tensor.scan" in (tmp_path / "linalg.mlir").read_text()


def test_the_server_warms_up_with_all_that_a_cpu_is_lowered_with() -> None:
    """And has one thread, or what another holds would be locked in each child."""
    script = """
import os
from retrograd.tools.lowering_server import warm_up
from retrograd.dialects.context import make_context
assert warm_up()
context = make_context()
print(*os.listdir("/proc/self/task"))
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert len(found.stdout.split()) == 1


def test_without_locations(scratch: Path) -> None:
    assert "loc(" not in lower_to_linalg(GOOD.encode(), locations=False)


def test_an_op_without_lowering_is_named_with_its_source_line(scratch: Path) -> None:
    with pytest.raises(CompileError) as caught:
        lower_to_linalg(BAD.encode())
    error = caught.value
    assert error.phase == "lower"
    assert error.message.startswith("net.py:12:3: error: ")
    assert "torch.aten.erfcx" in error.message
    assert error.message in error.log
    assert str(error) == f"lower: {error.message}\n  replay: {error.replay}"
    # What is left is what the command reads, and the command says the same.
    (kept,) = scratch.iterdir()
    assert str(kept) in error.replay
    assert kept.read_text(encoding="utf-8") == BAD
    replayed = run_replay(error.replay, scratch)
    assert replayed.returncode == 1
    assert error.message in replayed.stderr


def test_an_error_in_the_module_itself_is_at_its_place_in_the_file_that_is_kept(scratch: Path) -> None:
    with pytest.raises(CompileError) as caught:
        lower_to_linalg(b"func.func @f() {\n  torch.no_such_op\n  return\n}\n")
    (kept,) = scratch.iterdir()
    assert caught.value.message.startswith(f"{kept}:2:3: error: ")
    assert str(kept) in caught.value.log


def test_the_same_failure_leaves_one_file(scratch: Path) -> None:
    for text in ("one", "two", "one"):
        source = scratch / "staged.mlir"
        source.write_text(text, encoding="utf-8")
        keep_for_replay(source)
    source.unlink()
    assert sorted(file.read_text(encoding="utf-8") for file in scratch.iterdir()) == ["one", "two"]


@pytest.mark.parametrize("name", ["SEGV", "ABRT"])
def test_a_crash_is_an_error_that_names_the_signal(scratch: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    worker = scratch / "worker"
    worker.write_text(f"#!/bin/sh\necho 'Assertion failed' >&2\nkill -{name} $$\n", encoding="utf-8")
    worker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(worker))
    monkeypatch.setattr(lowering, "LOWER", WarmTool("retrograd.tools.lower", server="retrograd.tools.lowering_server"))
    with pytest.raises(CompileError) as caught:
        lower_to_linalg(GOOD.encode())
    assert caught.value.message == f"the tool was ended by SIG{name}: Assertion failed"
    assert re.fullmatch(r"retrograd-replay-\w+\.mlir", next(f.name for f in scratch.iterdir() if f != worker))
    assert len(list(scratch.iterdir())) == 2


@pytest.mark.parametrize(
    ("variable", "value", "limit"),
    [("RETROGRAD_TOOL_SECONDS", "0.001", "0.001 s"), ("RETROGRAD_TOOL_MEMORY", "64MiB", "64 MiB of memory")],
)
def test_a_lowering_that_comes_to_a_limit(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, limit: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(CompileError) as caught:
        lower_to_linalg(GOOD.encode())
    remedy = f"set {variable} to allow more; or find the op with retrograd bisect"
    assert caught.value.message == f"the tool was ended at its limit of {limit}; {remedy}"
    monkeypatch.delenv(variable)
    assert run_replay(caught.value.replay, scratch).returncode == 0


def test_an_interrupt_leaves_no_file(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> ToolResult:
        raise KeyboardInterrupt

    monkeypatch.setattr(lowering.LOWER, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        lower_to_linalg(GOOD.encode())
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("returncode", "stderr", "message"),
    [
        (1, "note\na.py:1:2: warning: w\na.py:3:4: error: one\na.py:5:6: error: two\n", "a.py:3:4: error: one"),
        (1, "error: somewhere\n", "error: somewhere"),
        (1, "retrograd-opt: error: no such file\n", "retrograd-opt: error: no such file"),
        (2, "Traceback\nValueError: bad\n", "the tool gave exit status 2: ValueError: bad"),
        (3, "", "the tool gave exit status 3: no message"),
        (-6, "", "the tool was ended by SIGABRT: no message"),
        (-11, "a.py:3:4: error: one\nStack dump\n", "the tool was ended by SIGSEGV: a.py:3:4: error: one"),
    ],
)
def test_first_error(returncode: int, stderr: str, message: str) -> None:
    assert first_error(ToolResult(returncode, stderr)) == message
