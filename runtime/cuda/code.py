# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kernels of a vmfb for CUDA: PTX, and how each is launched, read out of IREE's flatbuffers (``CDA1``)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_MAGIC, _HEADER = b"CDA1", 64
# Of an executable's table.
_EXPORTS, _MODULES = 0, 1
# Of an export's.
_MODULE, _NAME, _BLOCK, _SHARED, _CONSTANTS, _BINDINGS = range(6)
# The most pointers and constants that IREE's format has for a kernel: more means that this is not it.
_MOST = 256


@dataclass(frozen=True)
class Entry:
    """A kernel: which of the modules it is in, threads of a block, bytes of shared memory given at launch, and how many
    buffers and constants it takes."""

    module: int
    block: tuple[int, int, int]
    shared: int
    bindings: int
    constants: int


@dataclass(frozen=True)
class CudaCode:
    """An executable: PTX of its modules, each ending with a zero byte, and its kernels by name."""

    modules: tuple[bytes, ...]
    entries: dict[str, Entry]


def read_code(data: bytes) -> CudaCode:
    """The kernels of one executable of a vmfb.

    Raises:
        ValueError: it is none for CUDA, or of a form that this release does not know.
    """
    if data[:4] != _MAGIC or data[_HEADER + 4 : _HEADER + 8] != _MAGIC:
        raise ValueError("an executable is not in IREE's format for CUDA")
    try:
        return _read(_Table.root(data[_HEADER:]))
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"an executable for CUDA is damaged: {error}") from error


def _read(root: _Table) -> CudaCode:
    modules = tuple(table.text(0) + b"\0" for table in root.tables(_MODULES))
    entries: dict[str, Entry] = {}
    for table in root.tables(_EXPORTS):
        name = table.text(_NAME).decode()
        module, bindings, constants = table.number(_MODULE), table.count(_BINDINGS), table.number(_CONSTANTS)
        if name in entries or module >= len(modules) or max(bindings, constants) > _MOST:
            raise ValueError(f"kernel {name!r} of an executable for CUDA is of a form that is not known")
        x, y, z = table.block(_BLOCK)
        entries[name] = Entry(module, (x, y, z), table.number(_SHARED), bindings, constants)
    return CudaCode(modules, entries)


@dataclass(frozen=True)
class _Table:
    """A table of a flatbuffer, at a place in its bytes."""

    data: bytes
    place: int

    @staticmethod
    def root(data: bytes) -> _Table:
        return _Table(data, struct.unpack_from("<I", data, 0)[0])

    def field(self, number: int) -> int | None:
        """Where a field is; none if it has its default."""
        table = self.place - struct.unpack_from("<i", self.data, self.place)[0]
        size = struct.unpack_from("<H", self.data, table)[0]
        if 4 + 2 * number >= size:
            return None
        offset = struct.unpack_from("<H", self.data, table + 4 + 2 * number)[0]
        return self.place + offset if offset else None

    def number(self, number: int) -> int:
        where = self.field(number)
        return 0 if where is None else int(struct.unpack_from("<I", self.data, where)[0])

    def block(self, number: int) -> tuple[int, int, int]:
        where = self.field(number)
        if where is None:
            raise ValueError("a kernel of an executable for CUDA lacks the size of its blocks")
        x, y, z = struct.unpack_from("<3I", self.data, where)
        return x, y, z

    def _vector(self, number: int) -> tuple[int, int]:
        """Where a vector's elements begin, and how many there are."""
        where = self.field(number)
        if where is None:
            return 0, 0
        start = where + struct.unpack_from("<I", self.data, where)[0]
        return start + 4, int(struct.unpack_from("<I", self.data, start)[0])

    def count(self, number: int) -> int:
        return self._vector(number)[1]

    def text(self, number: int) -> bytes:
        start, length = self._vector(number)
        return self.data[start : start + length]

    def tables(self, number: int) -> list[_Table]:
        start, count = self._vector(number)
        places = [start + 4 * i for i in range(count)]
        return [_Table(self.data, place + struct.unpack_from("<I", self.data, place)[0]) for place in places]
