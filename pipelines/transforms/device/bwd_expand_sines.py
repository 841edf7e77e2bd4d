# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-expand-sines``: sines and cosines on a CPU, of arguments of any size."""

from __future__ import annotations

from functools import cache

from retrograd.dialects import ir
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.copies import replace_by_forms

# 1 / (2 pi) in parts of 28 bits, so that a part times a number in f32, of 24 bits, is exact in f64; and from the third
# part on also all that is left, in 53 bits.
_PARTS = (
    0.15915494225919247,
    8.327028684640414e-10,
    5.69002511952534e-19,
    6.3170650472507054e-27,
    4.170716914254881e-35,
)
_TAILS = (5.69002518269599e-19, 6.317065088957875e-27, 4.17071691715206e-35, 2.897178338357036e-44)
# From each of these on one more part gives whole turns alone, and is left out.
_LIMITS = (2.0**53, 2.0**81, 2.0**109)
# Added to a number below 2**51 and taken off again it leaves a whole one, whose last bits are the sum's.
_SHIFT = 1.5 * 2.0**52
# How many quarters of a turn ahead of the sine.
_AHEAD = {"math.sin": 0, "math.cos": 1}
_NARROW = ("f16", "bf16")


def _reduce() -> str:
    """MLIR for ``%angle``, f64 ``%wide`` less ``%near`` quarters of a turn, and whole turns; ``%count`` has the last
    bits of ``%near``.

    Of 1 / (2 pi) three parts are used, those that matter at this size. The quarters are taken off the largest share
    first: what is left after the others is as exact as it is small.
    """
    chosen = zip(_PARTS[:-1], _PARTS[1:], _TAILS, strict=True)
    lines = [f"%at{i} = arith.constant {limit!r} : f32" for i, limit in enumerate(_LIMITS)]
    lines += [f"%is_above{i} = arith.cmpf oge, %absolute, %at{i} : f32" for i in range(len(_LIMITS))]
    for name, parts in zip(("first", "second", "third"), zip(*chosen, strict=True), strict=True):
        lines += [f"%{name}{i} = arith.constant {part!r} : f64" for i, part in enumerate(parts)]
        for i in range(len(_LIMITS)):
            last = f"%{name}_to{i - 1}" if i else f"%{name}0"
            lines.append(f"%{name}_to{i} = arith.select %is_above{i}, %{name}{i + 1}, {last} : f64")
        lines.append(f"%{name} = arith.mulf %wide, %{name}_to{len(_LIMITS) - 1} : f64")
    for name in ("first", "second"):
        lines += [
            f"%{name}_up = arith.addf %{name}, %shift : f64",
            f"%{name}_even = arith.subf %{name}_up, %shift : f64",
        ]
        lines.append(f"%{name}_share = arith.subf %{name}, %{name}_even : f64")
    return "\n  ".join([*lines, _QUARTERS.strip()])


_QUARTERS = """
  %both = arith.addf %first_share, %second_share : f64
  %turns = arith.addf %both, %third : f64
  %quarters = arith.mulf %turns, %four : f64
  %quarters_up = arith.addf %quarters, %shift : f64
  %near = arith.subf %quarters_up, %shift : f64
  %off = arith.mulf %near, %quarter : f64
  %rest0 = arith.subf %first_share, %off : f64
  %rest1 = arith.addf %rest0, %second_share : f64
  %rest = arith.addf %rest1, %third : f64
  %angle = arith.mulf %rest, %two_pi : f64
  %bits = arith.bitcast %quarters_up : f64 to i64
  %count = arith.trunci %bits : i64 to i32
"""


