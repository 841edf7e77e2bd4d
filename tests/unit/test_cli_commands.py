# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The command line of ``retrograd``: usage, errors, factories, the doctor and the cache. Nothing is compiled here."""

import argparse
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NoReturn

import pytest

from retrograd.frontend.python.source_locations import CaptureError
from retrograd.pipelines.toolchain.subprocesses import ToolResult
from retrograd.runtime.artifact import ArtifactError
from retrograd.runtime.cache import Cache, cache_key
from retrograd.runtime.programs.devices import DeviceInfo
from retrograd.tools import cli, compile_command, console, doctor_command
from retrograd.tools.console import CommandError, UsageError
from retrograd.tools.doctor_command import MISSING, OK, OPTIONAL, Finding, is_met
from retrograd.tools.factory import Factory, make_example, read_example


@pytest.fixture(autouse=True)
def keep_sys_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each test in a folder of its own, with what it adds to sys.path taken back."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)


def install_command(monkeypatch: pytest.MonkeyPatch, execute: object) -> None:
    """Let `retrograd cache` call ``execute``."""
    module = ModuleType("retrograd.tools.cache_command")
    module.execute = execute  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def raising(error: BaseException) -> object:
    def execute(arguments: argparse.Namespace) -> NoReturn:
        raise error

    return execute


def test_help_loads_no_package() -> None:
    program = (
        "import sys\n"
        "from retrograd.tools.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'rich', 'iree', 'torch_mlir', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert all(command in result.stdout for command in ("compile", "explain", "doctor", "cache"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"retrograd {metadata.version('retrograd')}\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "required: command"),
        ("frobnicate", "invalid choice: 'frobnicate'"),
        ("compile m:f", "required: -o"),
        ("compile m:f -o x.vmfb --partition most", "invalid choice: 'most'"),
        ("compile m:f -o x.vmfb --verif", "unrecognized arguments: --verif"),
        ("cache empty", "invalid choice: 'empty'"),
    ],
)
def test_usage_error(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(line.split())
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("compile model -o x.vmfb", 2, "'model' names no factory: give package.module:factory"),
        ("bisect out.vmfb", 2, "retrograd bisect FACTORY --artifact out.vmfb"),
        ("compile a-b:f -o x.vmfb", 2, "'a-b' is neither the name of a module nor a file"),
        ("compile m:f -o x.vmfb --emit-mlir linal:x.mlir", 2, "STAGE one of imported, partitioned, scheduled, linalg"),
        ("compile m:f -o x.vmfb --emit-mlir linalg:a linalg:b", 2, "given twice for the stage 'linalg'"),
        ("compile m:f -o x.vmfb --partition budget", 2, "--memory-budget: unreadable memory budget None; give bytes"),
        ("compile m:f -o x.vmfb --partition budget --memory-budget 0", 2, "memory budget '0' is not above zero"),
        ("compile m:f -o x.vmfb --memory-budget 64MiB", 2, "--memory-budget is for --partition budget, found"),
        ("compile m:f -o x.vmfb --target cpuu", 1, "target 'cpuu' is not one of cpu"),
        ("compile m:f -o no/x.vmfb", 1, "no/x.vmfb: there is no folder no; make it first"),
        # A budget that devices alone know.
        ("compile m:f -o no/x.vmfb --partition budget --memory-budget free", 1, "no/x.vmfb: there is no folder no"),
        ("compile m:f -o .", 1, ".: is a folder; name a file in it"),
        ("compile m:f -o x.vmfb --emit-mlir linalg:no/x.mlir", 1, "no/x.mlir: there is no folder no"),
        ("explain no.vmfb", 1, "no.vmfb: no such file"),
        ("explain no.vmfb --before x.vmfb", 2, "--before is for --timeline: say which pictures or traces to write"),
    ],
)
def test_error(line: str, status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("retrograd: error: ")
    assert message in err
    assert "Traceback" not in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (CommandError("no such thing"), 1, "no such thing"),
        (CaptureError("no such op", "leave it out"), 1, "capture: no such op"),
        (ArtifactError("a.vmfb: truncated"), 1, "a.vmfb: truncated"),
        (UsageError("what?"), 2, "what?"),
        (FileNotFoundError(2, "No such file or directory", "a.npy"), 1, "a.npy: No such file or directory"),
        (OSError("disk on fire"), 1, "disk on fire"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ModuleNotFoundError("No module named 'rich'", name="rich"), 1, "the package of rich is not installed"),
    ],
)
def test_status_of_error(
    error: BaseException,
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install_command(monkeypatch, raising(error))
    assert cli.main(["cache"]) == status
    assert capsys.readouterr().err.startswith(f"retrograd: error: {message}")


def test_an_error_of_this_program_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (ZeroDivisionError, ValueError, RuntimeError):
        install_command(monkeypatch, raising(error("by zero")))
        with pytest.raises(error):
            cli.main(["cache"])
    install_command(monkeypatch, raising(ModuleNotFoundError("x", name="retrograd.gone")))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["cache"])


