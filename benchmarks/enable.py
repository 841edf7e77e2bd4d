# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A backward inside of ``retrograd.enable()`` beside eager's: processor time of both in turn, on one thread, and peaks.

``python benchmarks/enable.py vit "LSTM classifier"`` takes models of this folder and programs of the corpus by name.
The time is that which a third of the steps are faster than, of what is compiled, beside that of ``compile_backward``'s
backward of the same model, and once it is known whether it is left to eager. The peak of a step is what torch's
profiler sees, with the scratch memory of a compiled function as a tensor while it runs. How often it compiles is beside
how often PyTorch's own compiled autograd captures a backward in as many steps; ``--counts`` measures that alone.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.compiled_autograd import _enable

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / folder) for folder in ("tests/corpus", "tests/fuzz") if str(ROOT / folder) not in sys.path]

from corpus_programs import PROGRAMS  # noqa: E402
from measure_memory import held_at_most  # noqa: E402
from models import MODELS  # noqa: E402

import retrograd  # noqa: E402
from retrograd.frontend.autograd.engine.trials import MOST, WARM_UP  # noqa: E402
from retrograd.runtime.steps.bound_function import BoundFunction  # noqa: E402

Forward = Callable[[], torch.Tensor]
# From no gradients, of one set of sizes.
STEPS = 4


def make(name: str) -> tuple[Any, Forward]:
    """The model of a name, and what computes its loss."""
    if name in MODELS:
        case = MODELS[name].make("bench")
        return case.model, lambda: case.loss(case.model(*case.args))
    sample = PROGRAMS[name].make()
    inputs = sample.inputs(0)
    return sample.model, lambda: sample.loss(sample.model(**inputs))


def compile_ahead(name: str) -> tuple[Any, Forward]:
    """The same with a backward that was compiled ahead."""
    if name in MODELS:
        case = MODELS[name].make("bench")
        compiled = retrograd.compile_backward(case.model, case.args)
        return case.model, lambda: case.loss(compiled(*case.args))
    sample = PROGRAMS[name].make()
    inputs = sample.inputs(0)
    step = retrograd.compile_backward(sample.model, (), inputs)
    return sample.model, lambda: sample.loss(step(**inputs))


def time_backward(model: Any, forward: Forward, enabled: bool, only_if_faster: bool = False) -> float:
    """Seconds of processor time that one takes, from gradients that there are not yet."""
    model.zero_grad()
    with retrograd.enable(only_if_faster=only_if_faster) if enabled else nullcontext():
        loss = forward()
        start = time.process_time()
        loss.backward()
        return time.process_time() - start


def weigh(model: Any, forward: Forward, enabled: bool) -> int:
    """The most bytes that a step holds."""
    model.zero_grad()
    run = BoundFunction._invoke

    def with_scratch(function: Any, arguments: Any, results: Any) -> Any:
        scratch = torch.empty(function._function.transient_bytes, dtype=torch.uint8)
        given = run(function, arguments, results)
        del scratch
        return given

    BoundFunction._invoke = with_scratch  # type: ignore[method-assign, assignment]
    try:
        with retrograd.enable(only_if_faster=False) if enabled else nullcontext():
            return held_at_most(lambda: forward().backward())
    finally:
        BoundFunction._invoke = run  # type: ignore[method-assign]


def count_captures(name: str) -> int:
    """How often compiled autograd captures a backward in the first steps, and has it compiled."""
    model, forward = make(name)
    captured: list[torch.fx.GraphModule] = []

    def keep(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        captured.append(graph_module)
        return graph_module

    torch._dynamo.reset()
    for _ in range(STEPS):
        model.zero_grad()
        with _enable(keep):
            forward().backward()
    torch._dynamo.reset()
    return len(captured)


def count_compilations(name: str) -> tuple[int, int]:
    """How often `enable` compiles in as many steps, and how many of its backwards run eagerly."""
    model, forward = make(name)
    before = len(retrograd.explain_recompiles())
    for _ in range(STEPS):
        time_backward(model, forward, True)
    outcomes = [entry.outcome for entry in retrograd.explain_recompiles()[before:]]
    return outcomes.count("compiled"), outcomes.count("runs eagerly")


def in_turn(steps: Sequence[Callable[[], float]], repeats: int) -> list[float]:
    """What a third of the runs of each step are faster than, one after the other."""
    gc.collect()
    gc.disable()
    rows = [[step() for step in steps] for _ in range(repeats)]
    gc.enable()
    return [sorted(column)[len(column) // 3] for column in zip(*rows, strict=True)]


def measure(name: str, repeats: int) -> str:
    """A line about one model."""
    model, forward = make(name)
    before = len(retrograd.explain_recompiles())
    ahead = partial(time_backward, *compile_ahead(name), False)
    mine, theirs = (partial(time_backward, model, forward, enabled) for enabled in (True, False))
    for _ in range(STEPS):
        mine()
        ahead()
    ours, eager = (weigh(model, forward, enabled) for enabled in (True, False))
    compiled_time, eager_time, ahead_time = in_turn([mine, theirs, ahead], repeats)
    compiled = sum(entry.outcome == "compiled" for entry in retrograd.explain_recompiles()[before:])
    # By when it is known.
    judged = partial(mine, only_if_faster=True)
    for _ in range(WARM_UP + 2 * MOST + 4):
        judged()
    left_time, beside = in_turn([judged, theirs], repeats)
    speed = f"{eager_time * 1e3:.2f} | {compiled_time / eager_time:.2f} | {left_time / beside:.2f}"
    bytes_ = f"{eager / 2**20:.2f} | {ours / eager:.2f}"
    return f"| {name} | {speed} | {compiled_time / ahead_time:.2f} | {bytes_} | {compiled} | {count_captures(name)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--counts", action="store_true", help="count compilations alone")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.counts:
        print("| model | compiled | eager | captured by PyTorch |")
        print("| --- | ---: | ---: | ---: |")
        for name in options.names or PROGRAMS:
            print("| {} | {} | {} | {} |".format(name, *count_compilations(name), count_captures(name)), flush=True)
        return 0
    columns = "eager ms | to eager's | once judged | to compile_backward's | eager MiB | to eager's"
    print(f"| model | {columns} | compiled | captured by PyTorch |")
    print("| --- |" + " ---: |" * 8)
    for name in options.names:
        print(measure(name, options.repeats), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
