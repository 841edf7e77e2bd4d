# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Pages: what they link to, and the files that they name, are there. Docstrings are sentences."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REGISTERED = {
    *re.findall(r"\"((?:bwd|convert)-[\w-]+)\":", (ROOT / "pipelines" / "infra" / "registry.py").read_text("utf-8")),
    *re.findall(r"\"(bwd-[\w-]+)\"", (ROOT / "pipelines" / "stream" / "passes.py").read_text("utf-8")),
}
PACKAGE = ("dialects", "frontend", "pipelines", "retrograd", "runtime", "tools")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
_FOLDERS = "benchmarks|dialects|docs|examples|frontend|pipelines|retrograd|runtime|tests|tools"
_PATH = re.compile(rf"(?<![\w/.])((?:{_FOLDERS})/[\w./-]*\.(?:py|md|mlir)\b)|`((?:{_FOLDERS})/[\w./-]*)`")
_NAME = re.compile(r"`([\w-]+\.py)`")
_MODULE = re.compile(r"(?<![\w.])((?:dialects|frontend|pipelines|runtime)(?:\.[a-z_]\w*)+)")
_PASS = re.compile(r"`((?:bwd|convert)-[a-z0-9-]+)`")
NAMES = {file.name for folder in _FOLDERS.split("|") for file in (ROOT / folder).rglob("*.py")}
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as they are linked to."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_there(name: str) -> bool:
    """Whether a dotted name is that of a module, or of what a module defines."""
    file = ROOT / f"{name.replace('.', '/')}.py"
    if file.exists() or file.with_suffix("").is_dir():
        return True
    defined = re.compile(rf"^(?:def|class) {file.stem}\b|^{file.stem}\b.* =", re.MULTILINE)
    module = file.parent.with_suffix(".py")
    return module.exists() and defined.search(module.read_text(encoding="utf-8")) is not None


def find_problems(page: Path) -> list[str]:
    """The links of a page that lead nowhere, and the files that it names and that there are none of."""
    text = page.read_text(encoding="utf-8")
    problems = [path for found in _PATH.findall(text) for path in found if not (ROOT / path).exists()]
    problems += [name for name in _NAME.findall(text) if name not in NAMES]
    problems += [name for name in _PASS.findall(text) if name not in REGISTERED]
    problems += [name for name in _MODULE.findall(text) if not is_there(name)]
    for link in _LINK.findall(text):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            problems.append(link)
    return problems


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_what_a_page_names_is_there(page: Path) -> None:
    assert not find_problems(page)


def test_what_is_not_there_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n[a](gone.md) [b](#a-page) [c](#no-page) `pipelines/gone.py` `pipelines/infra/passes.py`\n"
        "`passes.py` `none.py` `bwd-cse` `bwd-gone` frontend.gone.capture frontend.doors.capture.capture_joint\n\n"
        "```\npytest tests/unit/test_gone.py tests/unit/test_docs.py\n```\n"
    )
    assert find_problems(page) == [
        *(
            "pipelines/gone.py",
            "tests/unit/test_gone.py",
            "none.py",
            "bwd-gone",
            "frontend.gone.capture",
            "gone.md",
            "#no-page",
        )
    ]


def docstrings() -> Iterator[tuple[str, str]]:
    """Each docstring of the package, with the place that it is of."""
    for folder in PACKAGE:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                    yield f"{file.relative_to(ROOT)}, {getattr(node, 'name', 'the file')}", text


def test_docstrings_are_sentences() -> None:
    """Of "What stands before the engine" nobody knows what it does: "Replaces the engine while a scope is open"."""
    found = [*docstrings()]
    assert len(found) > 2000
    assert [place for place, text in found if re.match(r"What\b", text)] == []


def test_each_op_of_the_dialect_is_on_the_map() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition("## The bwd dialect")[2].partition("\n## ")[0]
    rows = "".join(line for line in section.splitlines() if line.startswith("| `"))
    defined = re.findall(
        r'^class \w+Op\(.*, name="(\w+)"', (ROOT / "dialects" / "bwd.py").read_text("utf-8"), re.MULTILINE
    )
    assert {*re.findall(r"`bwd\.(\w+)`", rows)} == {*defined}


def options(file: str, function: str) -> set[str]:
    """The names of the arguments of a public function that are options."""
    tree = ast.parse((ROOT / "retrograd" / file).read_text(encoding="utf-8"))
    found = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function)
    return {argument.arg for argument in found.args.kwonlyargs}


def test_each_option_has_its_place_on_the_map() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition("## An option, and what is behind it")[2].partition("\n## ")[0]
    listed = {*re.findall(r"^\| `(\w+)` \|.*\|.*\|", section, re.MULTILINE)}
    assert options("api.py", "compile_backward") | options("scope.py", "enable") == {
        name for name in listed if name == name.lower()
    }


@pytest.mark.parametrize(("file", "function"), [("api.py", "compile_backward"), ("scope.py", "enable")])
def test_a_test_on_the_map_names_its_option(file: str, function: str) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name in options(file, function):
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        tests = re.findall(r"`(tests/[\w/]+\.py)`", row)
        assert tests and any(name in (ROOT / test).read_text(encoding="utf-8") for test in tests), row
