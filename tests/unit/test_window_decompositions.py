# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Gradients of pooling, and columns of large windows, against eager, and what they hold in memory; nothing is
compiled."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd.frontend.decompositions.convolutions.im2col import Columns
from retrograd.frontend.decompositions.convolutions.windows import Window
from retrograd.frontend.decompositions.pooling.pooling_gradients import avg_pool_backward, max_pool_backward

aten = torch.ops.aten


MOVES = (aten.constant_pad_nd.default, aten.clone.default, aten.cat.default, aten.stack.default)


class LargestMoved(TorchDispatchMode):
    """Notes how many elements the largest tensor has that is made by moving data, which kernels do not take in."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in MOVES:
            self.elements = max(self.elements, result.numel())
        return result


def draw_window(rng: random.Random, dilated: bool) -> tuple[list[int], Window, bool]:
    """Sizes along two or three axes and a window that fits on them, and whether to round the number of outputs up."""
    rank = rng.choice([2, 3])
    kernel = [rng.randint(1, 5) for _ in range(rank)]
    dilation = [rng.randint(1, 3) if dilated else 1 for _ in range(rank)]
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    size = [rng.randint(r, r + 9) for r in reach]
    stride, padding = [rng.randint(1, 4) for _ in range(rank)], [rng.randint(0, k // 2) for k in kernel]
    return size, Window(tuple(kernel), tuple(stride), tuple(padding), tuple(dilation)), rng.random() < 0.5


@pytest.mark.parametrize("seed", range(8))
def test_max_pool_backward_on_any_window(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        size, window, ceil = draw_window(rng, dilated=True)
        options = (window.kernel, window.stride, window.padding, window.dilation, ceil)
        pool = {2: aten.max_pool2d_with_indices, 3: aten.max_pool3d_with_indices}[window.rank]
        backward = {2: aten.max_pool2d_with_indices_backward, 3: aten.max_pool3d_with_indices_backward}[window.rank]
        x = torch.randn(2, 2, *size)
        y, indices = pool(x, *options)
        grad = torch.randn_like(y)
        found = max_pool_backward(window.rank, grad, x, *options, indices)
        torch.testing.assert_close(found, backward(grad, x, *options, indices))


@pytest.mark.parametrize("seed", range(8))
def test_avg_pool_backward_on_any_window(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        size, window, ceil = draw_window(rng, dilated=False)
        options = (window.kernel, window.stride, window.padding, ceil, rng.random() < 0.5, rng.choice([None, 3]))
        pool = {2: aten.avg_pool2d, 3: aten.avg_pool3d}[window.rank]
        backward = {2: aten.avg_pool2d_backward, 3: aten.avg_pool3d_backward}[window.rank]
        x = torch.randn(2, 2, *size)
        grad = torch.randn_like(pool(x, *options))
        found = avg_pool_backward(window.rank, grad, x, *options)
        torch.testing.assert_close(found, backward(grad, x, *options))


@pytest.mark.parametrize("seed", range(4))
def test_columns_are_those_of_unfold(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        kernel = [rng.randint(2, 20), rng.randint(2, 8)]
        dilation, stride = [rng.choice([1, 1, 2]) for _ in kernel], [rng.randint(1, 4) for _ in kernel]
        padding = [rng.randint(0, k // 2) for k in kernel]
        size = [d * (k - 1) + 1 + rng.randint(0, 9) for d, k in zip(dilation, kernel, strict=True)]
        x = torch.randn(2, 3, *size)
        wanted = aten.im2col(x, kernel, dilation, padding, stride).reshape(2, 3, kernel[0], -1)
        window = Window(tuple(kernel), tuple(stride), tuple(padding), tuple(dilation))
        out = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True)
        ]
        for leading in (0, 1):
            chunks = list(Columns(window, tuple(size), tuple(out), leading, by_tap=False).build(x))
            assert len(chunks) == (kernel[0] if leading else 1)
            found = torch.cat(chunks, 1).reshape(2, kernel[0] * kernel[1], 3, -1).transpose(1, 2)
            torch.testing.assert_close(found.reshape(wanted.shape), wanted)


@pytest.mark.parametrize(("kernel", "padding"), [(2, 0), (3, 1)])
def test_pooling_backward_moves_no_more_than_its_outputs(kernel: int, padding: int) -> None:
    x = torch.randn(2, 4, 16, 16)
    y, indices = aten.max_pool2d_with_indices(x, [kernel], [2], [padding])
    with LargestMoved() as largest:
        max_pool_backward(2, torch.randn_like(y), x, [kernel], [2], [padding], [1], False, indices)
    assert largest.elements <= 2 * 4 * 10 * 10


def test_columns_by_rows_hold_a_row_at_a_time() -> None:
    """A window's rows are sliced before its columns are made: no more is in memory than one row's."""
    window = Window((7, 7), (2, 2), (3, 3), (1, 1))
    x = torch.randn(2, 3, 32, 32)
    with LargestMoved() as largest:
        assert len(list(Columns(window, (32, 32), (16, 16), 1, by_tap=False).build(x))) == 7
    assert largest.elements <= 2 * max(7 * 3 * 16 * 16, 3 * 38 * 38)
