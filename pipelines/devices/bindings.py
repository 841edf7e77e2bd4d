# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How many buffers a kernel takes: drivers of GPUs load none that takes more than so many, and iree-compile, which
fuses up to a bound on the operands of one op, makes some that do (the sums of all taps of a filter, say)."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Kernel:
    """A kernel and the number of buffers that it takes."""

    name: str
    bindings: int


def widest_kernel(executables: str) -> Kernel | None:
    """The kernel that takes the most buffers in IREE's IR after its phase ``executable-targets``; None without any."""
    counts = {
        name: layout.count("#hal.pipeline.binding<")
        for name, layout in re.findall(r"^(#\w+) = #hal\.pipeline\.layout<(.*)>$", executables, flags=re.MULTILINE)
    }
    exports = re.findall(r"hal\.executable\.export public @(\w+) .*?layout\((#\w+)\)", executables)
    return max((Kernel(name, counts[layout]) for name, layout in exports), key=lambda k: k.bindings, default=None)
