# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Ops along the same rows as Triton's interpreter runs their kernels, launched as their plans say: a program for a
process of its own, in which ``TRITON_INTERPRET`` is set. It fails where they are not near to float64."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from interpreted_attention import mend_interpreter
from interpreted_columns import run
from torch import Tensor

from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.pipelines.kernels.norms import NormPlan, Norms

TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# The interpreter cuts off what bfloat16 has no digits for.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 5e-3}
# Sequences, their length, the length of rows: sizes that no tile divides.
SIZES = ((3, 35, 2600), (4096, 1, 70))
MAPS = {
    "whole": "affine_map<(d0, d1, d2) -> (d0, d1, d2)>",
    "row": "affine_map<(d0, d1, d2) -> (d0, d1, 0)>",
    "column": "affine_map<(d0, d1, d2) -> (d2)>",
    "place": "affine_map<(d0, d1, d2) -> (d1, d2)>",
    "sequence": "affine_map<(d0, d1, d2) -> (d0, 0, d2)>",
}


def write_generic(name: str, maps: str, kinds: str, inputs: Sequence[tuple[str, str]], out: str, body: str) -> str:
    """A ``linalg.generic``: ``out`` is what it begins with, and its type; ``body`` takes %a, %b, %c and %o."""
    listed = ", ".join(MAPS[map_] for map_ in maps.split())
    iterators = ", ".join({"p": '"parallel"', "r": '"reduction"'}[kind] for kind in kinds)
    start, type_ = out.split(":")
    elements = [given.split("x")[-1].rstrip(">") for _, given in inputs]
    arguments = ", ".join(f"%{n}: {element}" for n, element in zip("abc", elements, strict=False))
    return f"""
  %{name} = linalg.generic {{indexing_maps = [{listed}], iterator_types = [{iterators}]}}
      ins({", ".join(v for v, _ in inputs)} : {", ".join(t for _, t in inputs)}) outs({start} : {type_}) {{
  ^bb0({arguments}, %o: {type_.split("x")[-1].rstrip(">")}):
    {body}
  }} -> {type_}"""


def write_module(batch: int, length: int, columns: int) -> str:
    """The squares of how far elements lie below their row's maximum, as shares of the row's, times a factor of each
    column, of x plus what a place and a sequence have; the same rounded; the maximum; sums down columns of it and of
    x."""
    x, r, c = (f"tensor<{shape}xf32>" for shape in (f"{batch}x{length}x{columns}", f"{batch}x{length}x1", columns))
    h, place = x.replace("f32", "bf16"), f"tensor<{length}x{columns}xf32>"
    own, flat = f"tensor<{batch}x1x{columns}xf32>", f"tensor<{batch * length}x{columns}xbf16>"
    ops = [
        write_generic("s", "whole place sequence whole", "ppp", [("%x", h), ("%p", place), ("%q", own)], f"%e:{x}",
                      "%1 = arith.extf %a : bf16 to f32\n%2 = arith.addf %1, %b : f32\n"
                      "%3 = arith.addf %2, %c : f32\nlinalg.yield %3 : f32"),
        write_generic("m", "whole row", "ppr", [("%s", x)], f"%least:{r}",
                      "%1 = arith.maximumf %a, %o : f32\nlinalg.yield %1 : f32"),
        write_generic("y", "whole row whole", "ppp", [("%s", x), ("%m", r)], f"%e:{x}",
                      "%1 = arith.subf %a, %b : f32\n%2 = math.fpowi %1, %two : f32, i64\nlinalg.yield %2 : f32"),
        write_generic("t", "whole row", "ppr", [("%y", x)], f"%zeros:{r}",
                      "%1 = arith.addf %a, %o : f32\nlinalg.yield %1 : f32"),
        write_generic("d", "whole whole", "ppp", [("%t", r)], f"%er:{r}",
                      "%1 = math.rsqrt %a : f32\n%2 = math.fpowi %1, %two : f32, i64\nlinalg.yield %2 : f32"),
        write_generic("z", "whole row column whole", "ppp", [("%y", x), ("%d", r), ("%w", c)], f"%e:{x}",
                      "%1 = arith.mulf %a, %b : f32\n%2 = arith.mulf %1, %c : f32\nlinalg.yield %2 : f32"),
        write_generic("b", "whole whole", "ppp", [("%z", x)], f"%eh:{h}",
                      "%1 = arith.truncf %a : f32 to bf16\nlinalg.yield %1 : bf16"),
        write_generic("g", "whole column", "rrp", [("%z", x)], f"%none:{c}",
                      "%1 = arith.addf %a, %o : f32\nlinalg.yield %1 : f32"),
        write_generic("k", "whole column", "rrp", [("%x", h)], f"%none:{c}",
                      "%1 = arith.extf %a : bf16 to f32\n%2 = arith.addf %1, %o : f32\nlinalg.yield %2 : f32"),
    ]  # fmt: skip
    return f"""
func.func @f(%x: {h}, %p: {place}, %q: {own}, %w: {c}) -> ({x}, {flat}, {r}, {c}, {c}) {{
  %zero = arith.constant 0.0 : f32
  %two = arith.constant 2 : i64
  %low = arith.constant 0xFF800000 : f32
  %e = tensor.empty() : {x}
  %eh = tensor.empty() : {h}
  %er = tensor.empty() : {r}
  %ec = tensor.empty() : {c}
  %least = linalg.fill ins(%low : f32) outs(%er : {r}) -> {r}
  %zeros = linalg.fill ins(%zero : f32) outs(%er : {r}) -> {r}
  %none = linalg.fill ins(%zero : f32) outs(%ec : {c}) -> {c}{"".join(ops)}
  %f = tensor.collapse_shape %b [[0, 1], [2]] : {h} into {flat}
  return %z, %f, %m, %g, %k : {x}, {flat}, {r}, {c}, {c}
}}
"""


