# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""PyTorch's tests inside of ``enable()``: what is told of tests that pass, differ, end their process or hang."""

from __future__ import annotations

from pathlib import Path

import pytest
import pytorch_tests

_FILE = """
import os, time, torch
from torch.autograd import Variable
from torch.testing._internal.common_utils import TestCase

def is_enabled():
    return type(Variable._execution_engine).__name__ == "Engine"

class TestFew(TestCase):
    def test_equal(self):
        w = torch.ones(3, requires_grad=True)
        w.sin().sum().backward()
        self.assertEqual(w.grad, torch.ones(3).cos())
    def test_crashes(self):
        if is_enabled():
            os._exit(3)
    def test_differs(self):
        self.assertFalse(is_enabled())
    def test_fails(self):
        self.assertTrue(False)
    def test_hangs(self):
        if is_enabled():
            time.sleep(600)
    def test_last(self):
        pass
"""


@pytest.mark.long
def test_what_becomes_of_a_test_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "few.py"
    file.write_text(_FILE)
    assert pytorch_tests.main(["--tests", str(file), "--limit", "20", "--times", "2"]) == 1
    output = capsys.readouterr().out
    # Ran in eager, captured, compiled, equal, differ, crashed, hung.
    assert "| `few.py` | 5 | 1 | 1 | 2 | 1 | 1 | 1 |" in output
    for line in ("differs: TestFew.test_differs", "crashed: TestFew.test_crashes", "hung: TestFew.test_hangs"):
        assert line in output
