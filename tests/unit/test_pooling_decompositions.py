# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decompositions of pooling and its gradients against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from decomposition_checks import assert_close, check, trace, with_types

aten = torch.ops.aten

AVERAGES = [
    # spatial, kernel, stride, padding, ceil_mode, count_include_pad, divisor
    ((8, 8), [2, 2], [2, 2], [0, 0], False, True, None),
    ((9, 8), [3, 3], [2, 2], [1, 1], False, True, None),
    ((9, 8), [3, 3], [2, 2], [1, 1], False, False, None),
    ((9, 10), [3, 2], [2, 3], [1, 0], True, True, None),
    ((9, 10), [3, 4], [2, 3], [1, 2], True, False, None),
    ((8, 8), [3, 3], [1, 1], [1, 1], True, True, 5),
    ((7, 9), [2, 2], [3, 4], [0, 0], False, True, None),
    ((6, 7, 5), [2, 3, 2], [2, 1, 1], [1, 1, 0], True, False, None),
    ((6, 7, 5), [2], [], [0], False, True, None),
]


@pytest.mark.parametrize(("case", "dtype"), with_types(AVERAGES))
def test_average_pool_backward(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    spatial, *options = case
    # PyTorch pools volumes in f32 and f64 alone.
    x = torch.randn(2, 3, *spatial).to(torch.float32 if len(spatial) == 3 and dtype == torch.bfloat16 else dtype)
    forward = F.avg_pool2d if len(spatial) == 2 else F.avg_pool3d
    keywords = dict(zip(["stride", "padding", "ceil_mode", "count_include_pad"], options[1:], strict=False))
    keywords["stride"] = keywords["stride"] or options[0]
    grad = torch.randn_like(forward(x, options[0], **keywords, divisor_override=options[-1]))
    op = aten.avg_pool2d_backward.default if len(spatial) == 2 else aten.avg_pool3d_backward.default
    check(op, grad, x, *options)
    check(op, grad[0], x[0], *options)


MAXIMA = [
    # spatial, kernel, stride, padding, dilation, ceil_mode
    ((8, 8), [2, 2], [2, 2], [0, 0], [1, 1], False),
    ((9, 7), [2, 2], [2, 2], [0, 0], [1, 1], False),
    ((9, 8), [3, 3], [2, 2], [1, 1], [1, 1], False),
    ((9, 10), [3, 3], [2, 2], [0, 1], [2, 1], True),
    ((9, 10), [3, 2], [1, 1], [1, 1], [2, 2], False),
    ((7, 9), [2, 2], [3, 4], [0, 0], [1, 1], False),
    ((5, 6, 7), [2, 3, 2], [1, 2, 2], [1, 1, 0], [1, 1, 2], True),
]


@pytest.mark.parametrize(("case", "dtype"), with_types(MAXIMA))
def test_max_pool_backward(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    spatial, *options = case
    x = torch.randn(2, 3, *spatial).to(dtype)
    flat = len(spatial) == 2
    forward = aten.max_pool2d_with_indices.default if flat else aten.max_pool3d_with_indices.default
    op = aten.max_pool2d_with_indices_backward.default if flat else aten.max_pool3d_with_indices_backward.default
    y, indices = forward(x, *options)
    check(op, torch.randn_like(y), x, *options, indices)


SIZES = [((8, 8), (4, 2)), ((7, 10), (3, 4)), ((5, 6), (7, 9)), ((9, 9), (1, 1)), ((6, 5, 7), (4, 5, 2))]


@pytest.mark.parametrize(("case", "dtype"), with_types(SIZES))
def test_adaptive_average_pool(case: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype) -> None:
    size, out = case
    x, rank = torch.randn(2, 3, *size).to(dtype), len(size)
    forward, backward = (
        getattr(aten, name).default for name in (f"_adaptive_avg_pool{rank}d", f"_adaptive_avg_pool{rank}d_backward")
    )
    check(forward, x, list(out))
    grad = torch.randn(2, 3, *out).to(dtype)
    check(backward, grad, x)
    check(backward, grad[0], x[0])


SINGLE_WINDOWS = [
    # spatial, kernel, stride, padding, ceil_mode: along some axis one window, which does not fill it
    ((3, 6), [2, 3], [2, 2], [0, 0], False),
    ((3, 6), [3, 3], [2, 2], [0, 0], True),
    ((4, 9), [3, 7], [3, 3], [0, 0], False),
    ((4, 3), [3, 3], [5, 2], [1, 1], False),
    ((5, 3), [4, 2], [7, 2], [2, 1], True),
    ((3, 4, 4), [2, 2, 2], [2, 2, 2], [0, 1, 0], False),
]


@pytest.mark.parametrize("case", SINGLE_WINDOWS)
def test_pooling_by_a_single_window(case: tuple[Any, ...]) -> None:
    """What the window does not reach is left out, what it reaches beyond is put there: IREE compiles it."""
    spatial, *options, ceil_mode = case
    x, rank = torch.randn(2, 3, *spatial), len(spatial)
    maximum = getattr(aten, f"max_pool{rank}d_with_indices").default
    check(maximum, x, *options, [1] * rank, ceil_mode, gone=False)
    check(maximum, torch.full_like(x, -torch.inf), *options, [1] * rank, ceil_mode, gone=False)
    average = getattr(aten, f"avg_pool{rank}d").default
    for include, divisor in ((True, None), (False, None), (True, 3)):
        check(average, x, *options, ceil_mode, include, divisor, gone=False)
    kernel, stride, _ = options
    for graph in (trace(maximum, x, *options, [1] * rank, ceil_mode)[0], trace(average, x, *options, ceil_mode)[0]):
        (node,) = [n for n in graph.graph.nodes if n.target in (maximum, average)]
        filled = node.args[0].meta["val"].shape[2:]
        assert all((n - k) % s == 0 for n, k, s in zip(filled, kernel, stride, strict=True))


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("name", ["avg_pool{}d", "max_pool{}d_with_indices"])
def test_pooling_without_a_batch(name: str, rank: int) -> None:
    """Becomes that of a batch of one."""
    op = getattr(aten, name.format(rank)).default
    x = torch.randn(2, *[6] * rank)
    graph, tensors = trace(op, x, [3] * rank)
    (pooled,) = [n for n in graph.graph.nodes if n.target is op]
    assert pooled.args[0].meta["val"].shape == (1, *x.shape)
    assert_close(graph(*tensors), op(x, [3] * rank))
    # Numbers that stand for all axes would end torch-mlir's process.
    graph, tensors = trace(op, x, [3] * rank, [2], [1])
    (pooled,) = [n for n in graph.graph.nodes if n.target is op]
    assert all(len(numbers) == rank for numbers in pooled.args[1:4])
    assert_close(graph(*tensors), op(x, [3] * rank, [2], [1]))
