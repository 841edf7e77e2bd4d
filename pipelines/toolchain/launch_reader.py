# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reads what functions queue on a CUDA device out of IREE's own HAL phase, in text: see :func:`read_launches`.

What is queued runs in the order in which it was queued: fences only order less than that. An op that is not known, or a
number that only a call has, leaves a function without a plan; it says why.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from retrograd.contract.launches import Launches, LaunchPlan
from retrograd.pipelines.toolchain.constant_data import ConstantData
from retrograd.pipelines.toolchain.launch_function import GLOBAL, Module, Reader, Unknown


def read_launches(hal: str) -> Launches:
    """The plans of all exported functions of a module after IREE's HAL phase, and of the initializers they need."""
    module = Module(ConstantData(hal))
    functions: dict[str, LaunchPlan] = {}
    reasons: dict[str, str] = {}
    initializers: list[LaunchPlan] = []
    for name, is_public, arguments, body in _bodies(hal):
        if name and not is_public:
            module.recorders[name] = body
            continue
        reader = Reader(module, arguments)
        try:
            for line in body:
                reader.read(line)
        except Unknown as unknown:
            _refuse(module, body, str(unknown))
            if is_public:
                reasons[name] = str(unknown)
            continue
        if is_public:
            functions[name] = reader.plan()
        elif reader.steps or reader.kept:
            initializers.append(reader.plan())
    return Launches(tuple(initializers), functions, reasons)


def _bodies(hal: str) -> Iterator[tuple[str, bool, list[str], list[str]]]:
    """Functions and initializers in order: name (none: an initializer), whether it is public, types of its arguments,
    its statements."""
    lines = iter(hal.splitlines())
    for line in lines:
        header = re.match(r"  util\.(?:func (public |private )?@([\w$.]+)\(|initializer\b)", line)
        if header is None:
            continue
        body: list[str] = []
        for inner in lines:
            if inner.startswith("  }"):
                break
            text = re.sub(r" loc\(.*\)$", "", inner.rstrip()).strip()
            # A list of buffers goes over several lines.
            if (body and body[-1].endswith(("([", "],"))) or (body and text.startswith("])")):
                body[-1] += text
            else:
                body.append(text)
        types = re.findall(r"%arg\d+: ([!\w.]+)", line.partition("attributes")[0])
        yield header[2] or "", header[1] != "private " and bool(header[2]), types, body


def _refuse(module: Module, body: list[str], reason: str) -> None:
    """Mark the globals that this initializer sets as not known, but for devices and executables, which plans name."""
    for line in body:
        if (stored := re.match(rf"util\.global\.store \S+, {GLOBAL} : (\S+)", line)) is not None:
            if stored[2] in ("!hal.device", "!hal.executable"):
                module.globals[stored[1]] = stored[2]
            else:
                module.refused[stored[1]] = reason
