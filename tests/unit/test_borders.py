# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The borders between folders: who may import what."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
# `retrograd` is the public face, but for retrograd/contract: the data that all parts share.
FOLDERS = frozenset({"dialects", "frontend", "pipelines", "retrograd", "runtime", "tools"})
CONTRACT = "contract"


@dataclass(frozen=True)
class Border:
    """What the files of a folder may import: our own folders (and the contract, which all may), and other projects'
    modules with all below them."""

    own: frozenset[str]
    others: frozenset[str] = frozenset()


def border(*own: str, others: str = "") -> Border:
    return Border(frozenset(own), frozenset(others.split()))


# The longest path that a file lies under decides. iree.compiler is let through where nothing else is imported: in a
# program that is only ever spawned.
BORDERS = {
    "retrograd/contract": border(),
    "dialects": border("dialects"),
    "dialects/ir.py": border("dialects", others="torch_mlir"),
    "pipelines": border("dialects", "pipelines", others="numpy ortools"),
    "pipelines/kernels": border("dialects", "pipelines", others="platformdirs"),
    "pipelines/kernels/source": border(others="triton"),
    "pipelines/stream": border("pipelines", others="iree.compiler"),
    "frontend": border("dialects", "frontend", others="numpy sympy torch torch_mlir.extras torch_mlir.fx"),
    "runtime": border("runtime", others="filelock iree.runtime matplotlib numpy platformdirs rich torch"),
    "retrograd": border(*FOLDERS, others="numpy torch"),
    "tools": border(*FOLDERS, others="iree.runtime numpy rich torch"),
    "tools/opt.py": border("dialects", "pipelines"),
    "tools/lower.py": border("tools"),
    "tools/lowering_server.py": border("dialects", "pipelines", "tools"),
    "tools/ptx.py": border("pipelines", others="triton"),
    "tools/iree_compile.py": border("pipelines", others="iree.compiler"),
    "tools/iree_compile_server.py": border("pipelines", "tools"),
}
# The distribution that brings each module named above.
DISTRIBUTIONS = {"iree.compiler": "iree-base-compiler", "iree.runtime": "iree-base-runtime", "torch_mlir": "torch-mlir"}


def find_border(path: PurePosixPath) -> Border:
    candidates = [candidate for candidate in map(str, (path, *path.parents)) if candidate in BORDERS]
    return BORDERS[candidates[0]]


def module_of(path: PurePosixPath) -> str:
    """The dotted name that a file has in the package: `frontend/doors/capture.py` is
    `retrograd.frontend.doors.capture`."""
    parts = [part for part in path.with_suffix("").parts if part != "__init__"]
    return ".".join(parts if parts[0] == "retrograd" else ["retrograd", *parts])


@cache
def find_imports(source: str, path: PurePosixPath) -> tuple[tuple[int, str], ...]:
    """Every module or module attribute that a source imports, anywhere in it, as (line, absolute dotted name)."""
    return tuple(_walk_imports(source, path))


def _walk_imports(source: str, path: PurePosixPath) -> Iterator[tuple[int, str]]:
    package = module_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{stem}.{alias.name}") for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).split(".")[-1] in {"import_module", "__import__"}
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, str(node.args[0].value)


def is_allowed(name: str, allowed: Border) -> bool:
    parts = name.split(".")
    if parts[0] == "retrograd":
        folder = parts[1] if len(parts) > 1 and parts[1] in {*FOLDERS, CONTRACT} else "retrograd"
        return folder == CONTRACT or folder in allowed.own
    if parts[0] in sys.stdlib_module_names:
        return True
    return any(name == module or name.startswith(f"{module}.") for module in allowed.others)


def find_violations(source: str, path: PurePosixPath) -> list[str]:
    allowed = find_border(path)
    return [
        f"{path}:{line}: must not import {name}; allowed: retrograd's {sorted(allowed.own)}, {sorted(allowed.others)}"
        for line, name in find_imports(source, path)
        if not is_allowed(name, allowed)
    ]


def source_files() -> list[PurePosixPath]:
    return [
        PurePosixPath(file.relative_to(ROOT)) for folder in sorted(FOLDERS) for file in (ROOT / folder).rglob("*.py")
    ]


@pytest.mark.parametrize("path", source_files(), ids=str)
def test_file_keeps_its_borders(path: PurePosixPath) -> None:
    assert find_violations((ROOT / path).read_text(encoding="utf-8"), path) == []


