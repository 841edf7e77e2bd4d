# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention, forward and backward, in Triton: in tiles, so that no matrix of scores is in memory.

After Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023. Queries are B x H x
L x D, keys and values B x H / REPEATS x S x D, each with strides of its first three axes, and what is read with the
number of its first element. What a program gives is written by it alone, and added up in one order: twice the same
bits. ``scale`` is the bits of an f32. A MASK is added to the scores, one for all columns where COLUMN is 0; CAUSAL
leaves each row the columns up to its own number. Numbers of f32 are multiplied as three TF32 (EXACT). EVEN says that
the tiles of a loop divide what it runs over.

Without a mask, scores are in powers of 2. With one they are as they are: its least numbers, which models write for
minus infinity, would be infinite in powers of 2, and a row of nothing else is the mean of all values.

DROP leaves out weights whose numbers, which are those of ``retrograd.uniform`` for the seed, the stream and the place
among B x H x L x S, are less than the chance, whose bits are an f32's; the others are divided by one less the chance.
FOURS says that S is a multiple of four: that many numbers are drawn at once.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LEAST = tl.constexpr(float("-inf"))
# Of Philox.
KEY_LOW, KEY_HIGH = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)
ROUND_LOW, ROUND_HIGH = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)


@triton.jit
def multiply(a, b, EXACT: tl.constexpr):
    """A product of two tiles, in f32."""
    if EXACT:
        return tl.dot(a, b, input_precision="tf32x3")
    else:
        return tl.dot(a, b)


@triton.jit
def multiply_add(a, b, total, EXACT: tl.constexpr):
    """The same, added to a total: of f32 by an addition that rounds, where matrix units cut off."""
    if EXACT:
        return total + tl.dot(a, b, input_precision="tf32x3")
    else:
        return tl.dot(a, b, total)


@triton.jit
def load_rows(start, at, count, stride, D: tl.constexpr, BD: tl.constexpr, EDGE: tl.constexpr):
    """Rows number ``at`` of D numbers, filled up with zeros to BD; with EDGE, rows from ``count`` on are zero too."""
    d = tl.arange(0, BD)
    to = start + at[:, None] * stride + d[None, :]
    if EDGE and BD != D:
        return tl.load(to, mask=(at < count)[:, None] & (d < D)[None, :], other=0.0)
    elif EDGE:
        return tl.load(to, mask=(at < count)[:, None], other=0.0)
    elif BD != D:
        return tl.load(to, mask=(d < D)[None, :], other=0.0)
    else:
        return tl.load(to)


@triton.jit
def store_rows(value, start, at, count, stride, D: tl.constexpr, BD: tl.constexpr):
    """Write rows that :func:`load_rows` would read."""
    d = tl.arange(0, BD)
    inside = (at < count)[:, None] & (d < D)[None, :]
    tl.store(start + at[:, None] * stride + d[None, :], value.to(start.dtype.element_ty), mask=inside)


@triton.jit
def load_mask(mask, row, column, L, S, stride, COLUMN: tl.constexpr):
    """The numbers that are added to the scores of rows (an axis of tiles) and columns (the other)."""
    to = mask + row.to(tl.int64) * stride + column * COLUMN
    return tl.load(to, mask=(row < L) & (column < S), other=0.0).to(tl.float32)


@triton.jit
def draw(seeds, stream, number):
    """Four words for each number, by Philox4x32-7: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
    2011."""
    key, tail = tl.load(seeds), tl.load(seeds + 1)
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    c0 = number
    c1 = tl.zeros_like(c0) + stream.to(tl.uint32)
    c2 = tl.zeros_like(c0) + tail.to(tl.uint32)
    c3 = tl.zeros_like(c0) + (tail >> 32).to(tl.uint32)
    for turn in tl.static_range(7):
        if turn > 0:
            low += KEY_LOW
            high += KEY_HIGH
        upper, lower = tl.umulhi(c0, ROUND_LOW), c0 * ROUND_LOW
        c0 = tl.umulhi(c2, ROUND_HIGH) ^ c1 ^ low
        c1 = c2 * ROUND_HIGH
        c2 = upper ^ c3 ^ high
        c3 = lower
    return c0, c1, c2, c3


