# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The wheel, built from a copy of the sources and used from a virtual environment of its own."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS: dict[str, str] = SETTINGS["tool"]["setuptools"]["package-dir"]


def run(*command: str | Path, cwd: Path) -> str:
    # PYTHONPATH could put this repository in front of the wheel.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel. A copy is built, because setuptools reuses build/lib and would ship files deleted since."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ["pyproject.toml", "LICENSE", "README.md"]:
        if (ROOT / file).exists():
            shutil.copy(ROOT / file, source)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source, cwd=source)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh venv that has the wheel, and this environment's packages for its dependencies."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=wheel.parent)
    interpreter = folder / "bin" / "python"
    run(
        *(sys.executable, "-m", "pip", "--python", interpreter, "install", "--no-deps", "--no-index", wheel),
        cwd=wheel.parent,
    )
    # A path added by a .pth file has its own .pth files left unread: this environment's editable install stays out.
    site = Path(run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return interpreter


def test_wheel_has_every_source(wheel: Path) -> None:
    expected = {
        f"{name.replace('.', '/')}/{file.relative_to(ROOT / folder).as_posix()}"
        for name, folder in FOLDERS.items()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert "retrograd/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_wheel_has_every_public_name_in_its_own_venv(python: Path, tmp_path: Path) -> None:
    program = (
        "import retrograd, retrograd.runtime as r; print(retrograd.__file__, r.__file__, retrograd.__version__)\n"
        "print(*(getattr(retrograd, name) for name in retrograd.__all__), sep='\\n')"
    )
    first, *names = run(python, "-c", program, cwd=tmp_path).splitlines()
    package, runtime, version = first.split()
    assert Path(package).is_relative_to(python.parents[1])
    assert Path(runtime).is_relative_to(python.parents[1])
    assert version == SETTINGS["project"]["version"]
    assert any("compile_backward" in name for name in names)


@pytest.mark.parametrize("script", ["retrograd", "retrograd-opt"])
def test_script_runs_from_its_own_venv(python: Path, script: str, tmp_path: Path) -> None:
    assert SETTINGS["project"]["version"] in run(python.parent / script, "--version", cwd=tmp_path)


def test_opt_passes_ir_through(python: Path, tmp_path: Path) -> None:
    (tmp_path / "in.mlir").write_text("func.func @nothing() {\n  return\n}\n", encoding="utf-8")
    assert "@nothing" in run(python.parent / "retrograd-opt", "in.mlir", cwd=tmp_path)
