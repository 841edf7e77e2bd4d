# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a process spends before it trains: imports, compiling from the cache, the first step. A GPT of 4 layers, 384
wide, on 4 x 256 tokens; each process is a new one, and the first of each kind fills the cache.

    python benchmarks/start_up.py

Seconds of processor time of the process itself, medians; ``torch`` is imported before the clock starts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

KINDS = ("compile_backward", "torch.compile", "enable", "saved file", "inductor", "eager")
COLUMNS = ("torch's own imports", "imports", "compile", "first step", "later step")
FILE = "RETROGRAD_START_UP_FILE"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kinds", default=",".join(KINDS), help="which, with commas between")
    parser.add_argument("--processes", type=int, default=5, help="how many of each, after the first")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child)))
        return 0
    kinds = options.kinds.split(",")
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "RETROGRAD_CACHE_DIR": os.path.join(folder, "cache"),
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "inductor"),
            FILE: os.path.join(folder, "gpt.rg"),
        }
        # What was not called is not known to be right: the second process fills what the first one could not.
        for kind in [*kinds, *kinds]:
            run(kind, environment)
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for _ in range(options.processes):
            for kind in kinds:
                found[kind].append(run(kind, environment))
    print("| from the cache |", " | ".join(COLUMNS), "|")
    print("| --- |", " | ".join("---:" for _ in COLUMNS), "|")
    for kind, rows in found.items():
        medians = [statistics.median(row[column] for row in rows) for column in COLUMNS]
        print(f"| {kind} |", " | ".join(f"{seconds:.2f}" for seconds in medians), "|")
    return 0


def run(kind: str, environment: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", kind]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def measure(kind: str) -> dict[str, float]:
    """Seconds of this process, by what they were spent on."""

    model, args = make_gpt()
    clock = time.process_time()
    seconds: dict[str, float] = {}

    def note(what: str) -> None:
        nonlocal clock
        now = time.process_time()
        seconds[what], clock = now - clock, now

    if kind not in ("saved file", "eager"):
        for name in ("torch._dynamo", "torch._functorch.aot_autograd"):
            importlib.import_module(name)
    note("torch's own imports")
    step = open_kind(kind, model, args, note)
    note("compile")
    # Of torch.compile and enable() it is the first step that compiles.
    step()
    note("first step")
    step()
    step()
    note("later step")
    seconds["later step"] /= 2
    return seconds


def open_kind(kind: str, model: Any, args: tuple[Any, ...], note: Callable[[str], None]) -> Callable[[], None]:
    import torch

    def step_of(call: Callable[..., Any]) -> Callable[[], None]:
        def step() -> None:
            # As a training does: a backward that adds to gradients is another one, which enable() captures anew.
            model.zero_grad()
            call(*args).backward()

        return step

    if kind == "eager":
        note("imports")
        return step_of(model)
    if kind == "inductor":
        note("imports")
        return step_of(torch.compile(model))
    import retrograd

    if kind == "torch.compile":
        note("imports")
        return step_of(torch.compile(model, backend="retrograd"))
    if kind == "enable":
        scope = retrograd.enable
        note("imports")

        def step() -> None:
            model.zero_grad()
            with scope():
                model(*args).backward()

        return step
    file = os.environ[FILE]
    if kind == "saved file" and os.path.exists(file):
        load = retrograd.load
        note("imports")
        return step_of(load(file, model))
    compile_backward = retrograd.compile_backward
    note("imports")
    compiled = compile_backward(model, args)
    if kind == "saved file":
        compiled.save(file)
    return step_of(compiled)


def make_gpt() -> tuple[Any, tuple[Any, ...]]:
    import torch
    from models.gpt import language_model

    torch.manual_seed(0)
    case = language_model(batch=4, tokens=256, width=384, heads=6, layers=4, vocabulary=1024)
    return case.model, case.args


if __name__ == "__main__":
    sys.exit(main())
