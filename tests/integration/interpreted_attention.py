# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels of attention as Triton's interpreter runs them, launched as their plans say: a program for a process of its
own, in which ``TRITON_INTERPRET`` is set. It fails where they are not near to float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton.runtime.interpreter as interpreter
from torch import Tensor

from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.frontend.layers.dropped_attention import attention
from retrograd.pipelines.kernels.attention import (
    ATTENTION,
    BACKWARD,
    DROPPED,
    DROPPED_BACKWARD,
    MASKED_BACKWARD,
    Step,
    find_grid,
    read_steps,
    write_kernel,
)
from retrograd.pipelines.kernels.attention_tiles import choose_tile
from retrograd.pipelines.kernels.source import attention as source

TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3}
# Numbers in front of the heads of a row, where these are a part of it.
BEFORE = 8
ELEMENTS = {torch.float32: "f32", torch.float16: "f16"}


@dataclass(frozen=True)
class Case:
    """Sizes of a call, its mask (``bias``, ``padding``, ``rows`` or none), and whether heads lie behind rows, as in the
    product that they are a part of; the chance of dropout, of which numbers are those of stream 3, and whether the
    mask has a gradient."""

    batch: int
    heads: int
    shared: int
    rows: int
    columns: int
    width: int
    mask: str = ""
    causal: bool = False
    turned: bool = False
    dropout: float = 0.0
    learned: bool = False


CASES = (
    Case(1, 2, 2, 128, 128, 16),
    Case(1, 2, 1, 150, 170, 24, causal=True, turned=True),
    Case(2, 2, 1, 33, 150, 16, "bias", causal=True),
    Case(2, 1, 1, 40, 70, 20, "padding", turned=True),
    Case(1, 2, 2, 35, 33, 16, "rows"),
    Case(1, 1, 1, 1, 1, 8, causal=True),
    Case(1, 2, 1, 70, 75, 16, causal=True, dropout=0.3),
    Case(1, 2, 2, 35, 130, 20, "bias", turned=True, dropout=0.6, learned=True),
    Case(1, 2, 1, 70, 140, 16, "bias", causal=True, dropout=0.2, learned=True),
)
# Types differ in how products and exponentials are rounded, which masks, causal rows and dropout have in common.
IN_HALF = (CASES[1], CASES[3], CASES[6])
STREAM = 3


def read_index(tensor: Any) -> int:
    """A number of the interpreter's as Python's: its own way asks for arrays of no axes, which programs' are not."""
    return int(tensor.handle.data.item())


def mend_interpreter() -> None:
    """Have loops run between numbers that depend on the program."""
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", read_index)

    interpreter._patch_lang_tensor = patch_tensor


def names_of(case: Case) -> tuple[str, str]:
    """The ops of a case."""
    if case.learned:
        return DROPPED, MASKED_BACKWARD
    return (DROPPED, DROPPED_BACKWARD) if case.dropout else (ATTENTION, BACKWARD)


