# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels of convolutions as Triton's interpreter runs them, launched as their plans say: a program for a process of
its own, in which ``TRITON_INTERPRET`` is set. It fails where they are not near to float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from interpreted_attention import ELEMENTS, TOLERANCES, mend_interpreter
from torch import Tensor

from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.pipelines.kernels.convolution_tiles import ConvolutionTile
from retrograd.pipelines.kernels.convolutions import ConvolutionPlan
from retrograd.pipelines.kernels.source import convolutions as source

Pair = tuple[int, int]
_TYPES = {"f32": torch.float32, "f16": torch.float16}
# Of few elements, so that sizes are no multiples of it and sums have parts.
TILE = ConvolutionTile(64, 32, 32, 4, 2, 1.0)


@dataclass(frozen=True)
class Case:
    """Sizes of a convolution: images, their planes, groups, channels and filters of a group, taps, and the window."""

    images: int
    plane: Pair
    groups: int
    channels: int
    filters: int
    taps: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    parts: int = 2


CASES = (
    Case(2, (7, 9), 1, 20, 17, (3, 2), padding=(1, 1)),
    Case(1, (9, 10), 1, 16, 32, (3, 3), (2, 2), (1, 1)),
    # Runs: three colors, and a single one.
    Case(1, (9, 11), 1, 3, 18, (5, 7), (2, 2), (3, 3)),
    Case(1, (8, 9), 1, 1, 5, (2, 3)),
    Case(1, (13, 9), 2, 18, 17, (3, 2), (3, 1), (2, 0), (1, 2)),
    # Images that no window reaches to the end of, and more remainders of a stride than taps.
    Case(3, (4, 5), 1, 33, 17, (1, 1), (2, 3)),
    # One place, and a row.
    Case(5, (1, 1), 1, 16, 16, (1, 1), parts=1),
    Case(1, (1, 40), 1, 6, 8, (1, 3), padding=(0, 1), parts=2),
)


def write_module(case: Case, element: str, results: Pair) -> str:
    """A convolution and its gradients as ops."""
    (height, width), (high, wide) = case.plane, case.taps
    x = f"tensor<{case.images}x{height}x{width}x{case.groups * case.channels}x{element}>"
    w = f"tensor<{case.groups * case.filters}x{high}x{wide}x{case.channels}x{element}>"
    y = f"tensor<{case.images}x{results[0]}x{results[1]}x{case.groups * case.filters}x{element}>"
    how = f"{{stride = {[*case.stride]}, padding = {[*case.padding]}, dilation = {[*case.dilation]}}}"
    return f"""
func.func @f(%x: {x}, %w: {w}, %g: {y}) -> ({y}, {x}, {w}) {{
  %y = "bwd.convolution"(%x, %w) {how} : ({x}, {w}) -> {y}
  %dx = "bwd.convolution_input_gradient"(%g, %w) {how} : ({y}, {w}) -> {x}
  %dw = "bwd.convolution_filter_gradient"(%g, %x) {how} : ({y}, {x}) -> {w}
  return %y, %dx, %dw : {y}, {x}, {w}
}}"""


def launch(plan: ConvolutionPlan, tensors: dict[str, Tensor]) -> Tensor:
    """Run a plan's kernels."""
    kernel, numbers = plan.kernel(), plan.numbers()
    function = getattr(source, kernel.function)
    # IREE passes arguments by their places: buffers, then numbers.
    names = [name for name in function.arg_names if name not in dict(kernel.constants)]
    assert names == [*(name for name, _ in kernel.pointers), *kernel.numbers], (names, kernel)
    type_ = ir.RankedTensorType(plan.op.results[0].type)
    parts = plan.tile.parts
    (*taken, (given, element)) = kernel.pointers
    result = torch.full([parts, *type_.shape], math.nan, dtype=_TYPES[element])
    buffers = {name: tensors[name] for name, _ in taken} | {given: result}
    function[plan.grid()](**buffers, **numbers, **dict(kernel.constants))
    if parts == 1:
        return result[0]
    sums, size = plan.sum_launch(), math.prod(type_.shape)
    added = dict(sums.kernel.constants)
    total = torch.full(type_.shape, math.nan, dtype=_TYPES[plan.work.element])
    source.add_parts[sums.grid](parts=result, w=total, size=size, count=parts, **added)
    return total


def check(case: Case, dtype: torch.dtype) -> None:
    """Compare what the kernels of a case give with float64."""
    shape = (case.images, case.groups * case.channels, *case.plane)
    x = torch.randn(shape, dtype=dtype).double().requires_grad_()
    filters = (case.groups * case.filters, case.channels, *case.taps)
    w = torch.randn(filters, dtype=dtype).double().requires_grad_()
    exact = F.conv2d(x, w, None, case.stride, case.padding, case.dilation, case.groups)
    grad = torch.randn(exact.shape, dtype=dtype)
    wanted = [exact, *torch.autograd.grad(exact, (x, w), grad.double())]
    named = zip("xwy", (x, w, grad), strict=True)
    tensors = {name: value.detach().permute(0, 2, 3, 1).contiguous().to(dtype) for name, value in named}
    with make_context() as context, ir.Location.unknown():
        context.allow_unregistered_dialects = True
        module = ir.Module.parse(write_module(case, ELEMENTS[dtype], (exact.shape[2], exact.shape[3])))
        *ops, _ = (view.operation for view in module.body.operations[0].regions[0].blocks[0].operations)
        for op, right in zip(ops, wanted, strict=True):
            parts = case.parts if op.name.endswith("filter_gradient") else 1
            plan = ConvolutionPlan(op, "sm_90", replace(TILE, parts=parts))
            mine, right = launch(plan, tensors), right.detach().permute(0, 2, 3, 1)
            error = float((mine.double() - right).norm() / right.norm().clamp_min(0.1))
            assert error < TOLERANCES[dtype], (case, dtype, op.name, error)


def main() -> None:
    """Check all cases."""
    mend_interpreter()
    torch.manual_seed(0)
    for case in CASES:
        check(case, torch.float32)
    check(CASES[1], torch.float16)


if __name__ == "__main__":
    main()
