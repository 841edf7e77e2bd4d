# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Steps of a GPT that two processes train under DDP and FSDP2: eager beside `retrograd.enable()`.

python benchmarks/distributed.py
python benchmarks/distributed.py --dtype bfloat16 --schedules eager-order overlap --json figures.json

On CUDA each process has a GPU, and NCCL is in between; without CUDA the sizes are tiny, on gloo, and say nothing but
that it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models.gpt import LanguageModel, next_tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import retrograd

RANKS = 2
WARM_UP_STEPS, PROFILED_STEPS = 4, 3
COLUMNS = ("wrapper", "backward", "step ms", "backward ms", "to eager", "kernels ms", "NCCL ms", "hidden")
Interval = tuple[float, float]
# The processes as a group over gloo.
_meeting: Any = None


@dataclass(frozen=True)
class Sizes:
    """Of the model and of the tokens of one process."""

    layers: int = 8
    width: int = 1024
    heads: int = 16
    vocabulary: int = 8192
    batch: int = 4
    tokens: int = 512


TINY = Sizes(1, 8, 2, 11, 2, 5)


@dataclass
class Runner:
    """One model and what its backward runs in; times are in milliseconds."""

    wrapper: str
    how: str
    model: Any
    scope: Callable[[], AbstractContextManager[Any]]
    steps: list[float] = field(default_factory=list)
    backwards: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Figures:
    """A row: medians in milliseconds, of the first process. ``hidden`` is the share of the time of NCCL's kernels in
    which others ran; ``kernels_ms`` the time in which one other than NCCL's ran. None where there are no kernels."""

    wrapper: str
    how: str
    step_ms: float
    backward_ms: float
    ratio: float
    gradient_error: float
    kernels_ms: float | None
    nccl_ms: float | None
    hidden: float | None
    told: tuple[str, ...]


def wrap_ddp(model: nn.Module, _half: bool) -> Any:
    return DistributedDataParallel(model)


