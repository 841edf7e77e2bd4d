# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Divides the functions of a large module among processes that compile them side by side.

Of IREE's time on a network of 20,000 lines two fifths are one thread's: what comes before kernels, and LLVM's work on
all of them together. Kernels that two functions share are few: the parts together take the processor time of the whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from retrograd.pipelines.toolchain.compiler_parts import has_one_thread

Parts = tuple[tuple[str, ...], ...]
"""Names of functions, by part."""

# Lines of a part: of fewer, what is gained is less than a second.
_LEAST_LINES = 1500
# Each process holds the IR of its part, and some hundred MiB besides.
_MOST_PARTS = 4


def count_processors(environment: Mapping[str, str] = os.environ) -> int:
    """How many processors a compilation may use: one where there are as many processes as cores."""
    if has_one_thread(environment):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def divide_functions(linalg: str, processors: int) -> Parts:
    """Divide the public functions of a module's text among as many parts as are worth it; no part where one is. Each
    function, the longest first, goes to the part that is the shortest so far."""
    lines = count_lines(linalg)
    count = min(processors, _MOST_PARTS, len(lines), sum(lines.values()) // _LEAST_LINES)
    if count < 2:
        return ()
    parts: list[list[str]] = [[] for _ in range(count)]
    for name in sorted(lines, key=lines.__getitem__, reverse=True):
        min(parts, key=lambda part: sum(lines[other] for other in part)).append(name)
    return tuple(map(tuple, parts))


def count_lines(linalg: str) -> dict[str, int]:
    """The lines of each public function of a module's text, by name."""
    starts = [*re.finditer(r"^ *func\.func (private )?@(\w+)", linalg, flags=re.MULTILINE)]
    ends = [start.start() for start in starts[1:]] + [len(linalg)]
    # Of a module that has none there is one end, of nothing.
    return {
        start[2]: linalg.count("\n", start.start(), end)
        for start, end in zip(starts, ends, strict=False)
        if start[1] is None
    }


def part_path(path: Path, number: int) -> Path:
    """Where part ``number`` has what the whole module has at ``path``; the first one has it there."""
    return path.with_suffix(f".{number}{path.suffix}") if number else path


def part_paths(path: Path) -> list[Path]:
    """The files of all parts that were written, of the first at ``path``, in order."""
    numbered = [int(file.suffixes[-2][1:]) for file in path.parent.glob(f"{path.stem}.[1-9]*{path.suffix}")]
    return [part_path(path, number) for number in (0, *sorted(numbered))]


def write_parts(parts: Parts) -> str:
    """Parts as the option of a command line."""
    return ";".join(",".join(names) for names in parts)


def read_parts(text: str) -> Parts:
    """Parts as :func:`write_parts` writes them."""
    return tuple(tuple(names.split(",")) for names in text.split(";"))