def write_module(case: Case, mask: list[int], element: str) -> str:
    """Attention and its gradients as ops, on arguments and for results that lie as the case has them."""
    shapes = {"q": [case.batch, case.heads, case.rows, case.width]}
    shapes["k"] = shapes["v"] = [case.batch, case.shared, case.columns, case.width]
    shapes["dout"] = shapes["out"] = shapes["q"]
    lines: list[str] = []

    def type_of(shape: list[int], of: str = element) -> str:
        return f"tensor<{'x'.join([*map(str, shape), of])}>"

    def turned(shape: list[int]) -> list[int]:
        return [shape[0], shape[2], shape[1], shape[3]] if case.turned else shape

    def turn(name: str, source: list[int], result: list[int]) -> str:
        if not case.turned:
            return f"%{name}"
        own = name.replace("#", "_")
        lines.append(f"%{own}_empty = tensor.empty() : {type_of(result)}")
        lines.append(
            f"%{own}_turned = linalg.transpose ins(%{name} : {type_of(source)}) "
            f"outs(%{own}_empty : {type_of(result)}) permutation = [0, 2, 1, 3]"
        )
        return f"%{own}_turned"

    def lie(shape: list[int]) -> list[int]:
        return [shape[0], shape[2], BEFORE + shape[1] * shape[3]] if case.turned else shape

    def part(name: str, shape: list[int]) -> str:
        """A part of the rows of an argument, as heads."""
        if case.turned:
            batch, heads, rows, width = shape
            flat = type_of([batch, rows, heads * width])
            lines.append(
                f"%{name}_flat = tensor.extract_slice %{name}[0, 0, {BEFORE}] [{batch}, {rows}, {heads * width}] "
                f"[1, 1, 1] : {type_of(lie(shape))} to {flat}"
            )
            lines.append(
                f"%{name}_split = tensor.expand_shape %{name}_flat [[0], [1], [2, 3]] output_shape "
                f"[{batch}, {rows}, {heads}, {width}] : {flat} into {type_of(turned(shape))}"
            )
        return turn(f"{name}_split" if case.turned else name, turned(shape), shape)

    taken = {name: part(name, shape) for name, shape in shapes.items()}
    q, k, lse, mask_type = (type_of(shapes["q"]), type_of(shapes["k"]), type_of(shapes["q"][:3], "f32"), type_of(mask))
    drawn = f", dropout = {case.dropout} : f32, stream = {STREAM} : i64" if case.dropout else ""
    how = f"{{causal = {str(case.causal).lower()}, scale = 0.25 : f32{drawn}}}"
    seed, seed_type = (", %seed", ", tensor<2xi64>") if case.dropout else ("", "")
    forward, backward = names_of(case)
    score = [type_of([*shapes["q"][:3], shapes["k"][2]])] if case.learned else []
    read = ", ".join(taken[name] for name in ("dout", "q", "k", "v", "out"))
    lines += [
        f'%o, %l = "{forward}"({taken["q"]}, {taken["k"]}, {taken["v"]}, %mask{seed}) {how}'
        f" : ({q}, {k}, {k}, {mask_type}{seed_type}) -> ({q}, {lse})",
        f'%d:{3 + len(score)} = "{backward}"({read}, %lse, %mask{seed}) {how}'
        f" : ({q}, {q}, {k}, {k}, {q}, {lse}, {mask_type}{seed_type}) -> ({', '.join([q, k, k, *score])})",
    ]
    results = {name: shapes[of] for name, of in {"o": "q", "d#0": "q", "d#1": "k", "d#2": "k"}.items()}
    values = ["%l", *(turn(name, shape, turned(shape)) for name, shape in results.items())]
    values += ["%d#3"] * case.learned
    types = ", ".join([lse, *(type_of(turned(shape)) for shape in results.values()), *score])
    arguments = [*(f"%{name}: {type_of(lie(shape))}" for name, shape in shapes.items()), f"%mask: {mask_type}"]
    body = "\n".join([*lines, f"return {', '.join(values)} : {types}"])
    return (
        f"func.func @f({', '.join([*arguments, f'%lse: {lse}', '%seed: tensor<2xi64>'])}) -> ({types}) {{\n{body}\n}}"
    )


