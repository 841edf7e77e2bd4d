# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Runs every kernel of ours on small tensors under compute-sanitizer's memcheck and racecheck.

python tests/gpu/sanitize.py              the tiles that are taken unasked
python tests/gpu/sanitize.py --all        all tiles that are measured

Each kernel is launched by itself, on buffers that nothing is behind. Fails where a tool reports anything.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from retrograd.contract.reading import read_plain
from retrograd.contract.trials import Work
from retrograd.frontend.doors.capture import capture_joint
from retrograd.frontend.libraries.ops import NO_LIBRARIES, library_ops
from retrograd.frontend.preparation.importer import import_graph
from retrograd.pipelines.conversions.convert_linalg_to_kernels import FAMILIES
from retrograd.pipelines.devices.targets import cuda_architecture, find_target
from retrograd.pipelines.kernels.choice import with_kernels
from retrograd.pipelines.kernels.ptx import compile_kernels
from retrograd.pipelines.kernels.questions import Question, find_questions
from retrograd.pipelines.stages.staged import Progress, stage_module
from retrograd.pipelines.toolchain.lowering import lower_to_linalg
from retrograd.runtime.cuda.trials import Bench
from retrograd.tuning import make_work

TOOLS = ("memcheck", "racecheck")
SANITIZER = "/usr/local/cuda/bin/compute-sanitizer"
_FOUND = 77


@dataclass(frozen=True)
class Case:
    """A function of tensors whose kernels, of one family, are looked at."""

    family: str
    function: Callable[..., Tensor]
    args: tuple[Tensor, ...]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def make_cases() -> Iterator[Case]:
    """Sizes that no tile divides, and some that all do."""
    for dtype in (torch.float32, torch.bfloat16):
        yield Case("products", F.linear, (random(257, 264, dtype=dtype), random(264, 264, dtype=dtype)))
        yield Case("products", torch.bmm, (random(2, 200, 240, dtype=dtype), random(2, 240, 257, dtype=dtype)))
        heads = [random(1, count, rows, 48, dtype=dtype) for count, rows in ((2, 130), (1, 150), (1, 150))]
        yield Case("attention", attend, tuple(heads))
        yield Case("attention", F.scaled_dot_product_attention, (*heads[:1] * 3, torch.randn(130, 130).to(dtype)))
        yield Case("attention", drop, tuple(heads))
        yield Case("rows", lambda x: x.log_softmax(1), (random(270, 1001, dtype=dtype),))
        yield Case("rows", lambda x: x.amax(1), (random(270, 1001, dtype=dtype),))
        yield Case("norms", lambda x: F.layer_norm(x, (601,)).softmax(1), (random(500, 601, dtype=dtype),))
        yield Case("columns", normalized, (random(5003, 65, dtype=dtype), random(65, dtype=dtype)))
        images, colors = random(3, 33, 17, 19, dtype=dtype), random(2, 3, 33, 31, dtype=dtype)
        yield Case("convolutions", strided, (images, random(65, 33, 3, 3, dtype=dtype)))
        yield Case("convolutions", grouped, (random(2, 32, 14, 14, dtype=dtype), random(64, 16, 3, 3, dtype=dtype)))
        yield Case("convolutions", strided, (colors, random(65, 3, 7, 7, dtype=dtype)))
        yield Case("transposes", turned, (random(5, 3, 61, 67, dtype=dtype),))
    yield Case("scatters", F.embedding, (torch.randint(0, 50, (300,)), random(50, 48)))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def drop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, dropout_p=0.25)


def normalized(x: Tensor, weight: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, None, training=True).relu()


def strided(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, stride=2, padding=2)


def grouped(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1, groups=2)


def turned(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).float().contiguous()


def find_kernels(case: Case, architecture: str) -> tuple[Question, ...]:
    """The kernels of a case, with what to run of each."""
    target = with_kernels(find_target(f"cuda:{architecture}"), [case.family])
    with ExitStack() as stack, library_ops(replace(NO_LIBRARIES, kernels=target.kernels)):
        captured = capture_joint(stack, case.function, case.args, None)
        module = import_graph(captured.graph_module, captured.signature)
        staged = stage_module(module, "min-cut", Progress())
        return find_questions(lower_to_linalg(staged.source.encode(), target, twins_alone=True, asking=True))


def write_works(architecture: str, everything: bool) -> list[dict[str, Any]]:
    """The work of each kernel, with its code."""
    questions = {q.text: q for case in make_cases() for q in find_kernels(case, architecture)}
    if missing := set(FAMILIES) - {q.family for q in questions.values()}:
        sys.exit(f"no case has kernels of {', '.join(missing)}")
    trials = [
        (question.text, tiles, trial)
        for question in questions.values()
        for tiles, trial in question.trials.items()
        if everything or tiles == question.unasked or "specialized" in tiles
    ]
    compiled = compile_kernels([run.launch.kernel for *_, trial in trials for run in trial.runs], architecture)
    return [{"what": f"{text}: {tiles}", "work": asdict(make_work(trial, compiled))} for text, tiles, trial in trials]


def run_works(works: Sequence[dict[str, Any]]) -> None:
    """Run each work once."""
    bench = Bench(torch.device("cuda", 0))
    for fields in works:
        print(fields["what"], flush=True)
        work: Work = read_plain(Work, fields["work"], "work")
        with bench.prepare(work, bench.make_inputs(work.inputs)) as prepared:
            prepared.results()
            torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description="Run kernels of retrograd's own under compute-sanitizer.")
    parser.add_argument("--all", action="store_true", help="with all tiles that are measured, too")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="one tool alone")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is not None:
        run_works(json.loads(options.run.read_text(encoding="utf-8")))
        return 0
    if not torch.cuda.is_available():
        sys.exit("no CUDA device to run on")
    sanitizer = shutil.which("compute-sanitizer") or SANITIZER
    if not Path(sanitizer).exists():
        sys.exit("compute-sanitizer is not found: install CUDA's toolkit, and put its bin folder on PATH")
    works = write_works(cuda_architecture(*torch.cuda.get_device_capability(0)), options.all)
    print(f"{len(works)} kernels", flush=True)
    status = 0
    with tempfile.TemporaryDirectory(prefix="retrograd-sanitize-") as folder:
        path = Path(folder) / "works.json"
        path.write_text(json.dumps(works), encoding="utf-8")
        for tool in options.tool or TOOLS:
            start = time.perf_counter()
            command = [sanitizer, "--tool", tool, "--error-exitcode", str(_FOUND), "--print-limit", "20"]
            command += [sys.executable, __file__, "--run", str(path)]
            # A buffer ends where its memory does, and not where a cache of memory rounds it up to.
            ended = subprocess.run(
                command, env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, capture_output=True, text=True
            )
            said = [line for line in (ended.stdout + ended.stderr).splitlines() if line.startswith("=========")]
            print(f"{tool}: status {ended.returncode}, {time.perf_counter() - start:.0f} s", *said[-60:], sep="\n")
            if ended.returncode not in (0, _FOUND):
                print(ended.stderr[-3000:])
            status |= ended.returncode
    return int(bool(status))


if __name__ == "__main__":
    sys.exit(main())
