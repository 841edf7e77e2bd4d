# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Comparisons with eager that several files of tests make."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def assert_same(ours: Sequence[Tensor], eager: Sequence[Tensor]) -> None:
    """Fail where tensors are not of the same types and sizes, or off by more than rounding in float32."""
    for mine, expected in zip(ours, eager, strict=True):
        assert mine.dtype == expected.dtype
        assert mine.shape == expected.shape
        assert (mine - expected).abs().max() <= 2e-5 * max(1.0, float(expected.detach().abs().max())), (mine, expected)
