# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reads which scratch memory is in use while a compiled function runs, step by step, as IREE laid it out.

IREE gives each function one block of scratch memory and places in it every buffer that the function's kernels hand to
one another, by the steps between which it is alive. Which buffers those are is last seen in its IR right after
``iree-stream-schedule-allocation``; later only places in the block are left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from retrograd.pipelines.analysis.kernels.hosted_buffers import HOSTED

ALLOCATION_PASS = "iree-stream-schedule-allocation"
"""After this pass of IREE's :func:`read_timelines` reads; print locations with it."""


@dataclass(frozen=True)
class Step:
    """Kernels that run at one time, what they were compiled from, and the bytes of scratch buffers alive meanwhile.

    Where memory is laid out for kernels one at a time, those of several steps may run together.

    ``kernels`` are IREE's names, less what they are numbered by, joined by commas; ``source`` is ``file.py:line`` of
    the first of them that has one, or empty.
    """

    kernels: str
    source: str
    scratch_bytes: int

    def to_list(self) -> list[str | int]:
        """The timeline as JSON values."""
        return [self.kernels, self.source, self.scratch_bytes]


def read_timelines(ir: str) -> dict[str, tuple[Step, ...]]:
    """The steps of each public function, in the order they run in, from IREE's IR after ``ALLOCATION_PASS``."""
    sources = read_locations(ir)
    return {name: tuple(_read_steps(body, sources)) for name, body in _FUNCTION.findall(ir)}


def _read_steps(body: str, sources: Mapping[str, str]) -> Iterator[Step]:
    constants = {m[1]: int(m[2]) for m in _CONSTANT.finditer(body)}
    places = _read_places(body)
    packed: dict[str, dict[str, int]] = {}
    blocks: dict[str, dict[str, int]] = {}
    for event in _EVENT.finditer(body):
        if event["pack"]:
            sizes = [constants.get(size, 0) for size in _SLICE.findall(event["slices"])]
            # What lies in the caller's memory takes none.
            hosted = set(map(int, re.findall(r"\d+", event["hosted"] or "")))
            packed[event["pack"]] = {
                f"{event['pack']}#{i + 1}": size for i, size in enumerate(sizes) if i not in hosted
            }
        elif event["block"]:
            # A buffer that is alone in a block of its own is not packed.
            name, size = event["block"], event["size"]
            blocks[name] = packed.get(size.partition("#")[0], {name: constants.get(size, 0)})
        elif event["freed"]:
            blocks.pop(event["freed"], None)
        else:
            yield from _read_region(
                event["region"], {k: v for b in blocks.values() for k, v in b.items()}, places, sources
            )


def _read_places(body: str) -> dict[str, str]:
    """Map the name of an offset in a block to the buffer, ``%pack#i``, that it is in."""
    places: dict[str, str] = {}
    for name, *terms in _OFFSET.findall(body):
        for term in terms:
            if "#" in term or term in places:
                places[name] = places.get(term, term)
    return places


def _read_region(
    region: str, sizes: Mapping[str, int], places: Mapping[str, str], sources: Mapping[str, str]
) -> Iterator[Step]:
    """The steps of a region in which buffers of these sizes are allocated: each is alive from the first step that names
    it to the last, or all through where none does.

    (The steps by which IREE packs are other ones: they count ops that are no command in the end.)
    """
    # Commands of the region itself are indented by six blanks, those of a group by more.
    texts = re.split(r"^ {6}(?=stream\.cmd\.)", region, flags=re.MULTILINE)[1:]
    named = [{places.get(name, name) for name in _NAME.findall(text)} & sizes.keys() for text in texts]
    first, last = dict.fromkeys(sizes, 0), dict.fromkeys(sizes, len(texts) - 1)
    last |= {name: number for number, names in enumerate(named) for name in names}
    first |= {name: number for number, names in reversed([*enumerate(named)]) for name in names}
    for number, text in enumerate(texts):
        commands = _COMMAND.findall(text)
        names = [_NUMBERED.sub("", name) if name else command for command, name in commands if command not in _GROUPS]
        found = (sources.get(reference, "") for reference in _REFERENCE.findall(text))
        alive = sum(size for name, size in sizes.items() if first[name] <= number <= last[name])
        yield Step(", ".join(dict.fromkeys(names)), next(filter(None, found), ""), alive)


def read_locations(ir: str) -> dict[str, str]:
    """``file.py:line`` by the alias of each location: of several, the first."""
    texts = dict(_ALIAS.findall(ir))
    known: dict[str, str] = {}

    def find(alias: str, seen: frozenset[str]) -> str:
        if alias not in known:
            text = texts.get(alias, "")
            here = _FILE.search(text)
            inner = (find(a, seen | {alias}) for a in _REFERENCE.findall(text) if a not in seen)
            known[alias] = f"{PurePath(here[1]).name}:{here[2]}" if here else next(filter(None, inner), "")
        return known[alias]

    return {alias: find(alias, frozenset()) for alias in texts}


_GROUPS = ("concurrent", "serial")
_FUNCTION = re.compile(r"^  util\.func public @(\w+)\(.*?\{\n(.*?)^  \}", re.MULTILINE | re.DOTALL)
_CONSTANT = re.compile(r"(%[\w-]+) = arith\.constant (\d+) : index")
_EVENT = re.compile(
    r"^    (?P<pack>%\w+)(?::\d+)? = stream\.resource\.pack\b[^\n]*slices\(\{(?P<slices>.*?)\}\)"
    rf"(?:[^\n]*{re.escape(HOSTED)} = array<i64: (?P<hosted>[^>]*)>)?"
    r"|^    (?P<block>%\w+), \S+ = stream\.resource\.alloca\b[^\n]*!stream\.resource<transient>\{(?P<size>[^}]+)\}"
    r"|^    \S+ = stream\.resource\.dealloca\b[^\n]*=> (?P<freed>%\w+) : "
    r"|^    \S+ = stream\.cmd\.execute\b[^\n]*\{\n(?P<region>.*?)^    \} =>",
    re.MULTILINE | re.DOTALL,
)
_SLICE = re.compile(r"\[\d+, \d+\] = (%[\w-]+)")
_OFFSET = re.compile(r"^    (%\w+) = arith\.addi (%[\w#-]+), (%[\w#-]+) : index", re.MULTILINE)
_NAME = re.compile(r"%[\w-]+(?:#\d+)?")
_COMMAND = re.compile(r"stream\.cmd\.(\w+)(?: @[\w$]+::@([\w$]+))?")
_NUMBERED = re.compile(r"^(\w+?_dispatch_\d+_|_encoding_\d+_)")
_REFERENCE = re.compile(r"(#loc\d*)\b")
_ALIAS = re.compile(r"^(#loc\d*) = loc\((.*)\)$", re.MULTILINE)
_FILE = re.compile(r'"([^"]*)":(\d+):\d+')
