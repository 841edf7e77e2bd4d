# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How well the partitioner foresees memory: the peak that liveness works out on the joint graph, before anything is
lowered, beside the peak of the buffers that IREE lays out. Nothing is compiled to the end, and nothing runs.

python benchmarks/predict_memory.py
python benchmarks/predict_memory.py --models gpt2 unet --size test
python benchmarks/predict_memory.py --in-order
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from models import MODELS, SIZES, Case

from retrograd.dialects import ir
from retrograd.frontend.doors.capture import capture_joint
from retrograd.frontend.preparation.importer import import_graph
from retrograd.pipelines.devices.targets import CPU
from retrograd.pipelines.stages.peaks import step_peak
from retrograd.pipelines.stages.staged import Progress, stage_module
from retrograd.pipelines.toolchain.executable import measure_scratch
from retrograd.pipelines.toolchain.lowering import lower_to_linalg

POLICIES = ("default", "min-cut")


@dataclass(frozen=True)
class Prediction:
    """Peaks of a step in bytes: by liveness on the partitioned graph, and by IREE's layout."""

    model: str
    policy: str
    planned: int
    predicted: int

    @property
    def ratio(self) -> float:
        """Of what was planned with to what IREE lays out."""
        return self.planned / max(1, self.predicted)


def predict(name: str, case: Case, *, in_order: bool = False) -> Iterator[Prediction]:
    """Both peaks of ``case``, for each policy; ``in_order``: with kernels one at a time, as budgets try them too."""
    target = CPU.in_order() if in_order else CPU
    with contextlib.ExitStack() as stack:
        captured = capture_joint(stack, case.model, case.args, None)
        module = import_graph(captured.graph_module, captured.signature)
    source = module.operation.get_asm(enable_debug_info=True)
    for policy in POLICIES:
        with module.context, ir.Location.unknown():
            staged = stage_module(ir.Module.parse(source), policy, Progress(), in_order=in_order)
        scratch = measure_scratch(lower_to_linalg(staged.source.encode(), target, twins_alone=True), target)
        yield Prediction(name, policy, staged.partition["peak_bytes_planned"], step_peak(staged, scratch))


def describe(predictions: Sequence[Prediction]) -> str:
    """A line on all of them."""
    near = [sum(abs(p.ratio - 1) <= bound for p in predictions) for bound in (0.01, 0.05, 0.15)]
    return "within 1%: {} of {n}, within 5%: {} of {n}, within 15%: {} of {n}".format(*near, n=len(predictions))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare planned peaks of memory with those that IREE lays out.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--size", choices=SIZES, default="bench")
    parser.add_argument("--in-order", action="store_true", help="with kernels one at a time, as budgets try them too")
    options = parser.parse_args(arguments)
    found: list[Prediction] = []
    print("| model | partition | planned | laid out | ratio |\n| --- | --- | ---: | ---: | ---: |")
    for name in options.models:
        for prediction in predict(name, MODELS[name].make(options.size), in_order=options.in_order):
            found.append(prediction)
            sizes = f"{prediction.planned:,} | {prediction.predicted:,} | {prediction.ratio:.3f}"
            print(f"| {name} | {prediction.policy} | {sizes} |", flush=True)
    print(f"\n{describe(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