def test_closed_pipe_is_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "retrograd.tools.cli", "cache"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait() == 1


def test_progress_is_one_line_for_each_phase(capsys: pytest.CaptureFixture[str]) -> None:
    with console.show_progress() as announce:
        announce("capture")
        announce("import")
    assert capsys.readouterr().err == "retrograd: capture\nretrograd: import\n"


def test_progress_on_a_terminal_shows_the_phase(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with console.show_progress() as announce:
        announce("capture")
    out, err = capsys.readouterr()
    assert "capture" in err
    assert out == ""


def test_table_keeps_brackets_and_long_names(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_table(("name", "norm"), [("args[0]" + "x" * 120, "1")], "title", right=("norm",))
    assert "args[0]" + "x" * 120 in capsys.readouterr().out


def test_factory_of_a_module_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "cli_sample_module.py").write_text("class A:\n    make = lambda: (abs, [1])\n", encoding="utf-8")
    example = make_example(Factory.parse("cli_sample_module:A.make"))
    assert (example.model, example.args, example.kwargs) == (abs, [1], {})


def test_factory_of_a_file_imports_its_neighbours(tmp_path: Path) -> None:
    folder = tmp_path / "deep"
    folder.mkdir()
    (folder / "cli_sample_neighbour.py").write_text("value = 7\n", encoding="utf-8")
    # As a module of this name it would never be found: torch is loaded already.
    source = (
        "from __future__ import annotations\nimport dataclasses, cli_sample_neighbour as n\n"
        "@dataclasses.dataclass\nclass D:\n    x: int\n"
        "def make():\n    return abs, (D(n.value).x,), {'k': 1}\n"
    )
    (folder / "torch.py").write_text(source, encoding="utf-8")
    example = make_example(Factory.parse("deep/torch.py:make"))
    assert (example.args, example.kwargs) == ((7,), {"k": 1})


BROKEN = """\
import numpy as np
number = 3
def fail():
    return helper()
def helper():
    return np.zeros(3).reshape(2, 2)
"""


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("cli_sample_absent.x:f", ["no module 'cli_sample_absent'", "run from the folder that holds it"]),
        ("absent.py:f", ["absent.py: no such file"]),
        ("broken.py:f", ["has no 'f'", "broken.py"]),
        ("broken.py:number", ["broken.py:number is int, not a function"]),
        ("broken.py:fail", ["broken.py:fail raised ValueError: cannot reshape", "line 6, in helper", "reshape(2, 2)"]),
        ("syntax.py:f", ["importing syntax.py raised", "SyntaxError", "line 1"]),
        ("needs.py:f", ["importing needs.py raised ModuleNotFoundError", "cli_sample_absent", "line 1, in <module>"]),
    ],
)
def test_factory_that_cannot_be_called(text: str, parts: list[str], tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN, encoding="utf-8")
    (tmp_path / "syntax.py").write_text("def f(:\n", encoding="utf-8")
    (tmp_path / "needs.py").write_text("import cli_sample_absent\n", encoding="utf-8")
    with pytest.raises(CommandError) as caught:
        make_example(Factory.parse(text))
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (abs, "returned builtin_function_or_method: return (model, args)"),
        ((abs,), "returned a tuple of 1"),
        ((3, ()), "returned int for the model, which cannot be called"),
        ((abs, 3), "returned int for args"),
        ((abs, (), [1]), "returned list for kwargs"),
    ],
)
def test_factory_that_returns_something_else(made: object, message: str) -> None:
    with pytest.raises(CommandError, match=r"^m:f ") as caught:
        read_example(Factory("m", "f"), made)
    assert message in str(caught.value)


def test_emitted_stages() -> None:
    emitted = compile_command.read_emitted(["linalg:a:b.mlir", "imported:c.mlir"])
    assert emitted == {"linalg": Path("a:b.mlir"), "imported": Path("c.mlir")}
    assert compile_command.read_emitted([]) == {}


def test_cache_info_and_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RETROGRAD_CACHE_DIR", str(tmp_path / "cache"))
    Cache().put(cache_key({"a": "1"}), b"x" * 2000)
    assert cli.main(["cache"]) == 0
    info = capsys.readouterr().out
    assert f"folder:  {tmp_path / 'cache'}\nentries: 1\nsize:    2.0 KiB of at most 2.0 GiB\n" == info
    assert cli.main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == f"removed 1 entries, 2.0 KiB, from {tmp_path / 'cache'}\n"
    assert Cache().entries() == []


