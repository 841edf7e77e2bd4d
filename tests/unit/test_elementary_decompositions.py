# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Elementary functions as decompositions, against eager and f64; nothing is compiled."""

from __future__ import annotations

import math

import pytest
import torch

from retrograd.frontend.decompositions import functions, quotients


def same(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 4e-6), (torch.float64, 2e-15), (torch.float16, 1e-3)])
def test_tangent(dtype: torch.dtype, tolerance: float) -> None:
    """Beside poles, at once and after many turns, and where there is none."""
    turns = torch.arange(-2000 if dtype is torch.float16 else -60000, 2000, 7, dtype=torch.float64) * (math.pi / 2)
    x = torch.cat([turns, turns + 0.1, torch.linspace(-2, 2, 301, dtype=torch.float64)]).to(dtype)
    exact = torch.tan(x.double()).to(dtype)
    torch.testing.assert_close(functions.tan(x), exact, rtol=tolerance, atol=0.0)
    if dtype is torch.float32:
        far = torch.logspace(5, 38, 301)
        torch.testing.assert_close(functions.tan(far), torch.tan(far.double()).float(), rtol=tolerance, atol=0.0)
    edge = torch.tensor([0.0, math.inf, -math.inf, math.nan], dtype=dtype)
    same(functions.tan(edge), torch.tan(edge))
    same(functions.tan(torch.tensor([1, 2])), torch.tan(torch.tensor([1, 2])), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_whole_quotients_and_what_they_leave(dtype: torch.dtype) -> None:
    """Near whole numbers, at zero and beyond all numbers; by tensors and by numbers. Whole numbers are not taken."""
    x = torch.tensor([0.0, -0.0, 1.5, -1.5, 0.9, 3e38, -1e30, 100.0, math.inf, -math.inf, math.nan]).to(dtype)
    y = torch.tensor([2.0, 0.3, -0.1, 0.7, 1e30, 0.0, -0.0, math.inf, -math.inf, math.nan]).to(dtype)
    for divisor in (y[:, None], 0.3, -0.1, 0.0, math.inf):
        same(quotients.fmod(x, divisor), torch.fmod(x, divisor))
        down = quotients.divide(x, divisor, rounding_mode="floor")
        same(down, torch.div(x, divisor, rounding_mode="floor"))
        assert down.dtype == dtype
    # Of bfloat16 a number is a divisor as it is, and rounded where it leaves something; both are off by one elsewhere.
    many = torch.arange(-1200, 1200).to(dtype) / 16
    for number in (0.3, torch.tensor(0.3)):
        same(quotients.divide(many, number, rounding_mode="floor"), torch.div(many, number, rounding_mode="floor"))
        same(quotients.fmod(many, number), torch.fmod(many, number))
        cut = quotients.divide(many, number, rounding_mode="trunc")
        if dtype == torch.bfloat16:
            same(cut, torch.div(many, number, rounding_mode="trunc"))
        else:
            assert cut is NotImplemented
    assert quotients.divide(x, x, rounding_mode="trunc") is NotImplemented
    assert quotients.fmod(torch.tensor([5]), 3) is NotImplemented


def test_signs_and_lengths() -> None:
    x, y = torch.tensor([1.0, -2.0, 0.0, -0.0]), torch.tensor([[-0.0], [0.0], [-3.0], [math.inf]])
    assert torch.equal(torch.signbit(functions.copysign(x, y)), torch.signbit(torch.copysign(x, y)))
    same(functions.copysign_scalar(x, -0.0), torch.copysign(x, -0.0))
    same(functions.hypot(x * 1e30, y.nan_to_num(posinf=1e30)), torch.hypot(x * 1e30, y.nan_to_num(posinf=1e30)), 1e-6)
    same(functions.angle(torch.tensor([1.0, -1.0, math.nan])), torch.angle(torch.tensor([1.0, -1.0, math.nan])))


HYPERBOLIC = {
    "expm1": (functions.expm1, torch.expm1, ()),
    "sinh": (functions.sinh, torch.sinh, (20.0, 89.3, 700.0)),
    "asinh": (functions.asinh, torch.asinh, (2.0**28, 1e30)),
    "acosh": (functions.acosh, torch.acosh, (1.0, 1 + 1e-6, 2.0**28, 1e30)),
    "atanh": (functions.atanh, torch.atanh, (1 - 1e-6,)),
}


@pytest.mark.parametrize("name", HYPERBOLIC)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 5e-7), (torch.float64, 1e-15), (torch.bfloat16, 4e-3)]
)
def test_hyperbolic_functions(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """Near zero and near one, where differences cancel, and far out, where squares overflow."""
    ours, theirs, points = HYPERBOLIC[name]
    ends = torch.tensor([*points, math.inf, math.nan, 0.0], dtype=torch.float64)
    sizes = torch.cat([torch.logspace(-30, 1.5, 501, dtype=torch.float64), ends])
    x = torch.cat([sizes, -sizes]).to(dtype)
    if ours(x) is NotImplemented:
        assert name == "expm1" and dtype is not torch.float64
        return
    torch.testing.assert_close(ours(x), theirs(x.double()).to(dtype), rtol=tolerance, atol=0.0, equal_nan=True)
    assert name == "expm1" or ours(torch.tensor([2, 1])).dtype == torch.float32


def test_tangents_of_zeros() -> None:
    primal, other = torch.ones(2, 3), torch.ones(4, 5, dtype=torch.float64)
    for batches in (0, 1):
        expected = torch.ops.aten._new_zeros_with_same_feature_meta(primal, other, self_num_batch_dims=batches)
        same(functions.zero_tangent(primal, other, self_num_batch_dims=batches), expected)
