# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""torch's OpenMP threads end when asked to, and come back when torch needs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own, where nothing but torch has started threads.
PROGRAM = """
import os
import torch
from retrograd.runtime.programs.openmp import release_threads

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
x = torch.randn(1 << 20)
before = threads()
total = (x + 1).sum()
running = threads()
print(release_threads())
ended = threads()
again = torch.equal((x + 1).sum(), total)
print(running - before, ended - before, threads() - before, again, torch.get_num_threads())
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="loaded libraries are found by /proc")
def test_threads_end_and_come_back() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["True", "2 0 2 True 3"]