def test_doctor_finds_this_installation_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "ready to compile and run on CPU"
    for name in ("retrograd", "python", "torch", "torch-mlir", "iree-base-compiler", "iree-base-runtime"):
        assert any(line.split()[:2] == ["ok", name] for line in lines), name
    assert any(line.split()[:4] == ["ok", "device", "local-task", "default"] for line in lines)


def test_doctor_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is True
    states = {finding["name"]: finding["state"] for finding in data["findings"]}
    assert states["iree versions"] == states["iree-compile"] == states["cache"] == OK
    assert {"name", "state", "found", "remedy"} == set(data["findings"][0])


def test_doctor_gives_the_command_for_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(package: str) -> str:
        if package == "ortools":
            raise metadata.PackageNotFoundError(package)
        return "2.9.1" if package == "torch" else real(package)

    real = metadata.version
    monkeypatch.setattr(metadata, "version", version)
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "MISSING  ortools             not installed\n" in out
    assert "mend with: pip install ortools\n" in out
    assert "2.9.1, but retrograd needs torch<2.14,>=2.11\n" in out
    assert "mend with: pip install 'torch<2.14,>=2.11'\n" in out
    assert out.endswith("not ready: mend what is MISSING\n")


def test_doctor_of_a_package_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> NoReturn:
        raise ImportError("libstdc++.so.6: cannot open shared object file")

    monkeypatch.setattr(doctor_command, "importlib", SimpleNamespace(import_module=broken))
    finding = doctor_command.find_package("torch-mlir==20261001")
    assert finding.state == MISSING
    assert "cannot be loaded: libstdc++" in finding.found
    assert finding.remedy == "pip install torch-mlir==20261001 --force-reinstall"


def test_doctor_of_a_runtime_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "retrograd.runtime.programs.devices", None)
    (finding,) = doctor_command.find_devices()
    assert finding.state == MISSING
    assert finding.remedy == "pip install --force-reinstall iree-base-runtime"


def test_doctor_of_iree_packages_that_do_not_fit() -> None:
    finding = doctor_command.find_iree_match("3.13.0", "3.11.0")
    assert finding.state == MISSING
    assert finding.remedy == "pip install iree-base-runtime==3.13.0"
    assert doctor_command.find_iree_match("3.13.0", "3.12.0").state == OK


def test_doctor_of_a_compiler_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "retrograd.pipelines.toolchain.subprocesses.run_tool",
        lambda command, folder: ToolResult(127, "no libz\nmore\n"),
    )
    (finding,) = doctor_command.find_compiler()
    assert finding.state == MISSING
    assert finding.found.endswith("iree-compile does not start: no libz")


def test_doctor_of_an_absent_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> NoReturn:
        raise FileNotFoundError(f"{name} not found")

    monkeypatch.setattr("retrograd.pipelines.toolchain.executable.iree_tool", absent)
    (finding,) = doctor_command.find_compiler()
    remedy = "pip install --force-reinstall iree-base-compiler"
    assert finding == Finding("iree-compile", MISSING, "iree-compile not found", remedy)


def test_doctor_needs_the_cpu_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "Error creating driver: c/runtime/x.c:66: UNAVAILABLE; library not available; install it"
    listed = [DeviceInfo("cuda", "", "", message)]
    monkeypatch.setattr("retrograd.runtime.programs.devices.list_devices", lambda: listed)
    cuda, local = doctor_command.find_devices()
    assert cuda == Finding("device cuda", OPTIONAL, "library not available; install it")
    assert (local.name, local.state) == ("device local-task", MISSING)
    listed[:] = [DeviceInfo("local-task", "", "", "no threads")]
    (local,) = doctor_command.find_devices()
    assert (local.state, local.found) == (MISSING, "no threads")
    assert local.remedy is not None


def test_doctor_of_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A file where a folder should be refuses root, too.
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("RETROGRAD_CACHE_DIR", str(tmp_path / "file" / "cache"))
    finding = doctor_command.find_cache()
    assert finding.state == OPTIONAL
    assert finding.remedy == "export RETROGRAD_CACHE_DIR=/path/to/a/folder"


@pytest.mark.parametrize(
    ("version", "specifiers", "met"),
    [
        ("2.13.0+cpu", "<2.14,>=2.11", True),
        ("2.14.0", "<2.14,>=2.11", False),
        ("2.9.1", "<2.14,>=2.11", False),
        ("2.11", ">=2.11", True),
        ("20261001", "==20261001", True),
        ("3.13.1", "==3.13.0", False),
        ("3.13.0rc1", "==3.13.0", True),
        ("1.0", "", True),
    ],
)
def test_version_meets_requirement(version: str, specifiers: str, met: bool) -> None:
    assert is_met(version, specifiers) is met
