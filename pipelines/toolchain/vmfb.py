# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reads from a vmfb's bytes for which devices there is code, and the PTX of that for CUDA."""

from __future__ import annotations

import io
import math
import re
import zipfile
from dataclasses import dataclass

from retrograd.contract.archive import EPOCH, OWN
from retrograd.contract.launches import MEMBER, Launches

# How executables begin, by IREE's name for their format: ELF's magic number and the identifiers that IREE gives its
# flatbuffers.
_MAGIC = {
    b"\x7fELF": "embedded-elf",
    b"CDA1": "cuda-nvptx-fb",
    b"VKE1": "vulkan-spirv-fb",
    b"HIP1": "rocm-hsaco-fb",
}
_MODULE = "module.fb"
# Constants are files of their own from some size on.
_DATA = ".bin"


def read_formats(vmfb: bytes) -> dict[str, int]:
    """The executables in a vmfb: how many there are of each format (``cuda-nvptx-fb``, ``embedded-elf``, ...).

    One of a format that is not known here counts under the four bytes that it begins with, in hexadecimal.
    """
    formats: dict[str, int] = {}
    for name, data in _members(vmfb):
        if name != _MODULE and not name.endswith(_DATA):
            found = _MAGIC.get(data[:4], data[:4].hex())
            formats[found] = formats.get(found, 0) + 1
    return formats


@dataclass(frozen=True)
class Ptx:
    """PTX in a vmfb: the architecture (``sm_90``) that it is written for, its kernels in order and the threads that a
    workgroup of each has, bytes of local memory that these declare (arrays that the compiler could not keep in
    registers), and how many of its instructions load from memory that the threads of a workgroup share."""

    target: str
    kernels: tuple[str, ...]
    threads: tuple[int, ...]
    local_bytes: int
    shared_loads: int


def read_ptx(vmfb: bytes) -> tuple[Ptx, ...]:
    """The PTX modules in a vmfb; there are none in one that has no code for CUDA."""
    return tuple(
        Ptx(
            target[1].decode(),
            tuple(name.decode() for name in re.findall(rb"\.entry\s+(\w+)", data)),
            tuple(math.prod(map(int, sizes)) for sizes in re.findall(rb"\.maxntid (\d+), (\d+), (\d+)", data)),
            sum(int(size) for size in re.findall(rb"\.local\b[^;\[]*\.b8\s+\w+\[(\d+)\]", data)),
            len(re.findall(rb"\bld\.shared\b", data)),
        )
        for name, data in _members(vmfb)
        if name != _MODULE and (target := re.search(rb"^\.target (sm_\d+)", data, flags=re.MULTILINE))
    )


def _members(vmfb: bytes) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(vmfb)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist() if not name.startswith(OWN)]


def add_launches(vmfb: bytes, launches: Launches) -> bytes:
    """A vmfb with launch plans in it; what IREE wrote stays where it is."""
    buffer = io.BytesIO(vmfb)
    with zipfile.ZipFile(buffer, "a") as archive:
        # IREE's own directory stays as well, so that the bytes of the vmfb are the beginning of the new one.
        archive.start_dir = len(vmfb)
        archive.writestr(zipfile.ZipInfo(MEMBER, EPOCH), launches.to_json())
    return buffer.getvalue()
