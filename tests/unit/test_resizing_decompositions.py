# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Gradients of resized images as decompositions, against eager; nothing is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decomposition_checks import check, targets, trace

from retrograd.frontend.traceable.resized_images import own_resizing_gradients

aten = torch.ops.aten
OPS = {
    1: (aten.upsample_nearest1d_backward.default, aten._upsample_nearest_exact1d_backward.default),
    2: (aten.upsample_nearest2d_backward.default, aten._upsample_nearest_exact2d_backward.default),
    3: (aten.upsample_nearest3d_backward.default, aten._upsample_nearest_exact3d_backward.default),
}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("before", "after", "scales"),
    [
        ((5,), (16,), (None,)),
        ((5,), (12,), (2.5,)),
        ((4,), (8,), (None,)),
        ((4,), (8,), (2.1,)),
        ((5, 7), (16, 16), (None, None)),
        ((5, 7), (3, 4), (None, None)),
        ((4, 6), (8, 12), (2.0, 2.0)),
        ((4, 6), (4, 9), (None, 1.5)),
        ((3, 5, 2), (4, 5, 6), (None, None, None)),
    ],
)
def test_nearest(before: Any, after: Any, scales: Any, exact: bool) -> None:
    grad = torch.randn(2, 3, *after, dtype=torch.float64)
    check(OPS[len(before)][exact], grad, list(after), [2, 3, *before], *scales)


def test_every_place_of_a_long_axis_is_where_the_kernel_has_it() -> None:
    for before, after in ((3, 1000), (49, 343 + 1), (1000, 7), (41, 123 * 5)):
        grad = torch.randn(1, 1, after, dtype=torch.float64)
        for op in OPS[1]:
            check(op, grad, [after], [1, 1, before], None)


LINES = {1: aten.upsample_linear1d, 2: aten.upsample_bilinear2d, 3: aten.upsample_trilinear3d}
BACKWARDS = {
    1: aten.upsample_linear1d_backward,
    2: aten.upsample_bilinear2d_backward,
    3: aten.upsample_trilinear3d_backward,
}
SIZES = [
    ((5,), (16,)),
    ((5,), (3,)),
    ((1,), (4,)),
    ((4,), (1,)),
    ((49,), (343,)),
    ((5, 7), (16, 16)),
    ((108, 20), (8, 8)),
    ((7, 7), (7, 7)),
    ((2, 3), (64, 3)),
    ((3, 4, 5), (6, 3, 11)),
]


# What is aligned takes no scales, whatever the sizes.
@pytest.mark.long_cases(*(f"before{n}-after{n}-scaled-True" for n in range(len(SIZES)) if n != 5))
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("share", [None, 1.07], ids=["", "scaled"])
@pytest.mark.parametrize(("before", "after"), SIZES)
def test_lines(before: Any, after: Any, share: float | None, aligned: bool) -> None:
    scales = [None if share is None else share * new / old for old, new in zip(before, after, strict=True)]
    x, grad = torch.randn(2, 3, *before, dtype=torch.float64), torch.randn(2, 3, *after, dtype=torch.float64)
    check(LINES[len(before)].default, x, list(after), aligned, *scales)
    check(BACKWARDS[len(before)].default, grad, list(after), [2, 3, *before], aligned, *scales)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("share", [None, 1.07], ids=["", "scaled"])
@pytest.mark.parametrize(("before", "after"), [sizes for sizes in SIZES if len(sizes[0]) == 2])
def test_curves(before: Any, after: Any, share: float | None, aligned: bool) -> None:
    scales = [None if share is None else share * new / old for old, new in zip(before, after, strict=True)]
    x, grad = torch.randn(2, 3, *before, dtype=torch.float64), torch.randn(2, 3, *after, dtype=torch.float64)
    check(aten.upsample_bicubic2d.default, x, list(after), aligned, *scales)
    check(aten.upsample_bicubic2d_backward.default, grad, list(after), [2, 3, *before], aligned, *scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types_of_fewer_digits(dtype: torch.dtype) -> None:
    x, grad = torch.randn(2, 3, 300, 4, dtype=dtype), torch.randn(2, 3, 600, 8, dtype=dtype)
    check(aten.upsample_bilinear2d.default, x, [600, 8], False, None, None)
    check(aten.upsample_bilinear2d_backward.default, grad, [600, 8], [2, 3, 300, 4], False, None, None)


def test_an_infinite_gradient_stays_where_it_is() -> None:
    grad = torch.randn(1, 1, 16, 16, dtype=torch.float64)
    grad[0, 0, 5, 5] = torch.inf
    check(aten.upsample_bilinear2d_backward.default, grad, [16, 16], [1, 1, 8, 8], False, None, None)


def test_no_gradient_is_a_scatter() -> None:
    grad = torch.randn(1, 1, 16, 16)
    for op in (aten.upsample_bilinear2d_backward.default, aten.upsample_bicubic2d_backward.default):
        graph, _ = trace(op, grad, [16, 16], [1, 1, 8, 8], False, None, None)
        assert targets(graph) & {aten.index_select.default}
        assert not any("index_put" in str(target) or "scatter" in str(target) for target in targets(graph))


def test_pytorch_has_its_own_forms_again_after_a_trace() -> None:
    op = aten.upsample_bilinear2d.vec
    before = dict(op.py_kernels)
    with own_resizing_gradients():
        assert op.py_kernels != before
    assert op.py_kernels == before
