# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sums down columns as Triton's interpreter runs their kernels, launched as their plans say: a program for a process of
its own, in which ``TRITON_INTERPRET`` is set. It fails where they are not near to float64."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch
from interpreted_attention import mend_interpreter
from torch import Tensor

from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.pipelines.kernels.columns import ColumnPlan, Columns
from retrograd.pipelines.kernels.questions import Launch

# Images and rows of a matrix; sizes that no tile divides.
CASES = (((3, 35, 33, 80), "f16"), ((4100, 65), "f32"))
TYPES = {"f32": torch.float32, "f16": torch.float16}
TOLERANCE = 1e-6


def write_module(shape: tuple[int, ...], element: str) -> str:
    """Two sums: of what is greater than a number in one tensor, and of that times the other less a column's mean, plus
    what an image has for the channel."""
    rank, columns = len(shape), shape[-1]
    loops = ", ".join(f"d{axis}" for axis in range(rank))
    whole, last = f"affine_map<({loops}) -> ({loops})>", f"affine_map<({loops}) -> (d{rank - 1})>"
    image = f"affine_map<({loops}) -> (d0, d{rank - 1})>" if rank > 2 else last
    kinds = ", ".join(['"reduction"'] * (rank - 1) + ['"parallel"'])
    given, wide = (f"tensor<{'x'.join(map(str, [*shape, name]))}>" for name in (element, "f32"))
    mean = f"tensor<{columns}xf32>"
    own = f"tensor<{shape[0]}x{columns}xf32>" if rank > 2 else mean
    widen = f"arith.extf %a : {element} to f32" if element != "f32" else "arith.addf %a, %zero : f32"
    return f"""
func.func @f(%g: {given}, %x: {wide}, %m: {mean}, %i: {own}) -> ({mean}, {mean}) {{
  %zero = arith.constant 0.0 : f32
  %least = arith.constant -0.5 : {element}
  %none = arith.constant 0.0 : {element}
  %e = tensor.empty() : {mean}
  %fill = linalg.fill ins(%zero : f32) outs(%e : {mean}) -> {mean}
  %b = tensor.empty() : {given}
  %k = linalg.generic {{indexing_maps = [{whole}, {whole}],
      iterator_types = [{kinds.replace("reduction", "parallel")}]}} ins(%g : {given}) outs(%b : {given}) {{
  ^bb0(%a: {element}, %o: {element}):
    %1 = arith.cmpf ugt, %a, %least : {element}
    %2 = arith.select %1, %a, %none : {element}
    linalg.yield %2 : {element}
  }} -> {given}
  %s = linalg.generic {{indexing_maps = [{whole}, {last}], iterator_types = [{kinds}]}}
      ins(%k : {given}) outs(%fill : {mean}) {{
  ^bb0(%a: {element}, %o: f32):
    %1 = {widen}
    %2 = arith.addf %1, %o : f32
    linalg.yield %2 : f32
  }} -> {mean}
  %t = linalg.generic {{indexing_maps = [{whole}, {whole}, {last}, {image}, {last}], iterator_types = [{kinds}]}}
      ins(%k, %x, %m, %i : {given}, {wide}, {mean}, {own}) outs(%fill : {mean}) {{
  ^bb0(%a: {element}, %c: f32, %d: f32, %h: f32, %o: f32):
    %1 = {widen}
    %2 = arith.subf %c, %d : f32
    %3 = arith.mulf %1, %2 : f32
    %4 = arith.addf %3, %h : f32
    %5 = arith.addf %4, %o : f32
    linalg.yield %5 : f32
  }} -> {mean}
  return %s, %t : {mean}, {mean}
}}
"""


