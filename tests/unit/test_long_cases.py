# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which cases of a test `make test` leaves out, by the marks that name them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


class Case:
    """As much of a test as the marks are read from."""

    def __init__(self, case: str, *marks: pytest.Mark) -> None:
        self.nodeid, self.marks, self.added = f"tests/test_one.py::test_one[{case}]", marks, list[str]()

    def iter_markers(self) -> Iterator[pytest.Mark]:
        return iter(self.marks)

    def add_marker(self, name: str) -> None:
        self.added.append(name)


@pytest.fixture
def mark_long_cases(request: pytest.FixtureRequest) -> Any:
    return request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py")).mark_long_cases  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("mark", "long"),
    [
        (pytest.mark.long_cases("a", "x[1]"), ["a", "x[1]"]),
        (pytest.mark.short_cases("a", "x[1]"), ["b"]),
        (pytest.mark.parametrize("name", ["a"]), []),
    ],
)
def test_cases_are_long_by_their_names(mark_long_cases: Any, mark: pytest.MarkDecorator, long: list[str]) -> None:
    cases = {name: Case(name, mark.mark) for name in ("a", "b", "x[1]")}
    mark_long_cases([*cases.values()], is_whole=True)
    assert [name for name, case in cases.items() if case.added] == long
    assert all(case.added == ["long"] for case in cases.values() if case.added)


@pytest.mark.parametrize("mark", [pytest.mark.long_cases("a", "c"), pytest.mark.short_cases("a", "c")])
def test_a_case_that_is_not_there_is_an_error(mark_long_cases: Any, mark: pytest.MarkDecorator) -> None:
    with pytest.raises(pytest.UsageError, match=r"test_one.*'c'"):
        mark_long_cases([Case("a", mark.mark)], is_whole=True)
    # One that somebody asks for comes without the others.
    mark_long_cases([Case("a", mark.mark)], is_whole=False)