def wrap_fsdp2(model: Any, half: bool) -> Any:
    """Each block by itself, parameters freed after the forward."""
    mesh = init_device_mesh(device().type, (RANKS,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


WRAPPERS: Mapping[str, Callable[[Any, bool], Any]] = {"ddp": wrap_ddp, "fsdp2": wrap_fsdp2}


def device() -> torch.device:
    """This process's."""
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")


def meet() -> None:
    """Wait for the other processes, by way of the CPU: what NCCL does is to be the models' alone."""
    dist.monitored_barrier(_meeting)


def synchronize() -> None:
    """Wait for what was queued on the device."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def run_step(runner: Runner, batch: tuple[Tensor, Tensor], half: bool) -> tuple[float, float]:
    """Milliseconds of a step, and of its backward; both end when the device is done."""
    runner.model.zero_grad()
    with_autocast = half and runner.wrapper == "ddp"
    synchronize()
    start = time.perf_counter()
    with torch.autocast(device().type, torch.bfloat16) if with_autocast else contextlib.nullcontext():
        loss = runner.model(*batch)
    synchronize()
    middle = time.perf_counter()
    with runner.scope():
        loss.backward()
    synchronize()
    end = time.perf_counter()
    return 1e3 * (end - start), 1e3 * (end - middle)


def time_in_turn(runners: Sequence[Runner], batch: tuple[Tensor, Tensor], half: bool, repeats: int) -> None:
    """Steps of each, in alternating order; all processes begin each step together."""
    for number in range(repeats):
        for runner in runners if number % 2 else reversed(runners):
            meet()
            step, backward = run_step(runner, batch, half)
            runner.steps.append(step)
            runner.backwards.append(backward)


def find_error(eager: nn.Module, ours: nn.Module) -> float:
    """The largest difference between two models' gradients, relative to the norm of each."""
    errors = []
    for expected, found in zip(eager.parameters(), ours.parameters(), strict=True):
        a, b = (_local(p.grad) for p in (expected, found))
        errors.append(float((a - b).norm() / a.norm().clamp_min(1e-6)))
    return max(errors)


def _local(gradient: Any) -> Tensor:
    result: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return result


def profile_steps(runner: Runner, batch: tuple[Tensor, Tensor], half: bool) -> list[list[Interval]]:
    """When kernels of NCCL ran in some steps, and when others did, in milliseconds."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED_STEPS):
            meet()
            run_step(runner, batch, half)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    nccl = [e for e in kernels if "nccl" in e["name"].lower()]
    others = [e for e in kernels if "nccl" not in e["name"].lower()]
    return [unite((e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3) for e in found) for found in (nccl, others)]


def unite(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as intervals that do not meet, in order."""
    united: list[Interval] = []
    for start, end in sorted(intervals):
        if united and start <= united[-1][1]:
            united[-1] = united[-1][0], max(end, united[-1][1])
        else:
            united.append((start, end))
    return united


def measure_length(intervals: Iterable[Interval]) -> float:
    """How long they are together."""
    return sum(end - start for start, end in intervals)


def intersect(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The times that are in both; each in order and without overlaps, as `unite` gives them."""
    met: list[Interval] = []
    left, right = 0, 0
    while left < len(some) and right < len(others):
        start, end = max(some[left][0], others[right][0]), min(some[left][1], others[right][1])
        if start < end:
            met.append((start, end))
        if some[left][1] < others[right][1]:
            left += 1
        else:
            right += 1
    return met


def measure(wrapper: str, sizes: Sizes, schedules: Sequence[Any], half: bool, repeats: int) -> list[Figures]:
    """A row for eager and one for each schedule."""
    torch.manual_seed(0)
    plain = LanguageModel(sizes.vocabulary, sizes.tokens, sizes.width, sizes.heads, sizes.layers).to(device())
    torch.manual_seed(1 + dist.get_rank())
    tokens, targets = next_tokens(sizes.batch, sizes.tokens, sizes.vocabulary)
    batch = tokens.to(device()), targets.to(device())
    scopes: dict[str, Callable[[], AbstractContextManager[Any]]] = {"eager": contextlib.nullcontext}
    for schedule in schedules:
        scopes[schedule] = partial(retrograd.enable, hook_schedule=schedule)
    runners = [Runner(wrapper, how, WRAPPERS[wrapper](copy.deepcopy(plain), half), s) for how, s in scopes.items()]
    told: dict[str, tuple[str, ...]] = {}
    errors: dict[str, float] = {}
    for runner in runners:
        before = len(retrograd.explain_recompiles())
        for _ in range(WARM_UP_STEPS):
            run_step(runner, batch, half)
        told[runner.how] = tuple(str(entry) for entry in retrograd.explain_recompiles()[before:])
        errors[runner.how] = find_error(runners[0].model, runner.model)
    time_in_turn(runners, batch, half, repeats)
    rows = [make_row(runner, runners[0], batch, half) for runner in runners]
    return [dataclasses.replace(row, told=told[row.how], gradient_error=errors[row.how]) for row in rows]


def make_row(runner: Runner, eager: Runner, batch: tuple[Tensor, Tensor], half: bool) -> Figures:
    step, backward = statistics.median(runner.steps), statistics.median(runner.backwards)
    ratio = backward / statistics.median(eager.backwards)
    kernels = nccl = hidden = None
    if device().type == "cuda":
        reductions, others = profile_steps(runner, batch, half)
        whole = measure_length(reductions)
        kernels, nccl = measure_length(others) / PROFILED_STEPS, whole / PROFILED_STEPS
        hidden = measure_length(intersect(reductions, others)) / whole if whole else None
    return Figures(runner.wrapper, runner.how, step, backward, ratio, 0.0, kernels, nccl, hidden, ())


def make_table(rows: Sequence[Figures]) -> Iterator[str]:
    """Lines of Markdown."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"| --- | --- |{' ---: |' * (len(COLUMNS) - 2)}"
    for row in rows:
        numbers = [row.step_ms, row.backward_ms, row.ratio, row.kernels_ms, row.nccl_ms, row.hidden]
        yield f"| {row.wrapper} | {row.how} | {' | '.join('-' if n is None else f'{n:.2f}' for n in numbers)} |"


def run_rank(options: argparse.Namespace) -> None:
    """Be one of the processes; the first prints."""
    is_cuda = options.device == "cuda"
    if is_cuda:
        torch.cuda.set_device(options.rank)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if is_cuda else "gloo", init_method=f"file://{options.store}", rank=options.rank, world_size=RANKS
    )
    global _meeting
    _meeting = dist.new_group(backend="gloo")
    sizes = TINY if options.tiny or not is_cuda else Sizes(options.layers, options.width)
    rows: list[Figures] = []
    for wrapper in options.wrappers:
        rows += measure(wrapper, sizes, options.schedules, options.dtype == "bfloat16", options.repeats)
    if options.rank == 0:
        print("\n".join(make_table(rows)))
        for row in rows:
            print(f"{row.wrapper}, {row.how}: gradients off by {row.gradient_error:.1e}")
            print("\n".join(f"  {line}" for line in row.told))
        if options.json:
            named = [dataclasses.asdict(row) for row in rows]
            options.json.write_text(json.dumps({"dtype": options.dtype, **dataclasses.asdict(sizes), "rows": named}))
    sys.stdout.flush()
    meet()
    dist.destroy_process_group()


def start_ranks(arguments: Sequence[str], seconds: float) -> int:
    """Run this program in as many processes as it takes; none outlives this call. Returns the first exit status that
    is not 0."""
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        own = [sys.executable, "-W", "ignore", __file__, *arguments, "--store", str(Path(folder) / "store")]
        try:
            processes += [subprocess.Popen([*own, "--rank", str(rank)]) for rank in range(RANKS)]
            deadline = time.monotonic() + seconds
            while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
                if time.monotonic() > deadline:
                    print(f"not done after {seconds:.0f} s", file=sys.stderr)
                    return 1
                time.sleep(0.1)
            return next((code for p in processes if (code := p.poll())), 0)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def main(arguments: Sequence[str]) -> int:
    """Measure in two processes, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--wrappers", nargs="+", choices=WRAPPERS, default=list(WRAPPERS))
    parser.add_argument(
        "--schedules", nargs="+", default=["eager-order", "overlap"], help="of retrograd.enable's hooks"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--layers", type=int, default=Sizes.layers)
    parser.add_argument("--width", type=int, default=Sizes.width)
    parser.add_argument("--repeats", type=int, default=20, help="steps of each that are timed")
    parser.add_argument("--tiny", action="store_true", help="sizes of a test")
    parser.add_argument("--seconds", type=float, default=1800, help="after these all is ended")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is None:
        return start_ranks(arguments, options.seconds)
    run_rank(options)
    # Threads of the group may outlive it.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