def write_moments(rows: int, columns: int) -> str:
    """The sums of columns, and of the squares of what is in them less their mean."""
    given, sums = f"tensor<{rows}x{columns}xf32>", f"tensor<{columns}xf32>"
    whole, last = "affine_map<(d0, d1) -> (d0, d1)>", "affine_map<(d0, d1) -> (d1)>"
    line = "affine_map<(d0) -> (d0)>"
    return f"""
func.func @f(%x: {given}) -> ({sums}, {sums}) {{
  %zero = arith.constant 0.0 : f32
  %count = arith.constant {float(rows)} : f32
  %e = tensor.empty() : {sums}
  %fill = linalg.fill ins(%zero : f32) outs(%e : {sums}) -> {sums}
  %s = linalg.generic {{indexing_maps = [{whole}, {last}], iterator_types = ["reduction", "parallel"]}}
      ins(%x : {given}) outs(%fill : {sums}) {{
  ^bb0(%a: f32, %o: f32):
    %1 = arith.addf %a, %o : f32
    linalg.yield %1 : f32
  }} -> {sums}
  %m = linalg.generic {{indexing_maps = [{line}, {line}], iterator_types = ["parallel"]}}
      ins(%s : {sums}) outs(%e : {sums}) {{
  ^bb0(%a: f32, %o: f32):
    %1 = arith.divf %a, %count : f32
    linalg.yield %1 : f32
  }} -> {sums}
  %t = linalg.generic {{indexing_maps = [{whole}, {last}, {last}], iterator_types = ["reduction", "parallel"]}}
      ins(%x, %m : {given}, {sums}) outs(%fill : {sums}) {{
  ^bb0(%a: f32, %b: f32, %o: f32):
    %1 = arith.subf %a, %b : f32
    %2 = arith.mulf %1, %1 : f32
    %3 = arith.addf %2, %o : f32
    linalg.yield %3 : f32
  }} -> {sums}
  return %s, %t : {sums}, {sums}
}}
"""


def write_scaled(rows: int, columns: int) -> str:
    """The sums of g, and of g times x less its row's mean over its row's deviation: gradients of layer norm."""
    given, ones, sums = f"tensor<{rows}x{columns}xf32>", f"tensor<{rows}x1xf32>", f"tensor<{columns}xf32>"
    whole, last = "affine_map<(d0, d1) -> (d0, d1)>", "affine_map<(d0, d1) -> (d1)>"
    row, first = "affine_map<(d0, d1) -> (d0)>", "affine_map<(d0, d1) -> (d0, 0)>"
    return f"""
func.func @f(%g: {given}, %x: {given}, %m: tensor<{rows}xf32>, %r: {ones}) -> ({sums}, {sums}) {{
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : {sums}
  %fill = linalg.fill ins(%zero : f32) outs(%e : {sums}) -> {sums}
  %b = tensor.empty() : {given}
  %k = linalg.generic {{indexing_maps = [{whole}, {row}, {first}, {whole}], iterator_types = ["parallel", "parallel"]}}
      ins(%x, %m, %r : {given}, tensor<{rows}xf32>, {ones}) outs(%b : {given}) {{
  ^bb0(%a: f32, %c: f32, %d: f32, %o: f32):
    %1 = arith.subf %a, %c : f32
    %2 = arith.mulf %1, %d : f32
    linalg.yield %2 : f32
  }} -> {given}
  %s = linalg.generic {{indexing_maps = [{whole}, {last}], iterator_types = ["reduction", "parallel"]}}
      ins(%g : {given}) outs(%fill : {sums}) {{
  ^bb0(%a: f32, %o: f32):
    %1 = arith.addf %a, %o : f32
    linalg.yield %1 : f32
  }} -> {sums}
  %t = linalg.generic {{indexing_maps = [{whole}, {whole}, {last}], iterator_types = ["reduction", "parallel"]}}
      ins(%g, %k : {given}, {given}) outs(%fill : {sums}) {{
  ^bb0(%a: f32, %c: f32, %o: f32):
    %1 = arith.mulf %a, %c : f32
    %2 = arith.addf %1, %o : f32
    linalg.yield %2 : f32
  }} -> {sums}
  return %s, %t : {sums}, {sums}
}}
"""


