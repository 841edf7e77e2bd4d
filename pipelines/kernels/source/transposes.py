# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Transposes of many matrices, in Triton."""

import triton
import triton.language as tl


@triton.jit
def transpose(x, y, rows, columns, BR: tl.constexpr, BC: tl.constexpr):
    """``y[b, c, r] = x[b, r, c]``, in the type of ``y``: a tile of ``BR`` x ``BC`` by each program, of matrix number
    ``program_id(1)``."""
    tiles = tl.cdiv(rows, BR)
    row = tl.program_id(0) % tiles * BR + tl.arange(0, BR)
    column = tl.program_id(0) // tiles * BC + tl.arange(0, BC)
    start = tl.program_id(1).to(tl.int64) * rows * columns
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + start + row[:, None] * columns + column[None, :], mask=inside)
    turned = tl.trans(value).to(y.dtype.element_ty)
    tl.store(y + start + column[:, None] * rows + row[None, :], turned, mask=tl.trans(inside))
