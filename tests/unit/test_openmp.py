# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""torch's OpenMP threads end or sleep when asked to, and work when torch needs them."""

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


# How often torch's threads went to sleep in fifty parallel regions, one right after the other.
SLEEPING = """
import os, re, time
import torch
from retrograd.runtime.programs.openmp import release_threads, threads_sleep

def threads():
    return set(os.listdir("/proc/self/task"))

def sleeps(ids):
    found = [open(f"/proc/self/task/{i}/status").read() for i in ids]
    return sum(int(re.search("^voluntary_ctxt_switches:\\s*(\\d+)", text, re.M)[1]) for text in found)

def count():
    before = sleeps(ours)
    for _ in range(50):
        x.add_(1)
    return sleeps(ours) - before

def settle(count):
    for _ in range(500):
        if len(threads()) == count:
            return True
        time.sleep(0.01)
    return False

torch.set_num_threads(2)
before, x = threads(), torch.zeros(1 << 16)
x.add_(1)
ours = threads() - before
awake = count()
one = len(threads())
cores = len(os.sched_getaffinity(0))
with threads_sleep():
    with threads_sleep():
        # A thread that keeps a team, of which it is one.
        print(len(ours), settle(one + max(cores - 2, 0) + 3))
    asleep = count()
    print(release_threads(), ours <= threads())
print(asleep > awake + 10, settle(one + 1), x[0].item(), (x == x[0]).all().item())
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="loaded libraries are found by /proc")
def test_threads_sleep_while_they_wait() -> None:
    result = subprocess.run([sys.executable, "-c", SLEEPING], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["1 True", "False True", "True True 101.0 True"]
