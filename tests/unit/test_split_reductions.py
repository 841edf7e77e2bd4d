# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Into how many parts reductions are split: as IREE 3.13 splits them."""

import pytest

from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.pipelines.analysis.layout.op_parts import find_reduction_parts
from retrograd.pipelines.analysis.partition.read_graph import read_joint


@pytest.mark.parametrize(
    ("shape", "axes", "parts"),
    [
        ((1023, 64), {0}, 1),
        ((1024, 64), {0}, 32),
        ((1536, 64), {0}, 32),
        ((40, 32, 64), {0, 1}, 20),
        ((8, 128, 64), {0, 1}, 32),
        ((8, 14, 14, 64), {0, 1, 2}, 16),
        ((32, 64, 16, 16), {0, 2, 3}, 64),
        ((3, 5, 7, 11, 13), {0, 1, 2, 3}, 15),
        ((4096,), {0}, 64),
        ((1 << 22, 4), {0}, 4096),
        # An axis of size 1 is none.
        ((1, 1024, 64), {1}, 32),
        ((1 << 14, 1), {0}, 128),
        # The outermost axis is kept; there are few terms; nothing is reduced.
        ((8, 2048, 64), {1}, 1),
        ((8, 3, 16, 128), {0, 2}, 1),
        ((1024, 64), set(), 1),
        ((), set(), 1),
    ],
)
def test_reductions_over_the_outermost_axis_are_split(shape: tuple[int, ...], axes: set[int], parts: int) -> None:
    assert find_reduction_parts(shape, axes) == parts


JOINT = """
func.func @joint(%x: !torch.vtensor<[8,128,64],f32> {{bwd.role = "input"}}, %n: !torch.int {{bwd.role = "size"}})
    -> (!torch.vtensor<{1},f32> {{bwd.role = "output"}}) {{
  %a = torch.constant.int 0
  %b = torch.constant.int -2
  %no = torch.constant.bool false
  %none = torch.constant.none
  {0}
  return %y : !torch.vtensor<{1},f32>
}}
"""
SUM = "%y = torch.aten.sum.dim_IntList %x, {0}, %no, %none : !torch.vtensor<[8,128,64],f32>, {1}, !torch.bool, "
SUM += "!torch.none -> !torch.vtensor<{2},f32>"
LIST = "%l = torch.prim.ListConstruct {} : ({}) -> !torch.list<int>\n"


@pytest.mark.parametrize(
    ("lines", "shape", "parts"),
    [
        (LIST.format("%a, %b", "!torch.int, !torch.int") + SUM.format("%l", "!torch.list<int>", "[64]"), "[64]", 32),
        (LIST.format("%b", "!torch.int") + SUM.format("%l", "!torch.list<int>", "[8,64]"), "[8,64]", 1),
        (LIST.format("%n", "!torch.int") + SUM.format("%l", "!torch.list<int>", "[8,64]"), "[8,64]", 1),
        (SUM.format("%none", "!torch.none", "[]"), "[]", 256),
        (
            "%y = torch.aten.sum %x, %none : !torch.vtensor<[8,128,64],f32>, !torch.none -> !torch.vtensor<[],f32>",
            "[]",
            256,
        ),
    ],
)
def test_axes_are_read_from_the_op(lines: str, shape: str, parts: int) -> None:
    context = make_context()
    with context, ir.Location.unknown():
        module = ir.Module.parse(JOINT.format(lines, shape))
        read = read_joint(next(iter(module.body.operations)).operation)
    assert next(op.parts for op in read.graph.ops if op.name.startswith("torch.aten.sum")) == parts
