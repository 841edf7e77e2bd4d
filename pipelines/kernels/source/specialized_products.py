# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Multiplies matrices of 16 bits on Hopper, in Gluon: warps of their own fetch tiles, the others multiply.

Triton's tiles have sizes that are powers of two. Here a tile has two accumulators side by side, of ``N0`` and ``N1``
columns, so that 160 or 192 columns are a size too: of 768 x 3072 that makes 120 tiles for 132 multiprocessors, where
256 columns make 72. One warp fetches the first matrix, two fetch a part of the second each: each makes the descriptor
that the copy engine wants itself, which takes 1.7 us, all three at once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def place(pid, M, N, BM: gl.constexpr, BN: gl.constexpr):
    """Which tile a program computes: eight rows of tiles at a time, so that both operands stay in the cache."""
    down, across = gl.cdiv(M, BM), gl.cdiv(N, BN)
    first = pid // (8 * across) * 8
    size = min(down - first, 8)
    return first + pid % (8 * across) % size, pid % (8 * across) // size


@gluon.jit
def fetch(
    matrix, high, pitch, full, empty, buffers, M, N, total, steps, parts,
    DEEP: gl.constexpr, LEFT: gl.constexpr, FROM: gl.constexpr, SIZE: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fetches SIZE rows or columns of a matrix, from number FROM of each tile on, step by step, each into the buffer
    that is free. A matrix whose rows run along the sum is DEEP; the first one is LEFT."""
    shape: gl.constexpr = [SIZE, BK] if DEEP else [BK, SIZE]
    descriptor = tma.make_tensor_descriptor(matrix, [high, pitch], [pitch, 1], shape, buffers.layout)
    tiles = gl.cdiv(M, BM) * gl.cdiv(N, BN)
    count = 0
    for pid in range(gl.program_id(0), tiles * parts, gl.num_programs(0)):
        row, column = place(pid % tiles, M, N, BM, BN)
        part = pid // tiles
        if LEFT:
            at = row * BM
        else:
            at = column * BN + FROM
        for step in range(part * steps, min(part * steps + steps, total)):
            slot = count % STAGES
            mbarrier.wait(empty.index(slot), (count // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(slot), SIZE * BK * 2)
            if DEEP:
                tma.async_copy_global_to_shared(descriptor, [at, step * BK], full.index(slot), buffers.index(slot))
            else:
                tma.async_copy_global_to_shared(descriptor, [step * BK, at], full.index(slot), buffers.index(slot))
            count += 1


@gluon.jit
def finish(
    acc, bias, c, slot, row, first, M, N,
    BM: gl.constexpr, BN: gl.constexpr, BIAS: gl.constexpr, EVEN: gl.constexpr, ROUND: gl.constexpr,
    element: gl.constexpr,
):  # fmt: skip
    """Writes a tile of matrix number ``slot`` of c, whose columns begin with number ``first``. Rows that are no
    multiple of 16 long are not EVEN; with ROUND numbers have the digits of ``element``."""
    if c.dtype.element_ty.primitive_bitwidth == 16:
        # Rows of an accumulator are two numbers here, two there: of 16 bits each, that is too little for one write.
        # Where rows begin anywhere a thread writes one number at a time, and those of a warp are neighbors.
        each: gl.constexpr = 8 if EVEN else 1
        across: gl.constexpr = min(BN // each, 32)
        layout: gl.constexpr = gl.BlockedLayout([1, each], [32 // across, across], [gl.num_warps(), 1], [1, 0])
    else:
        layout: gl.constexpr = acc.type.layout
    if BIAS:
        columns = first + gl.arange(0, BN, gl.SliceLayout(0, acc.type.layout))
        acc += gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
    if ROUND:
        acc = acc.to(element).to(gl.float32)
    value = gl.convert_layout(acc.to(c.dtype.element_ty), layout)
    m = row * BM + gl.arange(0, BM, gl.SliceLayout(1, layout))
    n = first + gl.arange(0, BN, gl.SliceLayout(0, layout))
    to = c + (slot * M + m)[:, None] * N + n[None, :]
    gl.store(to, value, mask=(m < M)[:, None] & (n < N)[None, :])


@gluon.jit
def multiply(
    bias, c, full, empty, buffers, buffers0, buffers1, M, N, total, steps, parts,
    TA: gl.constexpr, TB: gl.constexpr, BIAS: gl.constexpr, EVEN: gl.constexpr, ROUND: gl.constexpr,
    BM: gl.constexpr, N0: gl.constexpr, N1: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiplies what is fetched, one step ahead of the one that it waits for, and writes tile by tile."""
    warps: gl.constexpr = gl.num_warps()
    element: gl.constexpr = buffers.dtype
    layout0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, N0, 16])
    layout1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, N1, 16])
    acc0 = gl.zeros((BM, N0), gl.float32, layout0)
    acc1 = gl.zeros((BM, N1), gl.float32, layout1)
    tiles = gl.cdiv(M, BM) * gl.cdiv(N, N0 + N1)
    count = 0
    for pid in range(gl.program_id(0), tiles * parts, gl.num_programs(0)):
        row, column = place(pid % tiles, M, N, BM, N0 + N1)
        part = pid // tiles
        own = min(steps, total - part * steps)
        for step in range(own):
            slot = count % STAGES
            mbarrier.wait(full.index(slot), count // STAGES & 1)
            left, right0, right1 = buffers.index(slot), buffers0.index(slot), buffers1.index(slot)
            if TA:
                left = left.permute((1, 0))
            if TB:
                right0 = right0.permute((1, 0))
                right1 = right1.permute((1, 0))
            # Both products of this step are under way; those of the step before are done, and its buffers free.
            next0 = warpgroup_mma(left, right0, acc0, use_acc=step > 0, is_async=True)
            next1 = warpgroup_mma(left, right1, acc1, use_acc=step > 0, is_async=True)
            acc0, acc1 = warpgroup_mma_wait(2, (next0, next1))
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=step > 0)
            count += 1
        acc0, acc1 = warpgroup_mma_wait(0, (acc0, acc1))
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=own > 0)
        finish(acc0, bias, c, part.to(gl.int64), row, column * (N0 + N1), M, N, BM, N0, BIAS, EVEN, ROUND, element)
        finish(acc1, bias, c, part.to(gl.int64), row, column * (N0 + N1) + N0, M, N, BM, N1, BIAS, EVEN, ROUND, element)