def run(launch: Launch, taken: list[Tensor], given: list[Tensor], folder: Path) -> None:
    """Launch a kernel that was written for one op."""
    kernel = launch.kernel
    path = folder / f"{kernel.label}.py"
    path.write_text(kernel.text, encoding="utf-8")
    spec = spec_from_file_location(kernel.label, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    buffers = dict(zip((name for name, _ in kernel.pointers), [*taken, *given], strict=True))
    numbers = dict(zip(kernel.numbers, launch.numbers, strict=True))
    getattr(module, kernel.function)[launch.grid](**buffers, **numbers, **dict(kernel.constants))


def run_plan(text: str, tensors: dict[str, Tensor], folder: Path) -> list[Tensor]:
    """What the one plan for a function's sums gives, which are two."""
    with make_context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        family = Columns("sm_90")
        block = module.body.operations[0].regions[0].blocks[0]
        plans = [family.plan(view.operation) for view in block.operations]
        (plan,) = (found for found in plans if found is not None)
        assert isinstance(plan, ColumnPlan) and len(plan.results) == 2
        names = dict(zip(block.arguments, tensors, strict=True))
        values = [tensors[names[buffer]] for buffer in plan.body.buffers]
        for launch in plan.launches(plan.tiles):
            given = [torch.full((launch.grid[1], plan.body.shape[-1]), math.nan) for _ in plan.results]
            run(launch, values, given, folder)
            values = given
    return [value[0] for value in values]


def compare(found: Sequence[Tensor], exact: Sequence[Tensor], case: object) -> None:
    """Fail where sums are not near to those of float64."""
    for mine, right in zip(found, exact, strict=True):
        error = float((mine.double() - right).norm() / right.norm())
        assert error < TOLERANCE, (case, error)


def check(shape: tuple[int, ...], element: str, folder: Path) -> None:
    """Compare the two sums with those of float64."""
    g, x = torch.randn(shape).to(TYPES[element]), torch.randn(shape)
    mean, own = torch.randn(shape[-1]), torch.randn(shape[0] if len(shape) > 2 else 1, shape[-1])
    tensors = {"g": g, "x": x, "m": mean, "i": own}
    values = run_plan(write_module(shape, element), tensors, folder)
    kept = torch.where(g > -0.5, g, 0).double()
    places = [*range(len(shape) - 1)]
    spread = own.double().reshape(own.shape[0], *[1] * (len(shape) - 2), shape[-1])
    exact = kept.sum(places), (kept * (x.double() - mean.double()) + spread).sum(places)
    compare(values, exact, (shape, element))


def check_moments(rows: int, columns: int, folder: Path) -> None:
    """Compare sums and squares with those of float64, of numbers that lie far from zero and close together."""
    x = torch.randn(rows, columns) + 30
    found = run_plan(write_moments(rows, columns), {"x": x}, folder)
    exact = x.double().sum(0), (x.double() - x.double().mean(0)).square().sum(0)
    compare(found, exact, (rows, columns))


def check_scaled(rows: int, columns: int, folder: Path) -> None:
    """Compare sums of what is scaled by row with those of float64."""
    g, x = torch.randn(rows, columns), torch.randn(rows, columns)
    m, r = torch.randn(rows), torch.rand(rows, 1) + 0.5
    found = run_plan(write_scaled(rows, columns), {"g": g, "x": x, "m": m, "r": r}, folder)
    scaled = (x.double() - m.double().unsqueeze(1)) * r.double()
    compare(found, (g.double().sum(0), (g.double() * scaled).sum(0)), (rows, columns))


def main() -> None:
    """Check all cases."""
    mend_interpreter()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        for shape, element in CASES:
            check(shape, element, Path(folder))
        check_moments(4100, 65, Path(folder))
        check_scaled(4100, 65, Path(folder))


if __name__ == "__main__":
    main()