def compute(x: Tensor, p: Tensor, q: Tensor, w: Tensor) -> list[Tensor]:
    """What the module's function gives."""
    sums = x.double() + p.double() + q.double()
    most = sums.amax(-1, keepdim=True)
    squares = (sums - most).square()
    z = squares / squares.sum(-1, keepdim=True) * w.double()
    return [z, z, most, z.sum((0, 1)), x.double().sum((0, 1))]


def run_plan(text: str, tensors: Sequence[Tensor], folder: Path) -> list[Tensor]:
    """What the one plan for a function gives, in the order of the function's results."""
    with make_context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        block = module.body.operations[0].regions[0].blocks[0]
        family = Norms("sm_90")
        (plan,) = (found for view in list(block.operations) if (found := family.plan(view.operation)) is not None)
        assert isinstance(plan, NormPlan)
        values = dict(zip(block.arguments, tensors, strict=True))
        results = [plan.group.root(value) for value in block.operations[len(block.operations) - 1].operands]
        first, last = plan.launched
        made = []
        for op in plan.group.given:
            type_ = ir.RankedTensorType(op.op.results[0].type)
            shape = [first.grid[0], type_.shape[-1]] if op in plan.sums else list(type_.shape)
            made.append(torch.full(shape, math.nan, dtype=TYPES[op.element]))
        run(first, [values[value] for value in plan.group.inputs], made, folder)
        by_value = {op.op.results[0]: tensor for op, tensor in zip(plan.group.given, made, strict=True)}
        sums = [torch.full(by_value[op.op.results[0]].shape[1:], math.nan) for op in plan.sums]
        run(last, [by_value[op.op.results[0]] for op in plan.sums], sums, folder)
        by_value |= {op.op.results[0]: tensor for op, tensor in zip(plan.sums, sums, strict=True)}
        assert set(results) == set(by_value), "all is one kernel, which writes what is read, and nothing else"
        return [by_value[value] for value in results]


def main() -> None:
    """Check all sizes."""
    mend_interpreter()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        for batch, length, columns in SIZES:
            x, p = torch.randn(batch, length, columns).bfloat16(), torch.randn(length, columns)
            args = x, p, torch.randn(batch, 1, columns), torch.randn(columns)
            found = run_plan(write_module(batch, length, columns), args, Path(folder))
            for given, exact in zip(found, compute(*args), strict=True):
                error = float((given.double().reshape(exact.shape) - exact).norm() / exact.norm())
                assert error < TOLERANCES[given.dtype], (batch, length, columns, error)


if __name__ == "__main__":
    main()
