# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Identifies the passes: executables that other passes made are not taken from a cache."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

# The contract lies beside the public face in the source tree, beside the passes in a wheel.
_FOLDERS = ("contract", "dialects", "pipelines", "retrograd/contract")


@cache
def source_fingerprint() -> str:
    """A hash of the sources that decide what a module is compiled to, 64 hex digits; read once per process (5 ms)."""
    return hash_sources(Path(__file__).parents[2])


def hash_sources(root: Path) -> str:
    """A hash of the names and contents of all Python files in the folders under ``root`` that hold passes."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in _FOLDERS for path in (root / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
