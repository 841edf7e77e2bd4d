# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What PTX is in a vmfb."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from retrograd.pipelines.toolchain.vmfb import MODULE, members


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
        for name, data in members(vmfb)
        if name != MODULE and (target := re.search(rb"^\.target (sm_\d+)", data, flags=re.MULTILINE))
    )
