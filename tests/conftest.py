# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What holds for every test: a share of the cores, and a compile cache that starts empty."""

import os
import shutil
import tempfile

import pytest

CACHE_VARIABLE = "RETROGRAD_CACHE_DIR"

# torch reads this when it is imported; without it each of pytest-xdist's workers would start a thread on every core.
os.environ.setdefault(
    "OMP_NUM_THREADS",
    str(max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))),
)


def pytest_configure(config: pytest.Config) -> None:
    # Workers inherit the variable, so that one run shares one cache, and no run sees what an earlier one left.
    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = tempfile.mkdtemp(prefix="retrograd-test-cache-")
        os.environ[CACHE_VARIABLE] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
