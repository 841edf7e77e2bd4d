# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which of IREE's kernels an address of this process lies in, on x86-64: what a sampling profiler cannot tell.

An executable for a CPU is an ELF library inside of the vmfb, which IREE maps by itself, without a name for anybody. Its
table of kernels, and that of their names, are arrays of addresses, which the ELF's relocations list.
"""

from __future__ import annotations

import bisect
import itertools
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

_RELATIVE, _RELOCATIONS = 8, 4
_NAME = re.compile(rb"[\w$]*(?:dispatch|encod|__builtin_)[\w$]*\0")
_MAP = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r-xp \S+ 00:00 0 *$", re.MULTILINE)


class Section(NamedTuple):
    """A section of an ELF: its type, where it is in memory and in the file, its size."""

    kind: int
    address: int
    offset: int
    size: int

    def holds(self, address: int) -> bool:
        """Whether an address lies in it."""
        return self.address <= address < self.address + self.size


@dataclass(frozen=True)
class Kernels:
    """The kernels of an executable where it is mapped: first addresses, ascending, the names at each, the end."""

    starts: list[int]
    names: list[tuple[str, ...]]
    end: int

    def find(self, address: int) -> tuple[str, ...]:
        """The names of the kernel that an address lies in: several where equal ones were made one; none outside."""
        index = bisect.bisect(self.starts, address) - 1
        return self.names[index] if index >= 0 and address < self.end else ()


def find_joined(
    kernels: Sequence[Kernels], called: Iterable[tuple[str, str]] = ()
) -> dict[tuple[str, str], set[tuple[str, str]]]:
    """The plain names that stand for one kernel or for several, by each of them: the time of each of them is that of
    all. Equal kernels are made one in an executable, and before that: what is ``called`` in one half of a step and has
    no kernel there is the other half's."""
    groups: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for names in (names for executable in kernels for names in executable.names):
        keys = {plain_name(name) for name in names}
        joined = keys.union(*(groups.get(key, set()) for key in keys))
        groups |= dict.fromkeys(joined, joined)
    for half, name in called:
        other = ({"forward": "backward", "backward": "forward"}.get(half, half), name)
        if (half, name) not in groups and other in groups:
            joined = {*groups[other], (half, name)}
            groups |= dict.fromkeys(joined, joined)
    return groups


def find_kernels(vmfb: bytes) -> list[Kernels]:
    """The kernels of each executable of a loaded vmfb, in this process, for each time that it is loaded there: what is
    short runs on a device of its own.

    Raises:
        ValueError: an executable is not as IREE 3.13 writes them, or not mapped.
    """
    return [k for match in re.finditer(rb"\x7fELF\x02\x01", vmfb) for k in _locate(vmfb[match.start() :])]


def _locate(elf: bytes) -> list[Kernels]:
    sections = _read_sections(elf)
    table, names = _read_tables(elf, sections)
    if not table or len(table) != len(names):
        raise ValueError(f"an executable has {len(table)} kernels and {len(names)} names")
    text = next(section for section in sections if section.holds(table[0]))
    code = elf[text.offset : text.offset + text.size]
    return [_name_at(place - text.address, text, table, names) for place in _find_mapped(code)]


def _name_at(start: int, text: Section, table: Sequence[int], names: Sequence[str]) -> Kernels:
    """The kernels of an executable whose addresses begin at ``start``."""
    by_address: dict[int, list[str]] = {}
    for address, name in zip(table, names, strict=True):
        by_address.setdefault(start + address, []).append(name)
    starts = sorted(by_address)
    return Kernels(starts, [tuple(by_address[a]) for a in starts], start + text.address + text.size)


def _read_sections(elf: bytes) -> list[Section]:
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    found = []
    for number in range(count):
        _, kind, _, address, place, length = struct.unpack_from("<IIQQQQ", elf, offset + number * size)
        found.append(Section(kind, address, place, length))
    return found


def _read_tables(elf: bytes, sections: list[Section]) -> tuple[list[int], list[str]]:
    """Addresses of kernels, and their names, in the same order: the longest run of addresses of code, and all that
    points to a name."""
    relocations = sorted(_read_relocations(elf, sections))
    code = _read_sections_of_code(elf, sections)
    runs: list[list[tuple[int, int]]] = []
    names = []
    for place, target in relocations:
        if any(section.holds(target) for section in code):
            if runs and runs[-1][-1][0] == place - 8:
                runs[-1].append((place, target))
            else:
                runs.append([(place, target)])
        elif (name := _read_name(elf, sections, target)) is not None:
            names.append(name)
    longest = max(runs, key=len, default=[])
    return [target for _, target in longest], names


def _read_sections_of_code(elf: bytes, sections: list[Section]) -> list[Section]:
    """The sections that lie in a segment that may be executed."""
    (offset,) = struct.unpack_from("<Q", elf, 0x20)
    size, count = struct.unpack_from("<HH", elf, 0x36)
    found = []
    for number in range(count):
        kind, flags, _, address, _, _, length = struct.unpack_from("<IIQQQQQ", elf, offset + number * size)
        if kind == 1 and flags & 1:
            found += [s for s in sections if s.size and address <= s.address < address + length]
    return found


def _read_relocations(elf: bytes, sections: list[Section]) -> Iterator[tuple[int, int]]:
    for section in sections:
        if section.kind == _RELOCATIONS:
            for place in range(section.offset, section.offset + section.size, 24):
                where, info, target = struct.unpack_from("<QQq", elf, place)
                if info & 0xFFFFFFFF == _RELATIVE:
                    yield where, target


def _read_name(elf: bytes, sections: list[Section], address: int) -> str | None:
    for section in sections:
        if section.address and section.holds(address):
            match = _NAME.match(elf, section.offset + address - section.address)
            return match[0][:-1].decode() if match else None
    return None


def _find_mapped(code: bytes) -> list[int]:
    """Where this process has the code of an executable: in memory that is of no file, each time that it is loaded."""
    places = []
    with open("/proc/self/mem", "rb") as memory:
        for first, last in _MAP.findall(Path("/proc/self/maps").read_text(encoding="utf-8")):
            memory.seek(int(first, 16))
            place = memory.read(int(last, 16) - int(first, 16)).find(code)
            if place >= 0:
                places.append(int(first, 16) + place)
    if not places:
        raise ValueError("the code of an executable is not mapped")
    return places


def plain_name(name: str) -> tuple[str, str]:
    """The half of a step that a kernel is of, and its name less what IREE numbers it by: what is the same in all layers
    of a model is called the same."""
    half = "backward" if name.startswith("backward") else "forward" if name.startswith("forward") else ""
    return half, re.sub(r"^(?:\w*?_dispatch_\d+_|_encoding_\d+_)", "", name)


def count_steps(timeline: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[tuple[str, str], tuple[int, str]]:
    """How often a step runs each kernel, and the first line of source that it is of, by half and plain name."""
    counts: dict[tuple[str, str], tuple[int, str]] = {}
    for half, functions in timeline.items():
        for kernels, source, _ in itertools.chain.from_iterable(f["steps"] for f in functions):
            for name in str(kernels).split(", "):
                count, first = counts.get((half, name), (0, ""))
                counts[half, name] = count + 1, first or str(source)
    return counts