@triton.jit
def at_least(word, chance):
    """Whether numbers, the upper 24 bits of words, are the chance or more."""
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08 >= chance.to(tl.float32, bitcast=True)


@triton.jit
def keeps(seeds, stream, chance, first, S, row, start, BN: tl.constexpr, FOURS: tl.constexpr):
    """Which weights of rows and of BN columns from ``start`` on stay. ``first`` is the number of the head's first row
    among all rows. A draw serves four columns in a row: with FOURS, S is a multiple of 4, and so is ``start``."""
    rows = (first + row).to(tl.uint32)[:, None] * S.to(tl.uint32)
    if FOURS:
        column = start // 4 + tl.arange(0, BN // 4)
        c0, c1, c2, c3 = draw(seeds, stream, rows // 4 + column.to(tl.uint32)[None, :])
        even = tl.join(at_least(c0, chance).to(tl.int8), at_least(c2, chance).to(tl.int8))
        odd = tl.join(at_least(c1, chance).to(tl.int8), at_least(c3, chance).to(tl.int8))
        return tl.join(even, odd).reshape(row.shape[0], BN) != 0
    else:
        place = rows + (start + tl.arange(0, BN)).to(tl.uint32)[None, :]
        c0, c1, c2, c3 = draw(seeds, stream, place // 4)
        odd = (place & 1) != 0
        word = tl.where((place & 2) != 0, tl.where(odd, c3, c2), tl.where(odd, c1, c0))
        return at_least(word, chance)


@triton.jit
def staying(chance):
    """The factor of weights that stay."""
    return 1.0 / (1.0 - chance.to(tl.float32, bitcast=True))


@triton.jit
def attend_steps(
    acc, total, highest, q, k, v, mask, row, first, last, L, S, factor,
    k_row, v_row, mask_row, COLUMN: tl.constexpr, seeds, stream, chance, number,
    DROP: tl.constexpr, FOURS: tl.constexpr,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, EDGE: tl.constexpr, EXACT: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Attend to the columns from ``first`` to ``last``; with EDGE there may be some among them that do not count."""
    for start in range(first, last, BN):
        column = start + tl.arange(0, BN)
        keys = load_rows(k, column, S, k_row, D, BD, EDGE)
        score = multiply(q, tl.trans(keys), EXACT)
        if MASK:
            score = score * factor + load_mask(mask, row[:, None], column[None, :], L, S, mask_row, COLUMN)
        if EDGE:
            counts = column[None, :] < S
            if CAUSAL:
                counts = counts & (column[None, :] <= row[:, None])
            score = tl.where(counts, score, LEAST)
        # The factor is positive: the highest is, times it. It goes into the exponent without a product of its own.
        higher = tl.maximum(highest, tl.max(score, 1) if MASK else tl.max(score, 1) * factor)
        # Of a row of which nothing counts so far: minus infinity less itself is no number.
        known = tl.where(higher == LEAST, 0.0, higher)
        if MASK:
            weight = tl.exp2((score - known[:, None]) * LOG2E)
            shrunk = tl.exp2((highest - known) * LOG2E)
        else:
            weight = tl.exp2(score * factor - known[:, None])
            shrunk = tl.exp2(highest - known)
        total = total * shrunk + tl.sum(weight, 1)
        values = load_rows(v, column, S, v_row, D, BD, EDGE)
        if DROP:
            stays = keeps(seeds, stream, chance, number, S, row, start, BN, FOURS)
            weight = tl.where(stays, weight, 0.0)
        acc = multiply_add(weight.to(values.dtype), values, acc * shrunk[:, None], EXACT)
        highest = higher
    return acc, total, highest


@triton.jit
def attend(
    q, k, v, mask, seeds, out, lse, scale, H, L, S, stream, chance,
    q_start, q_batch, q_head, q_row, k_start, k_batch, k_head, k_row, v_start, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, out_batch, out_head, out_row,
    MASK: tl.constexpr, COLUMN: tl.constexpr, CAUSAL: tl.constexpr, DROP: tl.constexpr, FOURS: tl.constexpr,
    EXACT: tl.constexpr,
    REPEATS: tl.constexpr, EVEN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out: softmax(scale * q k' + mask) v. lse (B x H x L, f32): log-sum-exps of scores, 0 where no column counts."""
    # Of causal attention the last rows take longest: they begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tile * BM + tl.arange(0, BM)
    k += k_start + batch * k_batch + head // REPEATS * k_head
    v += v_start + batch * v_batch + head // REPEATS * v_head
    if MASK:
        mask += batch * mask_batch + head * mask_head
    factor = scale.to(tl.float32, bitcast=True) * (1.0 if MASK else LOG2E)
    queries = load_rows(q + q_start + batch * q_batch + head * q_head, row, L, q_row, D, BD, True)
    acc = tl.zeros((BM, BD), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    highest = tl.full((BM,), LEAST, tl.float32)
    number = (batch * H + head) * L
    last = S
    whole = S
    if CAUSAL:
        last = min(S, tile * BM + BM)
        whole = min(S, tile * BM + 1)
    whole = whole // BN * BN
    acc, total, highest = attend_steps(
        acc, total, highest, queries, k, v, mask, row, 0, whole, L, S, factor,
        k_row, v_row, mask_row, COLUMN,
        seeds, stream, chance, number, DROP, FOURS, MASK, CAUSAL, False, EXACT, D, BD, BN,
    )  # fmt: skip
    if CAUSAL or not EVEN:
        acc, total, highest = attend_steps(
            acc, total, highest, queries, k, v, mask, row, whole, last, L, S, factor,
            k_row, v_row, mask_row, COLUMN,
            seeds, stream, chance, number, DROP, FOURS, MASK, CAUSAL, True, EXACT, D, BD, BN,
        )  # fmt: skip
    known = tl.where(highest == LEAST, 0.0, highest)
    total = tl.where(highest == LEAST, 1.0, total)
    acc /= total[:, None]
    if DROP:
        acc *= staying(chance)
    store_rows(acc, out + batch * out_batch + head * out_head, row, L, out_row, D, BD)
    if not MASK:
        known *= LN2
    tl.store(lse + number + row, known + tl.log(total), mask=row < L)


@triton.jit
def delta(
    dout, out, total, H, L, dout_start, dout_batch, dout_head, dout_row, out_start, out_batch, out_head, out_row,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """total (B x H x L, f32): the sum of dout * out over each row, which the gradient of a softmax takes off."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    g = load_rows(dout + dout_start + batch * dout_batch + head * dout_head, row, L, dout_row, D, BD, True)
    o = load_rows(out + out_start + batch * out_batch + head * out_head, row, L, out_row, D, BD, True)
    summed = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(total + (batch * H + head) * L + row, summed, mask=row < L)


@triton.jit
def weigh(product, mask, row, column, lse, L, S, factor, mask_row, COLUMN: tl.constexpr, MASK: tl.constexpr):
    """The weights that softmax makes of a tile of scores, from the log-sum-exps of its rows; ``row`` and ``lse`` lie
    along one axis, ``column`` along the other."""
    if MASK:
        score = product * factor + load_mask(mask, row, column, L, S, mask_row, COLUMN)
        return tl.exp2((score - lse) * LOG2E)
    else:
        return tl.exp2(product * factor - lse * LOG2E)


@triton.jit
def key_steps(
    dk, dv, keys, values, q, dout, mask, lse, total, first_column, column, first, last, L, S, factor,
    q_row, dout_row, mask_row, COLUMN: tl.constexpr, seeds, stream, chance, number,
    DROP: tl.constexpr, FOURS: tl.constexpr,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, EDGE: tl.constexpr, EXACT: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of keys and values what the rows from ``first`` to ``last`` give. Of a row behind the last
    one the query and the gradient are zero, and so is what it gives."""
    for start in range(first, last, BM):
        row = start + tl.arange(0, BM)
        queries = load_rows(q, row, L, q_row, D, BD, EDGE)
        product = multiply(keys, tl.trans(queries), EXACT)
        sums = tl.load(lse + row, mask=row < L, other=0.0)
        weight = weigh(
            product, mask, row[None, :], column[:, None], sums[None, :], L, S, factor, mask_row, COLUMN, MASK
        )
        if CAUSAL and EDGE:
            weight = tl.where(column[:, None] <= row[None, :], weight, 0.0)
        g = load_rows(dout, row, L, dout_row, D, BD, EDGE)
        if DROP:
            stays = tl.trans(keeps(seeds, stream, chance, number, S, row, first_column, column.shape[0], FOURS))
            dv = multiply_add(tl.where(stays, weight, 0.0).to(g.dtype), g, dv, EXACT)
        else:
            dv = multiply_add(weight.to(g.dtype), g, dv, EXACT)
        centre = tl.load(total + row, mask=row < L, other=0.0)
        change = multiply(values, tl.trans(g), EXACT)
        if DROP:
            change = tl.where(stays, change * staying(chance), 0.0)
        change = weight * (change - centre[None, :])
        dk = multiply_add(change.to(queries.dtype), queries, dk, EXACT)
    return dk, dv


@triton.jit
def key_gradients(
    dout, q, k, v, mask, seeds, lse, total, dk, dv, scale, H, L, S, stream, chance,
    dout_start, dout_batch, dout_head, dout_row, q_start, q_batch, q_head, q_row,
    k_start, k_batch, k_head, k_row, v_start, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    MASK: tl.constexpr, COLUMN: tl.constexpr, CAUSAL: tl.constexpr, DROP: tl.constexpr, FOURS: tl.constexpr,
    EXACT: tl.constexpr,
    REPEATS: tl.constexpr, EVEN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dk and dv: the gradients of keys and values, of all the heads of queries that a head of keys serves."""
    tile = tl.program_id(0)
    own, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tile * BN + tl.arange(0, BN)
    factor = scale.to(tl.float32, bitcast=True)
    exponent = factor if MASK else factor * LOG2E
    keys = load_rows(k + k_start + batch * k_batch + own * k_head, column, S, k_row, D, BD, True)
    values = load_rows(v + v_start + batch * v_batch + own * v_head, column, S, v_row, D, BD, True)
    sum_k = tl.zeros((BN, BD), tl.float32)
    sum_v = tl.zeros((BN, BD), tl.float32)
    first = 0
    inner = 0
    if CAUSAL:
        # Rows from the first that sees a column on; from ``inner`` on they see all of them.
        first = tile * BN // BM * BM
        inner = min(tl.cdiv(tile * BN + BN - 1, BM) * BM, tl.cdiv(L, BM) * BM)
    for head in range(own * REPEATS, own * REPEATS + REPEATS):
        rows = q + q_start + batch * q_batch + head * q_head
        change = dout + dout_start + batch * dout_batch + head * dout_head
        added = mask
        if MASK:
            added += batch * mask_batch + head * mask_head
        place = (batch * H + head) * L
        if CAUSAL:
            sum_k, sum_v = key_steps(
                sum_k, sum_v, keys, values, rows, change, added, lse + place, total + place, tile * BN, column,
                first, inner, L, S, exponent, q_row, dout_row, mask_row, COLUMN,
                seeds, stream, chance, place, DROP, FOURS, MASK, CAUSAL, True, EXACT, D, BD, BM,
            )  # fmt: skip
        sum_k, sum_v = key_steps(
            sum_k, sum_v, keys, values, rows, change, added, lse + place, total + place, tile * BN, column,
            inner, L, L, S, exponent, q_row, dout_row, mask_row, COLUMN,
            seeds, stream, chance, place, DROP, FOURS, MASK, False, not EVEN, EXACT, D, BD, BM,
        )  # fmt: skip
    store_rows(sum_k * factor, dk + batch * dk_batch + own * dk_head, column, S, dk_row, D, BD)
    if DROP:
        sum_v *= staying(chance)
    store_rows(sum_v, dv + batch * dv_batch + own * dv_head, column, S, dv_row, D, BD)


@triton.jit
def query_steps(
    dq, queries, g, k, v, mask, dscore, sums, centre, row, first, last, L, S, factor,
    k_row, v_row, mask_row, COLUMN: tl.constexpr, seeds, stream, chance, number,
    DROP: tl.constexpr, FOURS: tl.constexpr, SCORES: tl.constexpr,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, EDGE: tl.constexpr, EXACT: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add to the gradient of queries what the columns from ``first`` to ``last`` give."""
    for start in range(first, last, BN):
        column = start + tl.arange(0, BN)
        keys = load_rows(k, column, S, k_row, D, BD, EDGE)
        product = multiply(queries, tl.trans(keys), EXACT)
        weight = weigh(
            product, mask, row[:, None], column[None, :], sums[:, None], L, S, factor, mask_row, COLUMN, MASK
        )
        if EDGE:
            counts = column[None, :] < S
            if CAUSAL:
                counts = counts & (column[None, :] <= row[:, None])
            weight = tl.where(counts, weight, 0.0)
        values = load_rows(v, column, S, v_row, D, BD, EDGE)
        change = multiply(g, tl.trans(values), EXACT)
        if DROP:
            stays = keeps(seeds, stream, chance, number, S, row, start, BN, FOURS)
            change = tl.where(stays, change * staying(chance), 0.0)
        change = weight * (change - centre[:, None])
        if SCORES:
            store_scores(change, dscore, row, column, number, L, S)
        dq = multiply_add(change.to(keys.dtype), keys, dq, EXACT)
    return dq


@triton.jit
def store_scores(change, dscore, row, column, number, L, S):
    """Write what a tile of rows and columns of one head has of the gradient of scores."""
    to = dscore + (number + row)[:, None] * S + column[None, :]
    inside = (row < L)[:, None] & (column < S)[None, :]
    tl.store(to, change.to(dscore.dtype.element_ty), mask=inside)


@triton.jit
def query_gradients(
    dout, q, k, v, mask, seeds, lse, total, dq, dscore, scale, H, L, S, stream, chance,
    dout_start, dout_batch, dout_head, dout_row, q_start, q_batch, q_head, q_row,
    k_start, k_batch, k_head, k_row, v_start, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, dq_batch, dq_head, dq_row,
    MASK: tl.constexpr, COLUMN: tl.constexpr, CAUSAL: tl.constexpr, DROP: tl.constexpr, FOURS: tl.constexpr,
    EXACT: tl.constexpr, SCORES: tl.constexpr,
    REPEATS: tl.constexpr, EVEN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dq: the gradient of queries. dscore (B x H x L x S), with SCORES: that of the scores with what was added."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tile * BM + tl.arange(0, BM)
    k += k_start + batch * k_batch + head // REPEATS * k_head
    v += v_start + batch * v_batch + head // REPEATS * v_head
    if MASK:
        mask += batch * mask_batch + head * mask_head
    factor = scale.to(tl.float32, bitcast=True)
    exponent = factor if MASK else factor * LOG2E
    queries = load_rows(q + q_start + batch * q_batch + head * q_head, row, L, q_row, D, BD, True)
    g = load_rows(dout + dout_start + batch * dout_batch + head * dout_head, row, L, dout_row, D, BD, True)
    number = (batch * H + head) * L
    place = number + row
    sums = tl.load(lse + place, mask=row < L, other=0.0)
    centre = tl.load(total + place, mask=row < L, other=0.0)
    last = S
    whole = S
    if CAUSAL:
        last = min(S, tile * BM + BM)
        whole = min(S, tile * BM + 1)
    whole = whole // BN * BN
    sum_q = tl.zeros((BM, BD), tl.float32)
    sum_q = query_steps(
        sum_q, queries, g, k, v, mask, dscore, sums, centre, row, 0, whole, L, S, exponent,
        k_row, v_row, mask_row, COLUMN,
        seeds, stream, chance, number, DROP, FOURS, SCORES, MASK, CAUSAL, False, EXACT, D, BD, BN,
    )  # fmt: skip
    if CAUSAL or not EVEN:
        sum_q = query_steps(
            sum_q, queries, g, k, v, mask, dscore, sums, centre, row, whole, last, L, S, exponent,
            k_row, v_row, mask_row, COLUMN,
            seeds, stream, chance, number, DROP, FOURS, SCORES, MASK, CAUSAL, True, EXACT, D, BD, BN,
        )  # fmt: skip
    if SCORES and CAUSAL:
        # Columns that no row of the tile sees.
        for start in range(whole + tl.cdiv(last - whole, BN) * BN, S, BN):
            store_scores(tl.zeros((BM, BN), tl.float32), dscore, row, start + tl.arange(0, BN), number, L, S)
    store_rows(sum_q * factor, dq + batch * dq_batch + head * dq_head, row, L, dq_row, D, BD)
