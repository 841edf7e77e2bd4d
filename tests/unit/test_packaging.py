# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the package says of itself: its folders, its pins, its licence, its public names."""

import ast
import importlib
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import retrograd

ROOT = Path(__file__).parents[2]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Folders at the top that have Python files and do not belong to the installed package.
OUTSIDE = {"benchmarks", "build", "dist", "docs", "examples", "tests"}
HEADER = (
    "# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.\n"
    "# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception\n"
)


def top_folders(*, outside: bool) -> list[Path]:
    return [
        folder
        for folder in sorted(ROOT.iterdir())
        if folder.is_dir() and not folder.name.startswith(".") and (folder.name in OUTSIDE) == outside
    ]


def test_every_folder_with_sources_is_packaged() -> None:
    folders = {file.parent.relative_to(ROOT).parts for top in top_folders(outside=False) for file in top.rglob("*.py")}
    names = {".".join(parts if parts[0] == "retrograd" else ("retrograd", *parts)) for parts in folders}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == names


def test_every_packaged_folder_is_a_package() -> None:
    missing = [
        str(file.parent)
        for top in top_folders(outside=False)
        for file in top.rglob("*.py")
        if not (file.parent / "__init__.py").exists()
    ]
    assert missing == []


def test_mapped_folders_lie_where_their_names_say() -> None:
    assert PYPROJECT["tool"]["setuptools"]["package-dir"] == {
        name: name.removeprefix("retrograd.")
        for name in PYPROJECT["tool"]["setuptools"]["packages"]
        if name.count(".") <= 1 and name != "retrograd.contract"
    }


def test_every_folder_of_tests_has_its_mark() -> None:
    folders = {file.parent.relative_to(ROOT / "tests").parts[0] for file in (ROOT / "tests").rglob("test_*.py")}
    marks = {mark.partition(":")[0] for mark in PYPROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    assert marks == folders | {"long", "long_cases(*names)", "short_cases(*names)", "whole_heap"}


def test_a_test_is_marked_with_its_folder(request: pytest.FixtureRequest) -> None:
    assert [mark.name for mark in request.node.iter_markers()] == ["unit"]


def test_sources_start_with_the_licence() -> None:
    sources = [
        file
        for top in [*top_folders(outside=False), *(ROOT / name for name in ("benchmarks", "docs", "examples", "tests"))]
        for file in top.rglob("*.py")
    ]
    assert [str(file) for file in sources if not file.read_text(encoding="utf-8").startswith(HEADER)] == []
    assert len(sources) > 10


def test_dependencies_agree_with_the_lock() -> None:
    lock = dict(
        line.split("==")
        for file in ("requirements-dev.txt", "requirements-models.txt")
        for line in (ROOT / file).read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    )
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *extras["dev"], *extras["examples"], *extras["models"]]
    required += PYPROJECT["build-system"]["requires"]
    for requirement in map(Requirement, required):
        assert requirement.name in lock, f"{requirement.name} is not pinned"
        assert lock[requirement.name] in requirement.specifier, f"pyproject.toml asks for {requirement}"


def test_iree_compiler_and_runtime_have_one_version() -> None:
    pins = dict(requirement.split("==") for requirement in PYPROJECT["project"]["dependencies"] if "==" in requirement)
    assert pins["iree-base-compiler"] == pins["iree-base-runtime"]


def test_version_is_the_installed_one() -> None:
    assert retrograd.__version__ == metadata.version("retrograd") == PYPROJECT["project"]["version"]


def test_unknown_public_name() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'compile_forward'"):
        retrograd.__getattr__("compile_forward")


def test_public_names_are_listed() -> None:
    assert set(retrograd.__all__) == {*retrograd._EXPORTS, "__version__"}
    assert set(retrograd.__all__) <= set(dir(retrograd))


@pytest.mark.parametrize("name", sorted(retrograd._EXPORTS))
def test_public_name_loads(name: str) -> None:
    exported = getattr(retrograd, name)
    assert exported is getattr(importlib.import_module(retrograd._EXPORTS[name]), name)
    # An export that names a module where it is only re-exported would hide where it is defined.
    assert exported.__module__ == retrograd._EXPORTS[name]


@pytest.mark.short_cases("MiscompiledWarning")
@pytest.mark.parametrize("name", ["MiscompiledWarning", "EagerIslandWarning"])
def test_warnings_load_before_all_else(name: str) -> None:
    """As for a filter at the top of a program: parts of torch that import each other have one order that works. And
    neither they nor what compiles draw random numbers."""
    code = f"import random, retrograd; before = random.getstate(); retrograd.{name}"
    code += "; retrograd.compile_backward, retrograd.enable; assert random.getstate() == before"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_loading_a_file_imports_nothing_that_compiles() -> None:
    """Frontend, pipelines and what they need of torch take seconds to import."""
    code = "import sys, retrograd; retrograd.load; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    compiling = ("retrograd.frontend", "retrograd.pipelines", "retrograd.dialects", "torch_mlir", "iree.compiler")
    assert "retrograd.runtime.steps.bridge" in found
    assert [name for name in found if name.startswith(compiling)] == []


def test_type_checkers_see_the_lazy_names() -> None:
    tree = ast.parse((ROOT / "retrograd/__init__.py").read_text(encoding="utf-8"))
    guard = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in guard.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == retrograd._EXPORTS


@pytest.mark.parametrize("script", ["retrograd", "retrograd-opt"])
def test_console_scripts_resolve(script: str) -> None:
    (entry,) = metadata.entry_points(group="console_scripts", name=script)
    assert callable(entry.load())


def test_dynamo_backend_resolves() -> None:
    (entry,) = metadata.entry_points(group="torch_dynamo_backends", name="retrograd")
    assert callable(entry.load())