@cache
def _form(type_: str, ahead: int) -> str:
    """A function of one number of ``type_``: its sine, ``ahead`` quarters of a turn on."""
    narrow = type_ in _NARROW
    widened = f"%x = arith.extf %given : {type_} to f32" if narrow else ""
    narrowed = f"%result = arith.truncf %value : f32 to {type_}" if narrow else ""
    # Of what is that small the sine is the number itself: a negative zero, and what f64 would round.
    small = "" if ahead else "%value = arith.select %is_small, %x, %signed : f32"
    return f"""
func.func @form({"%given" if narrow else "%x"}: {type_}) -> {type_} {{
  %shift = arith.constant {_SHIFT!r} : f64
  %four = arith.constant 4.0 : f64
  %quarter = arith.constant 0.25 : f64
  %two_pi = arith.constant 6.283185307179586 : f64
  %half = arith.constant -0.5 : f32
  %one = arith.constant 1.0 : f32
  %limit = arith.constant 2.44140625e-4 : f32
  %ahead = arith.constant {ahead} : i32
  %bit0 = arith.constant 1 : i32
  %bit1 = arith.constant 2 : i32
  %zero = arith.constant 0 : i32
  %s7 = arith.constant -1.9515295891e-4 : f32
  %s5 = arith.constant 8.3321608736e-3 : f32
  %s3 = arith.constant -1.6666654611e-1 : f32
  %c8 = arith.constant 2.443315711809948e-5 : f32
  %c6 = arith.constant -1.388731625493765e-3 : f32
  %c4 = arith.constant 4.166664568298827e-2 : f32
  {widened}
  %wide = arith.extf %x : f32 to f64
  %absolute = math.absf %x : f32
  {_reduce()}
  %z = arith.truncf %angle : f64 to f32
  %square = arith.mulf %z, %z : f32
  %sine7 = math.fma %s7, %square, %s5 : f32
  %sine5 = math.fma %sine7, %square, %s3 : f32
  %sine3 = arith.mulf %sine5, %square : f32
  %sine = math.fma %sine3, %z, %z : f32
  %cosine8 = math.fma %c8, %square, %c6 : f32
  %cosine6 = math.fma %cosine8, %square, %c4 : f32
  %cosine4 = math.fma %cosine6, %square, %half : f32
  %cosine = math.fma %cosine4, %square, %one : f32
  %quadrant = arith.addi %count, %ahead : i32
  %bit_odd = arith.andi %quadrant, %bit0 : i32
  %is_odd = arith.cmpi ne, %bit_odd, %zero : i32
  %size = arith.select %is_odd, %cosine, %sine : f32
  %bit_negative = arith.andi %quadrant, %bit1 : i32
  %is_negative = arith.cmpi ne, %bit_negative, %zero : i32
  %negated = arith.negf %size : f32
  {"%value" if ahead else "%signed"} = arith.select %is_negative, %negated, %size : f32
  %is_small = arith.cmpf olt, %absolute, %limit : f32
  {small}
  {narrowed}
  return {"%result" if narrow else "%value"} : {type_}
}}
"""


class BwdExpandSines(ModulePass):
    """Writes ``math.sin`` and ``math.cos`` of f32, bf16 and f16 as polynomials of an angle that is reduced exactly.

    IREE's own form for a CPU has an absolute error of 1.6e-7 within one turn, all of a sine's digits near zero; it
    takes multiples of pi off as f32 has it, so that of 1e4 the error is 3e-4, of 1e8 no digit is right, and from 1e12
    on the result is infinite. This form's error is below 1.5 units in the last place, for all numbers. GPUs have
    functions of their own.

    Source: M. Payne and R. Hanek, Radian reduction for trigonometric functions, SIGNUM 18 (1983), with parts of 1 / pi
    as f64 numbers; S. L. Moshier, Cephes, ``single/sinf.c`` (the polynomials).
    """

    description = "Write sine and cosine so that they hold for large arguments, for a CPU"

    def apply(self, module: ir.Operation) -> None:
        replace_by_forms(module, self.name, _form_of)


def _form_of(op: ir.Operation) -> str | None:
    type_ = str(op.results[0].type) if op.name in _AHEAD else ""
    return _form(type_, _AHEAD[op.name]) if type_ in ("f32", *_NARROW) else None
