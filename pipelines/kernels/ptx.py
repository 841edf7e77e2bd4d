# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From kernels to PTX, by Triton in a process of its own; each once, as long as the cache lasts."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from retrograd.contract.trials import CompiledKernel
from retrograd.contract.whole_files import replacing
from retrograd.pipelines.kernels.kernel import Kernel, KernelError
from retrograd.pipelines.kernels.tile_table import cache_folder

INSTALL = "pip install retrograd[cuda]"
_PROGRAM = "retrograd.tools.ptx"
# Kernels for one process, of many; and of what Triton says.
_SHARE, _LONGEST = 6, 500
_SOURCES = Path(__file__).parent / "source"


@cache
def find_triton() -> str | None:
    """Triton's release; ``None`` where it is not installed. Triton itself is not imported."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        return version("triton")
    except PackageNotFoundError:
        # A copy without metadata: its sources tell one from another, as far as anyone can.
        return "unknown"


def compile_kernels(kernels: Iterable[Kernel], architecture: str) -> dict[Kernel, CompiledKernel]:
    """PTX for each kernel, from the cache or by Triton.

    Raises:
        KernelError: Triton is not installed, or does not compile a kernel; says which.
    """
    wanted = list(dict.fromkeys(kernels))
    # In as many processes as there are cores: a kernel of attention takes seconds.
    found = _find(wanted, architecture, -(-len(wanted) // _count_cores()))
    for kernel in wanted:
        if isinstance(compiled := found[kernel], str):
            raise KernelError(f"Triton compiles no kernels for {architecture}: {compiled}; compile with kernels='off'")
    return {kernel: compiled for kernel, compiled in found.items() if not isinstance(compiled, str)}


def try_kernels(
    kernels: Iterable[Kernel], architecture: str, tell: Callable[[int, int], None]
) -> dict[Kernel, CompiledKernel | str]:
    """PTX for each kernel as :func:`compile_kernels`; of those that Triton does not compile, what it says. ``tell``
    hears how many of how many are there.

    Raises:
        KernelError: Triton is not installed.
    """
    return _find(list(dict.fromkeys(kernels)), architecture, _SHARE, tell)


def _find(
    wanted: list[Kernel], architecture: str, share: int, tell: Callable[[int, int], None] = lambda done, count: None
) -> dict[Kernel, CompiledKernel | str]:
    """Kernels from the cache, or compiled in shares of so many to a process."""
    paths = {kernel: _path(kernel, architecture) for kernel in wanted}
    found: dict[Kernel, CompiledKernel | str] = {k: kept for k, path in paths.items() if (kept := _read(path))}
    missing = [kernel for kernel in wanted if kernel not in found]
    if not missing:
        return found
    if find_triton() is None:
        raise KernelError(f"Triton is not installed, which compiles kernels of our own: {INSTALL}, or kernels='off'")
    count = -(-len(missing) // max(share, 1))
    shares = [missing[first::count] for first in range(count)]
    with ThreadPoolExecutor(min(count, _count_cores())) as pool:
        for own, answers in zip(shares, pool.map(lambda own: _run_program(own, architecture), shares), strict=True):
            for kernel, compiled in zip(own, answers, strict=True):
                found[kernel] = compiled
                if not isinstance(compiled, str):
                    _write(paths[kernel], compiled)
            tell(len(found), len(wanted))
    return found


def _count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_program(kernels: list[Kernel], architecture: str) -> list[CompiledKernel | str]:
    """Compile kernels; gives of each its PTX, or why there is none. Where the process ends for one, the others go
    without it."""
    request = json.dumps({"architecture": architecture, "kernels": [kernel.to_dict() for kernel in kernels]})
    ended = subprocess.run([sys.executable, "-m", _PROGRAM], input=request, capture_output=True, text=True, check=False)
    if ended.returncode == 0:
        return [a["error"] if "error" in a else CompiledKernel(**a) for a in json.loads(ended.stdout)]
    if len(kernels) > 1:
        return [_run_program([kernel], architecture)[0] for kernel in kernels]
    last = (ended.stderr.strip().splitlines() or [f"it ended with status {ended.returncode}"])[-1]
    return [last[:_LONGEST]]


def _path(kernel: Kernel, architecture: str) -> Path:
    text = f"{architecture} {find_triton()} {kernel.key} {fingerprint()}"
    return cache_folder() / "kernels" / f"{kernel.label}-{sha256(text.encode()).hexdigest()[:32]}.json"


@cache
def fingerprint() -> str:
    """A digest of what kernels are written and compiled by: another one, other code."""
    files = [*sorted(_SOURCES.glob("*.py")), Path(__file__)]
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _read(path: Path) -> CompiledKernel | None:
    """Read a kernel from a file; None unless it is whole."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        digest = fields.pop("digest")
        return CompiledKernel(**fields) if digest == sha256(fields["ptx"].encode()).hexdigest() else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write(path: Path, compiled: CompiledKernel) -> None:
    """Keep a kernel; where the folder cannot be written to, it is compiled again next time."""
    fields = {**asdict(compiled), "digest": sha256(compiled.ptx.encode()).hexdigest()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps(fields).encode())
    except OSError as error:
        print(f"retrograd: kernels are not kept in {path.parent}: {error}", file=sys.stderr)


_VECTOR_FLAGS = re.compile(r"( = \w+)(?: (?:nuw|nsw|exact|disjoint|nneg))+(?= <\d+ x )")


def drop_vector_flags(llvm: str) -> str:
    """LLVM's code without what it promises of all numbers of a vector, ``nuw`` say.

    LLVM puts two ops into one on vectors, and keeps their promises for numbers that nobody reads. The code for NVIDIA
    in LLVM as Triton 3.6 has it then computes ``shl nuw <2 x i32> %v, <i32 31, i32 1>`` in one register of 64 bits, so
    that bits of the first number get into the second: places of a product's bias were wrong.
    """
    return _VECTOR_FLAGS.sub(r"\1", llvm)


_ENTRY = re.compile(r"\.visible \.entry (\w+)\(\n(.*?)\n\)", flags=re.DOTALL)


def adapt_ptx(ptx: str, kernel: Kernel, scratch: int) -> str:
    """Triton's PTX with the kernel under its label, and its arguments as IREE passes them.

    Triton's last two arguments point to scratch memory and to a profiler's: the first, where the kernel has any, goes
    behind the buffers, the other goes.

    Raises:
        KernelError: the arguments are not those that were asked for, or one is used that is taken out.
    """
    entry = _ENTRY.search(ptx)
    if entry is None:
        raise KernelError(f"the PTX of {kernel.label} has no kernel")
    name, parameters = entry[1], [line.strip().rstrip(",") for line in entry[2].split("\n")]
    buffers, numbers = len(kernel.pointers), len(kernel.numbers)
    if len(parameters) != buffers + numbers + 2:
        raise KernelError(f"the PTX of {kernel.label} takes {len(parameters)} arguments: another release of Triton?")
    own, rest, (memory, profile) = parameters[:buffers], parameters[buffers:-2], parameters[-2:]
    for taken in [profile] + [memory] * (not scratch):
        if f"[{taken.split()[-1]}]" in ptx:
            raise KernelError(f"the PTX of {kernel.label} uses an argument that IREE does not pass")
    order = ",\n\t".join([*own, *[memory] * bool(scratch), *rest])
    text = ptx[: entry.start()] + f".visible .entry {name}(\n\t{order}\n)" + ptx[entry.end() :]
    return re.sub(rf"\b{name}(?=_param_\d|\()", kernel.label, text)
