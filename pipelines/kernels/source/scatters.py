# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sums of rows that go to the same place, in Triton: the gradient of an embedding. Twice the same bits."""

import triton
import triton.language as tl


@triton.jit
def rank(rows, order, count, BI: tl.constexpr, BJ: tl.constexpr):
    """order: the numbers 0 to ``count``, sorted by what rows has there, those of one row as they come."""
    i = tl.program_id(0) * BI + tl.arange(0, BI)
    mine = tl.load(rows + i, mask=i < count, other=0)
    before = tl.zeros((BI,), tl.int32)
    for start in range(0, count, BJ):
        j = start + tl.arange(0, BJ)
        other = tl.load(rows + j, mask=j < count, other=9223372036854775807)
        smaller = other[None, :] < mine[:, None]
        earlier = (other[None, :] == mine[:, None]) & (j[None, :] < i[:, None])
        before += tl.sum((smaller | earlier).to(tl.int32), 1)
    tl.store(order + before, i, mask=i < count)


@triton.jit
def segments(order, rows, updates, table, count, width, BW: tl.constexpr, BR: tl.constexpr):
    """Adds to each row of table the updates of that row, in their order: the program of the first of them does."""
    at = tl.program_id(0)
    column = tl.program_id(1) * BW + tl.arange(0, BW)
    fits = column < width
    row = tl.load(rows + tl.load(order + at))
    before = tl.load(rows + tl.load(order + tl.maximum(at - 1, 0)))
    if (at == 0) | (before != row):
        to = table + row * width + column
        total = tl.load(to, mask=fits, other=0.0).to(tl.float32)
        more = True
        while more:
            following = at + tl.arange(0, BR)
            number = tl.load(order + following, mask=following < count, other=0)
            same = (following < count) & (tl.load(rows + number) == row)
            update = updates + number.to(tl.int64)[:, None] * width + column[None, :]
            total += tl.sum(tl.load(update, mask=same[:, None] & fits[None, :], other=0.0).to(tl.float32), 0)
            at += BR
            more = tl.sum(same.to(tl.int32), 0) == BR
        tl.store(to, total.to(table.dtype.element_ty), mask=fits)
