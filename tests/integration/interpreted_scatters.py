# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rows added up where they go as Triton's interpreter runs the kernels, launched as their plans say: a program for a
process of its own, in which ``TRITON_INTERPRET`` is set. It fails where they are not near to float64."""

import torch
from interpreted_attention import mend_interpreter
from torch import Tensor

from retrograd.contract.trials import Buffer
from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.pipelines.kernels import scatters
from retrograd.pipelines.kernels.questions import Run
from retrograd.pipelines.kernels.scatters import ScatterPlan, Scatters
from retrograd.pipelines.kernels.source import scatters as source

# Updates, numbers of each, rows of the table, and the share that goes to one of them: ranked; sorted by two digits, the
# first of which is all that a smaller table has, in parts; without parts.
CASES = ((60, 20, 7, 0.0), (130, 33, 1000, 0.4), (40, 300, 40, 0.0))
# Small, since a program for each update is interpreted.
MOST_RANKED, CHUNK, BLOCK = 60, 48, 64
TYPES = {"i32": torch.int32, "f32": torch.float32}
TOLERANCE = 1e-6


def write_module(count: int, width: int, rows: int) -> str:
    """A scatter that adds up."""
    table, updates, places = f"tensor<{rows}x{width}xf32>", f"tensor<{count}x1x{width}xf32>", f"tensor<{count}x1xi64>"
    return f"""
func.func @f(%u: {updates}, %p: {places}, %t: {table}) -> {table} {{
  %r = "tm_tensor.scatter"(%u, %p, %t) ({{
  ^bb0(%new: f32, %old: f32):
    %s = arith.addf %old, %new : f32
    "tm_tensor.yield"(%s) : (f32) -> ()
  }}) {{dimension_map = array<i64: 0>, unique_indices = false, operandSegmentSizes = array<i32: 2, 1>}}
      : ({updates}, {places}, {table}) -> {table}
  return %r : {table}
}}
"""


def launch(run: Run, buffers: list[Tensor]) -> list[Tensor]:
    """Run a launch; gives what it gives."""
    kernel = run.launch.kernel
    given = [make_buffer(buffer) for buffer in run.given]
    taken = [buffers[number] for number in run.taken]
    named = dict(zip((name for name, _ in kernel.pointers), [*taken, *given], strict=True))
    numbers = dict(zip(kernel.numbers, run.launch.numbers, strict=True))
    getattr(source, kernel.function)[run.launch.grid](**named, **numbers, **dict(kernel.constants))
    return given


def make_buffer(buffer: Buffer) -> Tensor:
    """A buffer of numbers that nobody is to read."""
    return torch.full(buffer.shape, 12345, dtype=TYPES[buffer.element])


def check(count: int, width: int, rows: int, share: float) -> None:
    """Compare a table with that of float64."""
    updates, table = torch.randn(count, width), torch.randn(rows, width)
    places = torch.where(torch.rand(count) < share, rows - 1, torch.randint(0, rows, (count,)))
    exact = table.double().index_add(0, places, updates.double())
    with make_context() as context, ir.Location.unknown():
        context.allow_unregistered_dialects = True
        module = ir.Module.parse(write_module(count, width, rows))
        block = module.body.operations[0].regions[0].blocks[0]
        (plan,) = (p for p in map(Scatters("sm_90").plan, [view.operation for view in block.operations]) if p)
        assert isinstance(plan, ScatterPlan), plan
        buffers = [places, updates, table]
        for run in plan.runs():
            buffers += launch(run, buffers)
    error = float((table.double() - exact).norm() / exact.norm())
    assert error < TOLERANCE, (count, width, rows, error)


def main() -> None:
    """Check all cases."""
    mend_interpreter()
    scatters.MOST_RANKED, scatters._CHUNK, scatters._BLOCK = MOST_RANKED, CHUNK, BLOCK
    torch.manual_seed(0)
    for case in CASES:
        check(*case)


if __name__ == "__main__":
    main()