def find_imported_files(sources: Mapping[PurePosixPath, str]) -> dict[str, set[str]]:
    """The modules that each module imports of those given, wherever in it: in functions and for types alone too."""
    known = {module_of(path) for path in sources}
    found: dict[str, set[str]] = {}
    for path, source in sources.items():
        names = [name.split(".") for _, name in find_imports(source, path)]
        prefixes = [[".".join(parts[:end]) for end in range(len(parts), 0, -1)] for parts in names]
        imported = {next((name for name in longest_first if name in known), "") for longest_first in prefixes}
        found[module_of(path)] = imported - {"", module_of(path)}
    return found


def find_circle(sources: Mapping[PurePosixPath, str]) -> list[str]:
    """Modules of which each is imported by the next, the last of which is the first; none where there is no circle."""
    try:
        TopologicalSorter(find_imported_files(sources)).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def test_no_files_import_each_other() -> None:
    assert find_circle({path: (ROOT / path).read_text(encoding="utf-8") for path in source_files()}) == []


@pytest.mark.parametrize(
    "second",
    [
        "from retrograd.frontend import first",
        "if TYPE_CHECKING:\n    from retrograd.frontend.first import First",
        "def f():\n    from .first import First",
        "importlib.import_module('retrograd.frontend.first')",
        "from retrograd.frontend.third import Third",
    ],
)
def test_planted_circle_is_found(second: str) -> None:
    names = {
        "first": "from retrograd.frontend.second import Second",
        "second": second,
        "third": "import retrograd.frontend.first",
    }
    sources = {PurePosixPath(f"frontend/{name}.py"): source for name, source in names.items()}
    assert {"retrograd.frontend.first", "retrograd.frontend.second"} <= set(find_circle(sources))
    assert find_circle({**sources, PurePosixPath("frontend/second.py"): "import torch"}) == []


def test_passes_over_stream_are_for_their_own_program() -> None:
    users = {
        str(path)
        for path in source_files()
        for _, name in find_imports((ROOT / path).read_text(encoding="utf-8"), path)
        if name.startswith("retrograd.pipelines.stream.")
    }
    assert {user for user in users if not user.startswith("pipelines/stream/")} == {"tools/iree_compile.py"}


def test_every_folder_has_sources() -> None:
    assert {path.parts[0] for path in source_files()} == FOLDERS
    assert any(path.parts[:2] == ("retrograd", CONTRACT) for path in source_files())


