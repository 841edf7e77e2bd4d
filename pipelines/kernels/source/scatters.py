# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sums of rows that go to the same place, in Triton: the gradient of an embedding. Twice the same bits.

Places are ranked first: each against all others (``rank``), or where there are many of them digit by digit, from the
last on (``tally``, ``sum_before``, ``place``), after Satish, Harris, Garland, "Designing efficient sorting algorithms
for manycore GPUs", IPDPS 2009.
"""

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
def read_digit(rows, order, i, inside, shift, FIRST: tl.constexpr):
    """The number that is the i-th so far, and eight bits of what rows has there; 256 outside."""
    if FIRST:
        number = i
    else:
        number = tl.load(order + i, mask=inside, other=0)
    row = tl.load(rows + number, mask=inside, other=0)
    return number, tl.where(inside, ((row >> shift) & 255).to(tl.int32), 256)


@triton.jit
def tally(rows, order, counts, count, shift, blocks, FIRST: tl.constexpr, BI: tl.constexpr):
    """counts (256 x ``blocks``): how many of each BI places in turn have each digit."""
    block = tl.program_id(0)
    i = block * BI + tl.arange(0, BI)
    _, digit = read_digit(rows, order, i, i < count, shift, FIRST)
    found = tl.histogram(digit, 512)
    bins = tl.arange(0, 512)
    tl.store(counts + bins * blocks + block, found, mask=bins < 256)


@triton.jit
def sum_before(counts, offsets, blocks, BS: tl.constexpr):
    """offsets: for each of counts the sum of those in front of it. A program for each digit, which adds up all that
    there is of those before: that is read sooner than one program is waited for."""
    first = tl.program_id(0) * blocks
    sums = tl.zeros((BS,), tl.int32)
    for start in range(0, first, BS):
        at = start + tl.arange(0, BS)
        sums += tl.load(counts + at, mask=at < first, other=0)
    so_far = tl.sum(sums, 0)
    for start in range(0, blocks, BS):
        at = start + tl.arange(0, BS)
        found = tl.load(counts + first + at, mask=at < blocks, other=0)
        tl.store(offsets + first + at, so_far + tl.cumsum(found, 0) - found, mask=at < blocks)
        so_far += tl.sum(found, 0)


@triton.jit
def place(rows, order, offsets, placed, count, shift, blocks, FIRST: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr):
    """placed: the numbers, sorted by a digit; those of one digit as they come."""
    block = tl.program_id(0)
    i = block * BI + tl.arange(0, BI)
    inside = i < count
    number, digit = read_digit(rows, order, i, inside, shift, FIRST)
    before = tl.zeros((BI,), tl.int32)
    for start in range(0, BI, BJ):
        j = block * BI + start + tl.arange(0, BJ)
        _, other = read_digit(rows, order, j, j < count, shift, FIRST)
        before += tl.sum(((other[None, :] == digit[:, None]) & (j[None, :] < i[:, None])).to(tl.int32), 1)
    first = tl.load(offsets + digit * blocks + block, mask=inside, other=0)
    tl.store(placed + first + before, number, mask=inside)


@triton.jit
def goes_to(row, rows, order, at, count):
    """Whether the update that is the one number ``at`` in the order is there, and of a row."""
    return (at < count) & (tl.load(rows + tl.load(order + tl.minimum(at, count - 1))) == row)


@triton.jit
def add_until(total, at, end, row, order, rows, updates, column, width, fits, BR: tl.constexpr):
    """Add the updates of a row in their order, from ``at`` until those of another one come, or ``end``."""
    more = at < end
    while more:
        following = at + tl.arange(0, BR)
        number = tl.load(order + following, mask=following < end, other=0)
        same = (following < end) & (tl.load(rows + number) == row)
        update = updates + number.to(tl.int64)[:, None] * width + column[None, :]
        total += tl.sum(tl.load(update, mask=same[:, None] & fits[None, :], other=0.0).to(tl.float32), 0)
        at += BR
        more = tl.sum(same.to(tl.int32), 0) == BR
    return total


@triton.jit
def parts(order, rows, updates, sums, count, width, CHUNK: tl.constexpr, BW: tl.constexpr, BR: tl.constexpr):
    """sums (chunks of CHUNK places in their order x ``width``): of a chunk in which the row goes on with which the one
    before ended, the sum of its updates there."""
    chunk = tl.program_id(0)
    column = tl.program_id(1) * BW + tl.arange(0, BW)
    fits = column < width
    at = chunk * CHUNK
    row = tl.load(rows + tl.load(order + at))
    before = tl.load(rows + tl.load(order + tl.maximum(at - 1, 0)))
    if (at > 0) & (before == row):
        end = tl.minimum(at + CHUNK, count)
        total = tl.zeros((BW,), tl.float32)
        total = add_until(total, at, end, row, order, rows, updates, column, width, fits, BR)
        tl.store(sums + chunk.to(tl.int64) * width + column, total, mask=fits)


@triton.jit
def segments(
    order, rows, updates, sums, table, count, width,
    CHUNK: tl.constexpr, BW: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Adds to each row of table the updates of that row, in their order: the program of the first of them does. With
    CHUNK, what comes behind the end of its chunk are the ``sums`` of :func:`parts`."""
    at = tl.program_id(0)
    column = tl.program_id(1) * BW + tl.arange(0, BW)
    fits = column < width
    row = tl.load(rows + tl.load(order + at))
    before = tl.load(rows + tl.load(order + tl.maximum(at - 1, 0)))
    if (at == 0) | (before != row):
        to = table + row * width + column
        total = tl.load(to, mask=fits, other=0.0).to(tl.float32)
        if CHUNK:
            end = tl.minimum((at // CHUNK + 1) * CHUNK, count)
            total = add_until(total, at, end, row, order, rows, updates, column, width, fits, BR)
            more = goes_to(row, rows, order, end, count)
            while more:
                total += tl.load(sums + (end // CHUNK).to(tl.int64) * width + column, mask=fits, other=0.0)
                end += CHUNK
                more = goes_to(row, rows, order, end, count)
        else:
            total = add_until(total, at, count, row, order, rows, updates, column, width, fits, BR)
        tl.store(to, total.to(table.dtype.element_ty), mask=fits)
