# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Identifies the passes: executables that other passes made are not taken from a cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

# The contract lies beside the public face in the source tree, beside the passes in a wheel.
_FOLDERS = ("contract", "dialects", "pipelines", "retrograd/contract")
# All of the package, in the source tree and, where the public face lies in the root, in a wheel.
_PACKAGE = (*_FOLDERS, "frontend", "runtime", "retrograd", "tools")


@cache
def source_fingerprint() -> str:
    """A hash of the sources that decide what a module is compiled to, 64 hex digits; read once per process (5 ms)."""
    return hash_sources(Path(__file__).parents[2])


@cache
def package_fingerprint() -> str:
    """A hash of all sources of the package; read once per process."""
    return hash_sources(Path(__file__).parents[2], (*_PACKAGE, "."))


def hash_sources(root: Path, folders: Sequence[str] = _FOLDERS) -> str:
    """A hash of the names and contents of all Python files in ``folders`` under ``root``, by default those that hold
    passes."""
    digest = hashlib.sha256()
    found = {path for folder in folders for path in (root / folder).glob("*.py" if folder == "." else "**/*.py")}
    for path in sorted(found):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
