# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which kernels a step on the CPU spends its time in, beside what the machine can do. Needs Linux's `perf`.

python benchmarks/dispatches.py gpt
python benchmarks/dispatches.py resnet50 --kernels off --top 30

Takes the models of `cpu_steps.py`, and those of the suite at the sizes of its benchmark.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import cpu_steps
import torch
from kernel_symbols import count_steps, find_joined, find_kernels, plain_name
from measure import run_step
from models import MODELS as SUITE
from models.case import Case
from page import positive

import retrograd
from retrograd.runtime.steps.compiled import CompiledBackward

MODELS: dict[str, Callable[[], Case]] = {
    **{name: partial(entry.make, "bench") for name, entry in SUITE.items()},
    **cpu_steps.MODELS,
}
_RATE = 997
_SAMPLE = re.compile(r"\s*([0-9a-f]+)\s.*?\(([^()]*)\)\s*$")
_SIZES = re.compile(r"_(\d+(?:x\d+)*)")


@dataclass(frozen=True)
class Row:
    """Time of a kernel, or of a library's code, in a step (of all kernels with the same code, under the name of one):
    milliseconds of all threads, calls, GFLOP/s of a product and elements of its loops in a nanosecond, and the line
    that it is of."""

    what: str
    ms: float
    calls: int = 0
    gflops: float | None = None
    elements: float | None = None
    source: str = ""


def sample(run: Callable[[], object], folder: Path) -> list[tuple[int, str]]:
    """Addresses, and the files that they are of, at which the threads of this process were while it ran."""
    data = folder / "perf.data"
    command = ["perf", "record", "-q", "-o", str(data), "-F", str(_RATE), "-p", str(os.getpid())]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as recorder:
        time.sleep(1)
        run()
        recorder.send_signal(signal.SIGINT)
    shown = subprocess.run(
        ["perf", "script", "-i", str(data), "-F", "ip,dso"], capture_output=True, text=True, check=True
    ).stdout
    found = (_SAMPLE.match(line) for line in shown.splitlines())
    return [(int(m[1], 16), Path(m[2]).name) for m in found if m]


def measure(case: Case, step: CompiledBackward, steps: int) -> list[Row]:
    """Rows of a step, longest first."""
    program = step._parts.program
    for _ in range(3):
        run_step(case, step)
    with tempfile.TemporaryDirectory() as folder:
        samples = sample(lambda: [run_step(case, step) for _ in range(steps)], Path(folder))
    # After all steps: what turns out to be short is loaded a second time, and runs from there.
    kernels = find_kernels(program._vmfb)
    counts = count_steps(step.explain().to_dict()["timeline"])
    joined = find_joined(kernels, counts)
    hits: Counter[tuple[str, str]] = Counter()
    for address, file in samples:
        names = next((found for k in kernels if (found := k.find(address))), None)
        # Code that oneDNN wrote while it ran is of no file, or of a map that it wrote for perf.
        is_written = file.startswith(("perf-", "[JIT]", "//anon", "anon"))
        # Of several names the last: a forward's, if there is one.
        hits[max(joined[plain_name(names[0])]) if names else ("", "code of oneDNN" if is_written else file)] += 1
    rows = []
    for key, n in hits.most_common():
        counted = [counts[other] for other in sorted(joined.get(key, {key}), reverse=True) if other in counts]
        line = next((source for _, source in counted), "")
        rows.append(_row(key, 1e3 * n / _RATE / steps, sum(count for count, _ in counted), line))
    return rows


def _row(key: tuple[str, str], ms: float, calls: int, source: str) -> Row:
    half, name = key
    sizes = _SIZES.search(name)
    if not half or not calls or sizes is None:
        return Row(f"{half} {name}".strip(), ms, calls, source=source)
    loops = math.prod(map(int, sizes[1].split("x"))) * calls
    is_product = "matmul" in name
    rate = loops / ms / 1e6
    return Row(f"{half} {name}", ms, calls, 2 * rate if is_product else None, None if is_product else rate, source)


def find_ceilings() -> tuple[float, float]:
    """GFLOP/s of a large product and GB/s of a large copy, read and written, through PyTorch."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    source, target = torch.randn(1 << 26), torch.empty(1 << 26)
    product = _best(lambda: torch.mm(a, b))
    copy = _best(lambda: target.copy_(source))
    return 2 * 2048**3 / product / 1e9, 2 * 4 * source.numel() / copy / 1e9


def _best(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def show(rows: Sequence[Row], top: int) -> None:
    """Print the table."""
    print("| ms a step | share | calls | GFLOP/s | elements/ns | what | of |")
    print("| ---: | ---: | ---: | ---: | ---: | --- | --- |")
    whole = sum(row.ms for row in rows)
    for row in rows[:top]:
        rates = ("-" if n is None else f"{n:.2f}" if n < 10 else f"{n:.0f}" for n in (row.gflops, row.elements))
        cells = f"{row.ms:.2f}", f"{row.ms / whole:.1%}", str(row.calls or "-"), *rates, row.what, row.source
        print("|", " | ".join(cells), "|", flush=True)
    print(f"\n{whole:.0f} ms a step, of all threads together")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tell the time of a step on the CPU by kernel.")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--kernels", default="auto", help="as for compile_backward: off has no library's steps")
    parser.add_argument("--steps", type=positive, default=5)
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--top", type=positive, default=15)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    product, copy = find_ceilings()
    print(f"{options.threads} threads: products up to {product:.0f} GFLOP/s, copies {copy:.1f} GB/s\n")
    case = MODELS[options.model]()
    step = retrograd.compile_backward(case.model, case.args, kernels=options.kernels)
    show(measure(case, step, options.steps), options.top)
    return 0


if __name__ == "__main__":
    sys.exit(main())
