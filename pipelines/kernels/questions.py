# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which tiles of several a kernel is to have, as a question that a device can answer: plain data, with what to run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from retrograd.contract.errors import RetrogradError
from retrograd.contract.trials import Buffer, Ending
from retrograd.pipelines.kernels.kernel import Kernel
from retrograd.pipelines.kernels.shipped_tiles import SHIPPED

QUESTIONS = "bwd.questions"
"""The attribute of a module that holds the questions of its kernels, each as JSON."""

MOST = 12
"""So many tiles are tried for a question at the most, those that are taken unasked among them."""

MEASURED = ", tiles by measurement"
"""What reports say of kernels whose tiles were chosen."""

Chosen = Mapping[str, str]
"""Tiles by question, both as text."""

_Tile = TypeVar("_Tile")


class TilesError(RetrogradError, ValueError):
    """Tiles that a kernel cannot have."""


@dataclass(frozen=True)
class Launch:
    """A kernel for operands and sizes: the workgroups and its numbers. ``written`` is the number of the operand that
    the kernel updates in place, which its result then is."""

    kernel: Kernel
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    written: int | None = field(default=None)


@dataclass(frozen=True)
class Run:
    """A launch on buffers by number, the operands in order, and what it gives, which gets the next numbers."""

    launch: Launch
    taken: tuple[int, ...]
    given: tuple[Buffer, ...]


@dataclass(frozen=True)
class Trial:
    """Launches with one choice of tiles; their results are what the last of them gives, or updates."""

    inputs: tuple[Buffer, ...]
    runs: tuple[Run, ...]
    ending: Ending | None = None


@dataclass(frozen=True)
class Question:
    """Says with ``text`` what is computed: the family, sizes, types; ``trials`` are by tiles, the first of which are
    taken unasked."""

    text: str
    trials: Mapping[str, Trial]

    @property
    def family(self) -> str:
        """The family of the kernels."""
        return self.text.partition(" ")[0]

    @property
    def unasked(self) -> str:
        """The tiles that are taken where nobody measures."""
        return next(iter(self.trials))

    def to_json(self) -> str:
        """The text that :func:`read_question` reads."""
        return json.dumps(asdict(self), separators=(",", ":"))


def read_question(text: str) -> Question:
    """The question that ``to_json`` wrote."""
    fields = json.loads(text)
    return Question(fields["text"], {tiles: _read_trial(trial) for tiles, trial in fields["trials"].items()})


def _read_trial(fields: Mapping[str, Any]) -> Trial:
    ending = None if fields["ending"] is None else Ending(**fields["ending"])
    return Trial(_read_buffers(fields["inputs"]), tuple(map(_read_run, fields["runs"])), ending)


def _read_run(fields: Mapping[str, Any]) -> Run:
    launch = fields["launch"]
    x, y, z = launch["grid"]
    read = Launch(Kernel.from_dict(launch["kernel"]), (x, y, z), tuple(launch["numbers"]), launch["written"])
    return Run(read, tuple(fields["taken"]), _read_buffers(fields["given"]))


def _read_buffers(buffers: Iterable[Mapping[str, Any]]) -> tuple[Buffer, ...]:
    return tuple(Buffer(b["element"], tuple(b["shape"]), b["below"]) for b in buffers)


def find_questions(linalg: str) -> tuple[Question, ...]:
    """The questions that convert-linalg-to-kernels noted in a module's text, each once."""
    noted = re.search(rf'{re.escape(QUESTIONS)} = \[("[^"]*"(?:, "[^"]*")*)\]', linalg)
    texts = re.findall(r'"([^"]*)"', noted[1]) if noted else []
    found = [read_question(_unescape(text)) for text in dict.fromkeys(texts)]
    return tuple({question.text: question for question in found}.values())


def _unescape(text: str) -> str:
    """Text as it was before MLIR printed it."""
    return re.sub(r"\\([0-9A-F]{2}|\\)", lambda m: "\\" if m[1] == "\\" else chr(int(m[1], 16)), text)


def write_chosen(chosen: Chosen) -> str:
    """Tiles as the text of an option."""
    return ";".join(f"{question}:{tiles}" for question, tiles in sorted(chosen.items()))


def read_chosen(text: str) -> dict[str, str]:
    """Tiles from the text of an option.

    Raises:
        ValueError: it is not what :func:`write_chosen` writes.
    """
    entries = [entry.partition(":") for entry in text.split(";") if entry]
    if not all(separator and tiles for _, separator, tiles in entries):
        raise ValueError(f"expected QUESTION:TILES;QUESTION:TILES, found '{text[:80]}'")
    return {question: tiles for question, _, tiles in entries}


def put_first(text: str, tiles: Sequence[_Tile], architecture: str) -> tuple[_Tile, ...]:
    """Tiles in the order of a question: first those that are taken unasked, which are the first given where the
    package has none for it."""
    wanted = SHIPPED.get(architecture, {}).get(text)
    return tuple(sorted(tiles, key=lambda tile: str(tile) != wanted))


def pick(text: str, tiles: Sequence[_Tile], chosen: Chosen) -> _Tile:
    """The tiles that are chosen for a question, of those there are; the first where none are.

    Raises:
        TilesError: those that are chosen are none of them.
    """
    wanted = chosen.get(text)
    found = tiles[0] if wanted is None else next((tile for tile in tiles if str(tile) == wanted), None)
    if found is None:
        raise TilesError(f"the tiles '{wanted}' are none of those for '{text}': {', '.join(map(str, tiles))}")
    return found
