# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Pages: what they link to, and the files that they name, are there. Docstrings are sentences."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ("dialects", "frontend", "pipelines", "retrograd", "runtime", "tools")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
_FOLDERS = "benchmarks|dialects|docs|examples|frontend|pipelines|retrograd|runtime|tests|tools"
_PATH = re.compile(rf"`((?:{_FOLDERS})/[\w./-]*)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as they are linked to."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def find_problems(page: Path) -> list[str]:
    """The links of a page that lead nowhere, and the files that it names and that there are none of."""
    text = page.read_text(encoding="utf-8")
    problems = [path for path in _PATH.findall(text) if not (ROOT / path).exists()]
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
    )
    assert find_problems(page) == ["pipelines/gone.py", "gone.md", "#no-page"]


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


def test_each_option_has_its_place_on_the_map() -> None:
    tree = ast.parse((ROOT / "retrograd" / "api.py").read_text(encoding="utf-8"))
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "compile_backward")
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition("## An option, and what is behind it")[2].partition("\n## ")[0]
    assert {*re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)} == {a.arg for a in function.args.kwonlyargs}