@gluon.jit
def product_specialized(
    a, b, bias, c, M, N, high_a, pitch_a, high_b, pitch_b, steps, parts,
    TA: gl.constexpr, TB: gl.constexpr, BIAS: gl.constexpr, EVEN: gl.constexpr, ROUND: gl.constexpr,
    BM: gl.constexpr, N0: gl.constexpr, N1: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """c (parts x M x N): the product of two matrices of any height, as a sum of ``parts``, each of ``steps`` of the
    terms; the copy engine gives zeros for what is beyond an end. A program computes one tile after another."""
    element: gl.constexpr = a.dtype.element_ty
    shape: gl.constexpr = [BK, BM] if TA else [BM, BK]
    shape0: gl.constexpr = [N0, BK] if TB else [BK, N0]
    shape1: gl.constexpr = [N1, BK] if TB else [BK, N1]
    lies: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, element)
    lies0: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape0, element)
    lies1: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape1, element)
    buffers = gl.allocate_shared_memory(element, [STAGES] + shape, lies)
    buffers0 = gl.allocate_shared_memory(element, [STAGES] + shape0, lies0)
    buffers1 = gl.allocate_shared_memory(element, [STAGES] + shape1, lies1)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=3)
        mbarrier.init(empty.index(slot), count=1)
    if TA:
        total = gl.cdiv(high_a, BK)
    else:
        total = gl.cdiv(pitch_a, BK)
    gl.warp_specialize(
        [
            (multiply, (bias, c, full, empty, buffers, buffers0, buffers1, M, N, total, steps, parts,
                        TA, TB, BIAS, EVEN, ROUND, BM, N0, N1, STAGES)),
            (fetch, (a, high_a, pitch_a, full, empty, buffers, M, N, total, steps, parts,
                     not TA, True, 0, BM, BM, N0 + N1, BK, STAGES)),
            (fetch, (b, high_b, pitch_b, full, empty, buffers0, M, N, total, steps, parts,
                     TB, False, 0, N0, BM, N0 + N1, BK, STAGES)),
            (fetch, (b, high_b, pitch_b, full, empty, buffers1, M, N, total, steps, parts,
                     TB, False, N0, N1, BM, N0 + N1, BK, STAGES)),
        ],
        [1, 1, 1],
        [40, 40, 40],
    )  # fmt: skip
