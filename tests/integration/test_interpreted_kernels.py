# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels of our own in Triton, without a device: their numbers by Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from retrograd.pipelines.kernels.ptx import find_triton


@pytest.mark.skipif(find_triton() is None, reason="Triton is not installed")
def test_interpreted_they_are_near_to_float64() -> None:
    """Transposes; images and rows whose sizes no tile divides; attention of odd sizes, with masks that leave rows no
    columns, shared keys and transposed heads. In a process of its own: Triton is told to interpret when it is
    imported."""
    ended = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("interpreted_kernels.py"))],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    assert ended.stdout.split() == [
        "interpreted_transposes",
        "interpreted_columns",
        "interpreted_norms",
        "interpreted_convolutions",
        "interpreted_scatters",
        "interpreted_attention",
    ]
