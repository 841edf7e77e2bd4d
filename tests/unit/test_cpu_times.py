# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Checks how the suite counts CPU seconds (tests/conftest.py)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("is_read", [False, True])
def test_threads_and_servers_may_end_while_they_are_counted(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_read: bool
) -> None:
    seconds = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))._seconds_of_servers  # type: ignore[union-attr]
    ended, runs = tmp_path / "children", tmp_path / "running"
    # No process has the first number: the greatest that Linux gives is 2 ** 22.
    if is_read:
        ended.write_text(f"{2**22 + 1} ", encoding="ascii")
    runs.write_text(f"{os.getpid()} ", encoding="ascii")
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [ended, runs])
    assert seconds() > 0
