# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products of matrices, in Triton. Matrices lie in rows. Of one that is read transposed, rows are columns of the
product; ``TA`` and ``TB`` say so."""

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))


@triton.jit
def divide(value):
    """An f32 as three bf16: it is exactly their sum, but for numbers so small that the last of them is none. An
    infinity and what is no number are in the first alone."""
    finite = tl.abs(value) < INFINITY
    # The largest numbers would be rounded to infinity: of these the lower half is cut off.
    cut = (value.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    near = value.to(tl.bfloat16).to(tl.float32)
    first = tl.where(finite & (tl.abs(near) == INFINITY), cut, near)
    rest = tl.where(finite, value - first, 0.0)
    second = rest.to(tl.bfloat16)
    return first.to(tl.bfloat16), second, (rest - second.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def split(
    matrix, planes, rows, columns, high, pitch, count,
    PARTS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """planes (PARTS x batch x high x pitch): what matrix (batch x rows x columns) is the sum of, and zero around it."""
    batch = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(pitch, BC)
    r = (tl.program_id(0) // across * BR + tl.arange(0, BR)).to(tl.int64)
    c = tl.program_id(0) % across * BC + tl.arange(0, BC)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    value = tl.load(matrix + (batch * rows + r)[:, None] * columns + c[None, :], mask=inside, other=0.0)
    to = planes + (batch * high + r)[:, None] * pitch + c[None, :]
    fits = (r < high)[:, None] & (c < pitch)[None, :]
    if PARTS == 1:
        tl.store(to, value, mask=fits)
    else:
        plane = count.to(tl.int64) * high * pitch
        first, second, third = divide(value)
        tl.store(to, first, mask=fits)
        tl.store(to + plane, second, mask=fits)
        tl.store(to + 2 * plane, third, mask=fits)


@triton.jit
def place(pid, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """Which tile a program computes: eight rows of tiles at a time, so that both operands stay in the cache."""
    down, across = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = pid // (8 * across) * 8
    size = min(down - first, 8)
    return first + pid % (8 * across) % size, pid % (8 * across) // size


@triton.jit
def finish(
    acc, bias, c, slot, row, column, M, N, a,
    BM: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Writes a tile of matrix number ``slot`` of c; with ROUND its numbers have the digits of those of a."""
    m, n = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ROUND:
        acc = acc.to(a.dtype.element_ty).to(tl.float32)
    to = c + (slot * M + m)[:, None] * N + n[None, :]
    tl.store(to, acc.to(c.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def load_parts(at, plane, m, k, M, depth, WHOLE: tl.constexpr):
    """The three parts of a tile of the first matrix; of a whole one, which no tiles divide, with zeros around it."""
    if WHOLE:
        return divide(tl.load(at, mask=(m < M)[:, None] & (k < depth)[None, :], other=0.0))
    else:
        return tl.load(at), tl.load(at + plane), tl.load(at + 2 * plane)


@triton.jit
def product(
    a, b, bias, c, M, N, high_a, pitch_a, high_b, pitch_b, steps, count,
    TA: tl.constexpr, TB: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
    WHOLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """c (parts x count x M x N): products of ``count`` pairs of matrices, each a sum of PARTS; a part has ``steps`` of
    the terms. Tiles divide what lies in memory, high_a x pitch_a and high_b x pitch_b: nothing is masked. With WHOLE, a
    is of f32, and no tiles divide it: it is divided into PARTS here."""
    row, column = place(tl.program_id(0), M, N, BM, BN)
    batch, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    m, n = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    k = part * steps * BK + tl.arange(0, BK)
    size_a, size_b = high_a.to(tl.int64) * pitch_a, high_b.to(tl.int64) * pitch_b
    if TA:
        at_a = a + batch * size_a + k.to(tl.int64)[None, :] * pitch_a + m[:, None]
        step_a, depth = BK * pitch_a, high_a
    else:
        at_a = a + batch * size_a + m.to(tl.int64)[:, None] * pitch_a + k[None, :]
        step_a, depth = BK, pitch_a
    total = tl.cdiv(depth, BK)
    if TB:
        at_b = b + batch * size_b + n.to(tl.int64)[None, :] * pitch_b + k[:, None]
        step_b = BK
    else:
        at_b = b + batch * size_b + k.to(tl.int64)[:, None] * pitch_b + n[None, :]
        step_b = BK * pitch_b
    own = min(steps, total - part * steps)
    acc = tl.zeros((BM, BN), tl.float32)
    if PARTS == 1:
        for _ in range(own):
            acc = tl.dot(tl.load(at_a), tl.load(at_b), acc)
            at_a += step_a
            at_b += step_b
    else:
        plane_a, plane_b = count * size_a, count * size_b
        for step in range(own):
            a0, a1, a2 = load_parts(at_a, plane_a, m, k + step * BK, M, depth, WHOLE)
            b0, b1, b2 = tl.load(at_b), tl.load(at_b + plane_b), tl.load(at_b + 2 * plane_b)
            some = tl.dot(a2, b0)
            some = tl.dot(a1, b1, some)
            some = tl.dot(a0, b2, some)
            some = tl.dot(a1, b0, some)
            some = tl.dot(a0, b1, some)
            some = tl.dot(a0, b0, some)
            # Matrix units cut off what does not fit as they add up, always towards zero: over 4096 terms that is 30
            # times the error of this sum, which is rounded.
            acc += some
            at_a += step_a
            at_b += step_b
        # An infinity times the lower parts of a number is an infinity of any sign: there the first parts alone count.
        # Where these are finite, it is the sum that is too large.
        if tl.sum((tl.abs(acc) < INFINITY).to(tl.int32)) < BM * BN:
            at_a -= own.to(tl.int64) * step_a
            at_b -= own.to(tl.int64) * step_b
            first = tl.zeros((BM, BN), tl.float32)
            for step in range(own):
                left, _, _ = load_parts(at_a, plane_a, m, k + step * BK, M, depth, WHOLE)
                first = tl.dot(left, tl.load(at_b), first)
                at_a += step_a
                at_b += step_b
            acc = tl.where((tl.abs(acc) < INFINITY) | (tl.abs(first) < INFINITY), acc, first)
    finish(acc, bias, c, part * count + batch, row, column, M, N, a, BM, BN, BIAS, False)


@triton.jit
def product_copied(
    a, b, bias, c, M, N, high_a, pitch_a, high_b, pitch_b, steps, parts,
    TA: tl.constexpr, TB: tl.constexpr, BIAS: tl.constexpr, ROUND: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The same for one pair of matrices of any height, whose tiles the copy engine fetches: it gives zeros for what is
    beyond an end. A program computes one tile after another."""
    if TA:
        from_a, total = tl.make_tensor_descriptor(a, [high_a, pitch_a], [pitch_a, 1], [BK, BM]), tl.cdiv(high_a, BK)
    else:
        from_a, total = tl.make_tensor_descriptor(a, [high_a, pitch_a], [pitch_a, 1], [BM, BK]), tl.cdiv(pitch_a, BK)
    if TB:
        from_b = tl.make_tensor_descriptor(b, [high_b, pitch_b], [pitch_b, 1], [BN, BK])
    else:
        from_b = tl.make_tensor_descriptor(b, [high_b, pitch_b], [pitch_b, 1], [BK, BN])
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    for pid in tl.range(tl.program_id(0), tiles * parts, tl.num_programs(0), flatten=True):
        row, column = place(pid % tiles, M, N, BM, BN)
        part = pid // tiles
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(part * steps, min(part * steps + steps, total)):
            if TA:
                left = from_a.load([step * BK, row * BM]).T
            else:
                left = from_a.load([row * BM, step * BK])
            if TB:
                right = from_b.load([column * BN, step * BK]).T
            else:
                right = from_b.load([step * BK, column * BN])
            acc = tl.dot(left, right, acc)
        finish(acc, bias, c, part.to(tl.int64), row, column, M, N, a, BM, BN, BIAS, ROUND)
