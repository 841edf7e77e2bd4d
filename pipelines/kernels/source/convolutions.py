# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Convolutions and their gradients as products, in Triton: an operand's elements are read from where they are.

Images lie with channels last, x [N, H, W, G * C] and y [N, P, Q, G * K], and filters as [G * K, R, S, C], for G groups
of channels. A window has R x S taps (``high`` x ``wide``), a stride, a padding and a dilation for each axis. With few
channels the taps of a row are one *run* of S * C elements, which lie side by side: RUN says so, and then C is S * C, a
row has one tap, and ``run`` is the channels of an image. An f32 is multiplied as a sum of two TF32 (EXACT), each step
added to a sum that is rounded.
"""

import triton
import triton.language as tl


@triton.jit
def add_product(left, right, acc, EXACT: tl.constexpr):
    """The sum of ``acc`` and a product of tiles."""
    if EXACT:
        return tl.dot(left, right, acc, input_precision="tf32x3")
    return tl.dot(left, right, acc)


@triton.jit
def find_rows(m, P, Q):
    """Image, row and column of places that are counted through all images."""
    line = m // Q
    return line // P, line % P, m % Q


@triton.jit
def advance(r, s, start, wide, size):
    """The tap and the first channel of the next step: where a tap has no more, the next tap. To divide the number of
    the step by these sizes takes a sixth longer."""
    over = start >= size
    s += over.to(tl.int32)
    last = s >= wide
    return r + last.to(tl.int32), tl.where(last, 0, s), tl.where(over, 0, start)


@triton.jit
def convolve(
    x, w, y, N, H, W, C, P, Q, K, high, wide, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, pitch_x,
    pitch_y, run,
    RUN: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """y: the sum over taps of what they reach, times their filters."""
    M = N * P * Q
    # Tiles side by side read the same places of x.
    row, column = tl.program_id(0) // tl.cdiv(K, BN), tl.program_id(0) % tl.cdiv(K, BN)
    group = tl.program_id(1)
    m, o = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    e = tl.arange(0, BK)
    image, p, q = find_rows(m, P, Q)
    h, v = p * stride_h - pad_h, q * stride_w - pad_w
    inside = m < M
    base = (image * H + h) * W + v
    from_x = x + (base * pitch_x + group * C)[:, None] + e[None, :]
    taps = high * wide
    from_w = w + (group * K + o).to(tl.int64)[None, :] * (taps * C) + e[:, None]
    fits = (o < K)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    r, s, start = 0, 0, 0
    for _ in range(taps * tl.cdiv(C, BK)):
        at_h, at_v = h + r * dilation_h, v + s * dilation_w
        reached = inside & (at_h >= 0) & (at_h < H)
        if RUN:
            at = v[:, None] * run + (start + e)[None, :]
            reads = reached[:, None] & (at >= 0) & (at < W * run) & (start + e < C)[None, :]
        else:
            reads = (reached & (at_v >= 0) & (at_v < W))[:, None]
            if not EVEN:
                reads = reads & (start + e < C)[None, :]
        if EVEN:
            weighs = fits
        else:
            weighs = fits & (start + e < C)[:, None]
        left = tl.load(from_x + ((r * dilation_h * W + s * dilation_w) * pitch_x + start), mask=reads, other=0.0)
        right = tl.load(from_w + ((r * wide + s) * C + start), mask=weighs, other=0.0)
        acc = add_product(left, right, acc, EXACT)
        r, s, start = advance(r, s, start + BK, wide, C)
    to = y + m.to(tl.int64)[:, None] * pitch_y + (group * K + o)[None, :]
    tl.store(to, acc.to(y.dtype.element_ty), mask=inside[:, None] & fits)


@triton.jit
def spread(
    y, w, x, N, H, W, C, P, Q, K, high, wide, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, pitch_x,
    pitch_y,
    EVEN: tl.constexpr, EXACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """x: the gradient of a convolution's images, that of what it gives being y. A program computes a tile of the places
    of one remainder modulo the strides, which the same taps reach; along an axis there is a stride or a dilation."""
    rows, columns = tl.cdiv(H, stride_h), tl.cdiv(W, stride_w)
    M = N * rows * columns
    row, column = tl.program_id(0) // tl.cdiv(C, BN), tl.program_id(0) % tl.cdiv(C, BN)
    phase, group = tl.program_id(1), tl.program_id(2)
    rest_h, rest_v = phase // stride_w, phase % stride_w
    m, c = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    e = tl.arange(0, BK)
    image, i, j = find_rows(m, rows, columns)
    # Of these taps the first, and how many there are.
    first_r, first_s = (rest_h + pad_h) % stride_h, (rest_v + pad_w) % stride_w
    count_r, count_s = tl.cdiv(high - first_r, stride_h), tl.cdiv(wide - first_s, stride_w)
    taps = tl.maximum(count_r, 0) * tl.maximum(count_s, 0)
    p, q = i + (rest_h + pad_h - first_r) // stride_h, j + (rest_v + pad_w - first_s) // stride_w
    from_y = y + (((image * P + p) * Q + q) * pitch_y + group * K)[:, None] + e[None, :]
    from_w = w + (group * K + e).to(tl.int64)[:, None] * (high * wide * C) + c[None, :]
    inside = (m < M) & (i * stride_h + rest_h < H) & (j * stride_w + rest_v < W)
    fits = (c < C)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    r, s, start = 0, 0, 0
    for _ in range(taps * tl.cdiv(K, BK)):
        at_p, at_q = p - r * dilation_h, q - s * dilation_w
        reads = (inside & (at_p >= 0) & (at_p < P) & (at_q >= 0) & (at_q < Q))[:, None]
        weighs = fits
        if not EVEN:
            reads = reads & (start + e < K)[None, :]
            weighs = weighs & (start + e < K)[:, None]
        left = tl.load(from_y + (start - (r * dilation_h * Q + s * dilation_w) * pitch_y), mask=reads, other=0.0)
        number = (first_r + r * stride_h) * wide + first_s + s * stride_w
        right = tl.load(from_w + (start * high * wide * C + number * C), mask=weighs, other=0.0)
        acc = add_product(left, right, acc, EXACT)
        r, s, start = advance(r, s, start + BK, count_s, K)
    at = (image * H + i * stride_h + rest_h) * W + j * stride_w + rest_v
    to = x + at.to(tl.int64)[:, None] * pitch_x + (group * C + c)[None, :]
    tl.store(to, acc.to(x.dtype.element_ty), mask=inside[:, None] & fits)


@triton.jit
def correlate(
    y, x, w, N, H, W, C, P, Q, K, high, wide, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, pitch_x,
    pitch_y, run, steps, groups,
    RUN: tl.constexpr, EXACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """w (parts x G * K x R x S x C): the gradient of a convolution's filters, that of what it gives being y. A part has
    ``steps`` of the steps through all places; a program computes a tile of one tap."""
    M = N * P * Q
    across, taps = tl.cdiv(C, BN), high * wide
    pid = tl.program_id(0)
    # As here of y.
    tile, row = pid % (across * taps), pid // (across * taps)
    tap, column = tile // across, tile % across
    part, group = tl.program_id(1), tl.program_id(2)
    r, s = tap // wide, tap % wide
    o, c = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    m = part * steps * BK + k
    image, p, q = find_rows(m, P, Q)
    # What a step adds to these.
    more_image, more = BK // (P * Q), BK % (P * Q)
    more_p, more_q = more // Q, more % Q
    from_y = y + group * K + o[None, :]
    own = group * C + c
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(tl.minimum(steps, tl.cdiv(M, BK) - part * steps)):
        inside = m < M
        h, v = p * stride_h - pad_h + r * dilation_h, q * stride_w - pad_w + s * dilation_w
        reads = inside & (h >= 0) & (h < H)
        if RUN:
            at = v[:, None] * run + c[None, :]
            reads = reads[:, None] & (at >= 0) & (at < W * run) & (c < C)[None, :]
        else:
            reads = (reads & (v >= 0) & (v < W))[:, None] & (c < C)[None, :]
        left = tl.load(from_y + (m * pitch_y)[:, None], mask=inside[:, None] & (o < K)[None, :], other=0.0)
        right = tl.load(x + (((image * H + h) * W + v) * pitch_x)[:, None] + own[None, :], mask=reads, other=0.0)
        acc = add_product(tl.trans(left), right, acc, EXACT)
        m += BK
        q += more_q
        over = q >= Q
        q = tl.where(over, q - Q, q)
        p += more_p + over.to(tl.int32)
        over = p >= P
        p = tl.where(over, p - P, p)
        image += more_image + over.to(tl.int32)
    at = ((part * groups + group) * K + o).to(tl.int64)[:, None] * (taps * C) + tap * C + c[None, :]
    tl.store(w + at, acc.to(w.dtype.element_ty), mask=(o < K)[:, None] & (c < C)[None, :])


@triton.jit
def add_parts(parts, w, size, count, BP: tl.constexpr, BW: tl.constexpr):
    """w: the sum of ``count`` parts of ``size`` elements, in one order."""
    element = tl.program_id(0) * BW + tl.arange(0, BW)
    fits = element < size
    total = tl.zeros((BW,), tl.float32)
    for start in range(0, count, BP):
        part = start + tl.arange(0, BP)
        at = parts + part.to(tl.int64)[:, None] * size + element[None, :]
        total += tl.sum(tl.load(at, mask=(part < count)[:, None] & fits[None, :], other=0.0), 0)
    tl.store(w + element, total.to(w.dtype.element_ty), mask=fits)
