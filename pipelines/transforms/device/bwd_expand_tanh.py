# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-expand-tanh``: hyperbolic tangents on a CPU, with the digits that their gradients need."""

from __future__ import annotations

from retrograd.dialects import ir
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.copies import replace_by_forms

_TANH = "math.tanh"

# Near zero an odd polynomial, else 1 - 2 e / (1 + e) with e = exp(-2 |x|), of x's sign: what is taken from one is
# small, and its errors are smaller.
_FORM = """
func.func @tanh(%x: f32) -> f32 {
  %one = arith.constant 1.0 : f32
  %minus_two = arith.constant -2.0 : f32
  %limit = arith.constant 0.625 : f32
  %c3 = arith.constant -3.33332819422e-1 : f32
  %c5 = arith.constant 1.33314422036e-1 : f32
  %c7 = arith.constant -5.37397155531e-2 : f32
  %c9 = arith.constant 2.06390887954e-2 : f32
  %c11 = arith.constant -5.70498872745e-3 : f32
  %size = math.absf %x : f32
  %doubled = arith.mulf %size, %minus_two : f32
  %e = math.exp %doubled : f32
  %above = arith.addf %e, %e : f32
  %below = arith.addf %one, %e : f32
  %missing = arith.divf %above, %below : f32
  %far_size = arith.subf %one, %missing : f32
  %far = math.copysign %far_size, %x : f32
  %square = arith.mulf %x, %x : f32
  %s9 = math.fma %c11, %square, %c9 : f32
  %s7 = math.fma %s9, %square, %c7 : f32
  %s5 = math.fma %s7, %square, %c5 : f32
  %s3 = math.fma %s5, %square, %c3 : f32
  %p3 = arith.mulf %s3, %square : f32
  %near = math.fma %p3, %x, %x : f32
  %is_near = arith.cmpf olt, %size, %limit : f32
  %value = arith.select %is_near, %near, %far : f32
  return %value : f32
}
"""


class BwdExpandTanh(ModulePass):
    """Writes ``math.tanh`` of f32 as a polynomial near zero and a quotient of exponentials elsewhere.

    IREE's own form for a CPU, a quotient of polynomials, has an absolute error of 2.7e-7, four units in the last place
    of a result near one. Its gradient, 1 - tanh(x)**2, is no larger than a few hundreds of these there. This form's
    error is below 1e-7 everywhere. GPUs have a function of their own.

    Source: S. L. Moshier, Cephes, ``single/tanhf.c`` (the polynomial, and where it ends).
    """

    description = "Write tanh with the digits that its gradient needs, for a CPU"

    def apply(self, module: ir.Operation) -> None:
        replace_by_forms(module, self.name, _form_of)


def _form_of(op: ir.Operation) -> str | None:
    return _FORM if op.name == _TANH and isinstance(op.results[0].type, ir.F32Type) else None
