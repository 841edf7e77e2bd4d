# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tables of tiles that devices were found to be fastest with: kept between compilations, and as files for others."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import platformdirs

from retrograd.contract.environment import CACHE_FOLDER
from retrograd.contract.errors import RetrogradError
from retrograd.contract.whole_files import replacing


def cache_folder() -> Path:
    """The folder of the compiler's cache, as the runtime has it: named by the environment, or the user's."""
    return Path(os.environ.get(CACHE_FOLDER) or platformdirs.user_cache_dir("retrograd"))


FORMAT = 1


class TableError(RetrogradError, ValueError):
    """A file that is no table of tiles; says what is wrong with it."""


@dataclass(frozen=True)
class Entry:
    """The tiles that won for a question, on which device, and microseconds with them and with those taken unasked.

    What they hold for is the question, the architecture that kernels were compiled for, and the release of Triton that
    did.
    """

    question: str
    architecture: str
    triton: str
    tiles: str
    device: str
    microseconds: float
    unasked: float

    @property
    def key(self) -> tuple[str, str, str]:
        """The question that it answers, on which architecture and by which Triton."""
        return self.question, self.architecture, self.triton


Table = Mapping[tuple[str, str, str], Entry]


def kept_table() -> Path:
    """The file in the cache's folder that keeps what was measured."""
    return cache_folder() / "tiles.json"


def read_table(path: Path) -> Table:
    """The entries of a file, by what they hold for.

    Raises:
        TableError: it cannot be read, or is no such table.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise TableError(f"{path}: a table of tiles of format {data['format']}, and this release reads {FORMAT}")
        entries = [Entry(**{field.name: entry[field.name] for field in fields(Entry)}) for entry in data["tiles"]]
    except OSError as error:
        raise TableError(f"{path}: {error.strerror}; write one with `retrograd tiles FILE`") from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, TableError):
            raise
        raise TableError(f"{path}: no table of tiles ({error!r}); write one with `retrograd tiles FILE`") from error
    return {entry.key: entry for entry in entries}


def write_table(path: Path, entries: Iterable[Entry]) -> None:
    """Write a file that :func:`read_table` reads, at once or not at all.

    Raises:
        OSError: it cannot be written.
    """
    tiles = [asdict(entry) for entry in sorted(entries, key=lambda entry: entry.key)]
    with replacing(path) as file:
        file.write((json.dumps({"format": FORMAT, "tiles": tiles}, indent=1) + "\n").encode())


def read_kept() -> Table:
    """Read the table that is kept; nothing where there is no such file, or a damaged one."""
    try:
        return read_table(kept_table())
    except TableError:
        return {}


def keep(entries: Iterable[Entry]) -> None:
    """Add to what is kept; the caller sees to it that nobody else does meanwhile.

    Raises:
        OSError: the folder cannot be written to.
    """
    path = kept_table()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_table(path, {**read_kept(), **{entry.key: entry for entry in entries}}.values())