def launch(step: Step, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run a step on arguments of the function, and on what steps before it gave, by name."""
    tile = choose_tile(step.kind, step.element, step.first.shape[3], "sm_90")
    kernel = write_kernel(step, tile)
    types = {"f32": torch.float32, "f16": torch.float16}
    given = {
        name: torch.full(ir.RankedTensorType(given.type).shape, math.nan, dtype=types[step.element])
        for name, given in step.given.items()
    }
    given |= {name: torch.full(step.first.shape[:3], math.nan) for name in step.given_sums}
    if step.scores is not None:
        type_ = ir.RankedTensorType(step.scores.type)
        given["dscore"] = torch.full(type_.shape, math.nan, dtype=types[str(type_.element_type)])
    taken = {name: tensors[name] for name in [*step.heads, *step.others, *step.sums]}
    function = getattr(source, kernel.function)
    # IREE passes arguments by their places: buffers, then numbers.
    names = [name for name in function.arg_names if name not in dict(kernel.constants)]
    assert names == [*(name for name, _ in kernel.pointers), *kernel.numbers], (names, kernel)
    assert list(taken | given) == [name for name, _ in kernel.pointers]
    numbers = dict(zip(kernel.numbers, step.numbers.values(), strict=True))
    function[find_grid(step, tile)](**taken, **given, **numbers, **dict(kernel.constants))
    return given


def make_mask(case: Case, dtype: torch.dtype) -> Tensor | None:
    """The mask of a case; of ``padding``, one of the batch has no columns at all."""
    match case.mask:
        case "bias":
            return torch.randn(case.heads, case.rows, case.columns, dtype=dtype)
        case "padding":
            mask = torch.zeros(case.batch, 1, 1, case.columns, dtype=dtype)
            mask[:, :, :, case.columns // 2 :] = -math.inf
            mask[0] = -math.inf
            return mask
        case "rows":
            return torch.randn(case.rows, 1, dtype=dtype)
    return None


def check(case: Case, dtype: torch.dtype) -> None:
    """Compare what the kernels of a case give with the formula in float64."""
    element, mask = ELEMENTS[dtype], make_mask(case, dtype)
    q = torch.randn(case.batch, case.heads, case.rows, case.width, dtype=dtype)
    k, v = (torch.randn(case.batch, case.shared, case.columns, case.width, dtype=dtype) for _ in range(2))
    dout = torch.randn_like(q)
    wide = tuple(t.double().requires_grad_() for t in (q, k, v))
    scores = (case.batch, case.heads, case.rows, case.columns)
    added = None if mask is None else mask.double().expand(scores).clone().requires_grad_()
    seed = torch.tensor([-0x123456789ABCDEF, 0x7654321])
    exact, exact_lse = attention(
        wide[0], wide[1], wide[2], case.dropout, case.causal, added, 0.25, seed=seed, stream=STREAM
    )
    leaves = (*wide, added) if added is not None else wide
    gradients = torch.autograd.grad(exact, leaves, dout.double())

    def turned(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).contiguous() if case.turned else tensor

    def lying(tensor: Tensor) -> Tensor:
        return F.pad(turned(tensor).flatten(2), (BEFORE, 0), value=math.nan) if case.turned else tensor

    tensors = {name: lying(t) for name, t in zip(("q", "k", "v", "dout"), (q, k, v, dout), strict=True)}
    tensors |= {"seeds": seed} | ({} if mask is None else {"mask": mask})
    with make_context() as context, ir.Location.unknown():
        context.allow_unregistered_dialects = True
        module = ir.Module.parse(write_module(case, [] if mask is None else list(mask.shape), element))
        ops = [view.operation for view in module.body.operations[0].regions[0].blocks[0].operations]
        forward, backward = (next(op for op in ops if op.name == name) for name in names_of(case))
        (step,) = read_steps(forward)
        first = launch(step, tensors)
        found = {**tensors, **first, "out": lying(turned(first["out"]))}
        for step in read_steps(backward):
            found |= launch(step, found)
    assert not [name for name in first if not torch.isfinite(first[name]).all()], (case, dtype)
    pairs = [(first["lse"], exact_lse.detach())]
    named = zip(("out", "dq", "dk", "dv"), (exact.detach(), *gradients), strict=False)
    pairs += [(turned({**found, **first}[name]), right) for name, right in named]
    pairs += [(found["dscore"], gradients[3])] if case.learned else []
    for mine, right in pairs:
        error = float((mine.double() - right).norm() / right.norm().clamp_min(0.5))
        assert error < TOLERANCES[dtype], (case, dtype, error)


def main() -> None:
    """Check all cases in float32, and some in float16."""
    mend_interpreter()
    torch.manual_seed(0)
    for dtype, cases in ((torch.float32, CASES), (torch.float16, IN_HALF)):
        for case in cases:
            check(case, dtype)


if __name__ == "__main__":
    main()
