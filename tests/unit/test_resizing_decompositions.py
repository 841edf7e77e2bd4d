# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Gradients of resized images as decompositions, against eager; nothing is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decomposition_checks import check

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