@pytest.mark.parametrize(
    ("path", "source", "name"),
    [
        ("dialects/bwd.py", "import torch", "torch"),
        ("dialects/bwd.py", "from torch_mlir import ir", "torch_mlir.ir"),
        ("dialects/bwd.py", "from retrograd.pipelines.infra import registry", "retrograd.pipelines.infra.registry"),
        ("dialects/ir.py", "import torch.nn", "torch.nn"),
        ("retrograd/contract/sizes.py", "import numpy", "numpy"),
        ("retrograd/contract/sizes.py", "import sympy", "sympy"),
        ("retrograd/contract/tensors.py", "from retrograd.dialects import ir", "retrograd.dialects.ir"),
        ("retrograd/contract/tensors.py", "from retrograd import api", "retrograd.api"),
        ("pipelines/infra/runner.py", "def f():\n    import torch", "torch"),
        ("pipelines/infra/runner.py", "from retrograd import frontend", "retrograd.frontend"),
        ("pipelines/infra/runner.py", "from retrograd import compile_backward", "retrograd.compile_backward"),
        ("pipelines/analysis/cut.py", "from ...runtime import cache", "retrograd.runtime.cache"),
        ("pipelines/analysis/__init__.py", "from ...runtime.cache import Cache", "retrograd.runtime.cache.Cache"),
        ("pipelines/devices/targets.py", "import iree.compiler as c", "iree.compiler"),
        ("pipelines/devices/targets.py", "importlib.import_module('torch.fx')", "torch.fx"),
        ("pipelines/devices/targets.py", "import networkx", "networkx"),
        ("frontend/doors/capture.py", "from torch_mlir import ir", "torch_mlir.ir"),
        ("frontend/doors/capture.py", "from iree import runtime", "iree.runtime"),
        (
            "frontend/doors/capture.py",
            "if TYPE_CHECKING:\n    from retrograd.runtime import cache",
            "retrograd.runtime.cache",
        ),
        ("runtime/programs/executor.py", "from retrograd.dialects import bwd", "retrograd.dialects.bwd"),
        ("runtime/programs/executor.py", "from iree import compiler", "iree.compiler"),
        ("retrograd/api.py", "import iree.compiler.tools", "iree.compiler.tools"),
        ("tools/cli.py", "import torch_mlir.fx", "torch_mlir.fx"),
        ("pipelines/stream/passes.py", "from retrograd.dialects import ir", "retrograd.dialects.ir"),
        ("tools/iree_compile.py", "import torch", "torch"),
        ("tools/opt.py", "import torch", "torch"),
        ("tools/opt.py", "from retrograd.api import load", "retrograd.api.load"),
    ],
)
def test_planted_violation_is_found(path: str, source: str, name: str) -> None:
    violations = find_violations(f"import os\n{source}\n", PurePosixPath(path))
    assert len(violations) == 1
    assert f"must not import {name};" in violations[0]
    assert violations[0].startswith(f"{path}:{source.count(chr(10)) + 2}:")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("dialects/ir.py", "from torch_mlir import ir, passmanager"),
        ("retrograd/contract/tensors.py", "import ast\nfrom retrograd.contract.sizes import Size"),
        ("dialects/bwd.py", "from retrograd.contract.roles import ARGUMENT_ROLES"),
        ("runtime/artifact.py", "from retrograd.contract import roles"),
        ("dialects/bwd.py", "from retrograd.dialects.ir import ir\nfrom . import ir"),
        (
            "pipelines/transforms/torch/bwd_partition.py",
            "from retrograd.dialects import bwd\nfrom ..passes import ModulePass",
        ),
        (
            "frontend/preparation/importer.py",
            "import torch\nfrom torch_mlir import fx\nfrom torch_mlir.extras import fx_importer",
        ),
        ("runtime/programs/executor.py", "import torch\nfrom iree import runtime\nimport iree.runtime.flags"),
        ("retrograd/api.py", "import torch\nfrom retrograd.runtime import cache\nfrom retrograd import frontend"),
        ("tools/cli.py", "from retrograd import compile_backward\nimport rich.table"),
        ("pipelines/stream/passes.py", "from iree.compiler import ir"),
        ("tools/opt.py", "import sys\nfrom retrograd.pipelines.infra import runner"),
    ],
)
def test_legal_imports_pass(path: str, source: str) -> None:
    assert find_violations(source, PurePosixPath(path)) == []


def test_imported_projects_are_declared_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {requirement.split("=")[0].split(">")[0] for requirement in project["dependencies"]}
    imported = {module for allowed in BORDERS.values() for module in allowed.others}
    needed = {DISTRIBUTIONS.get(module, DISTRIBUTIONS.get(module.split(".")[0], module)) for module in imported}
    extras = {name.split(">")[0] for extra in ("cuda", "plot") for name in project["optional-dependencies"][extra]}
    assert needed == declared | extras


TORCH_FREE = [
    "retrograd",
    *(
        module_of(path)
        for path in source_files()
        if path.parts[0] in {"dialects", "pipelines"} or path.parts[1] == CONTRACT or str(path) == "tools/opt.py"
    ),
]


def test_opt_and_all_below_it_never_load_torch() -> None:
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    result = subprocess.run([sys.executable, "-c", program, *TORCH_FREE], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert {"retrograd.dialects.bwd", "retrograd.pipelines.infra.registry", "retrograd.tools.opt"} <= set(TORCH_FREE)


def test_lowering_loads_neither_torch_nor_numpy() -> None:
    program = "import sys, retrograd.tools.lower\nassert sys.modules['numpy'] is None and 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr


def test_without_a_budget_no_solver_is_loaded() -> None:
    """OR-Tools' interface to CP-SAT brings pandas: it would take half of the time of a start."""
    program = (
        "import sys, retrograd.pipelines.transforms.torch.bwd_partition\n"
        "assert not {'pandas', 'ortools.sat'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr


def test_only_tools_change_where_python_looks_for_modules() -> None:
    """A line for a trial, left in a library, would have its user import whatever lies in that folder."""
    texts = [(p, p.read_text(encoding="utf-8")) for f in FOLDERS - {"tools"} for p in sorted((ROOT / f).rglob("*.py"))]
    assert len(texts) > 500
    found = [(path, node.lineno) for path, text in texts for node in _find_attributes(text, "sys", "path")]
    assert not found


def _find_attributes(text: str, owner: str, name: str) -> list[ast.Attribute]:
    # To parse all files takes seconds.
    nodes = ast.walk(ast.parse(text)) if f"{owner}.{name}" in text else ()
    return [
        node
        for node in nodes
        if isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id == owner
    ]
