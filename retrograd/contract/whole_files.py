# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Files that other processes read meanwhile: there as a whole, or as they were."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

TEMPORARY_SUFFIX = ".tmp"
"""Ends the name of a file that is not whole yet: a process that was killed may leave one."""


@contextlib.contextmanager
def replacing(path: Path, *, synced: bool = False) -> Iterator[BinaryIO]:
    """A file to write that takes the place of ``path`` when the block ends, and leaves no trace when it fails;
    ``synced``, its contents are on the disk first.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("xb") as file:
            yield file
            if synced:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        # KeyboardInterrupt and SystemExit too: half a file must never be left behind.
        temporary.unlink(missing_ok=True)
        raise
