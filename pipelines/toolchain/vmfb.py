# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reads from a vmfb's bytes for which devices there is code, and adds launch plans and other parts to it."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence

from retrograd.contract.archive import EPOCH, OWN, part_member
from retrograd.contract.launches import MEMBER, Launches

# How executables begin, by IREE's name for their format: ELF's magic number and the identifiers that IREE gives its
# flatbuffers.
_MAGIC = {b"\x7fELF": "embedded-elf", b"CDA1": "cuda-nvptx-fb", b"VKE1": "vulkan-spirv-fb", b"HIP1": "rocm-hsaco-fb"}
MODULE = "module.fb"
"""The file of the module itself."""

# Constants are files of their own from some size on.
_DATA = ".bin"


def read_formats(vmfb: bytes) -> dict[str, int]:
    """The executables in a vmfb: how many there are of each format (``cuda-nvptx-fb``, ``embedded-elf``, ...). One of a
    format that is not known here counts under the four bytes that it begins with, in hexadecimal."""
    formats: dict[str, int] = {}
    for name, data in members(vmfb):
        if name != MODULE and not name.endswith(_DATA):
            found = _MAGIC.get(data[:4], data[:4].hex())
            formats[found] = formats.get(found, 0) + 1
    return formats


def members(vmfb: bytes) -> list[tuple[str, bytes]]:
    """The files in a vmfb that are IREE's, by name."""
    with zipfile.ZipFile(io.BytesIO(vmfb)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist() if not name.startswith(OWN)]


def add_launches(vmfb: bytes, launches: Launches) -> bytes:
    """A vmfb with launch plans in it; what IREE wrote stays where it is."""
    return _add_members(vmfb, {MEMBER: launches.to_json().encode()})


def add_parts(vmfb: bytes, others: Sequence[bytes]) -> bytes:
    """A vmfb with those of the other parts of its program in it."""
    return _add_members(vmfb, {part_member(n): other for n, other in enumerate(others, 1)}) if others else vmfb


def _add_members(vmfb: bytes, members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO(vmfb)
    with zipfile.ZipFile(buffer, "a") as archive:
        # IREE's own directory stays as well, so that the bytes of the vmfb are the beginning of the new one.
        archive.start_dir = len(vmfb)
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name, EPOCH), data)
    return buffer.getvalue()
