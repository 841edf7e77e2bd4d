# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Eager with every op rounded another way, of small tensors and of those that are sampled."""

import pytest
import torch
import torch.nn.functional as F

from retrograd.frontend.verification import other_roundings
from retrograd.frontend.verification.other_roundings import Rounded, move, move_all

SIZES = pytest.mark.parametrize("large", [False, True])


def test_moved_by_value_equal_numbers_stay_equal() -> None:
    values = torch.randn(1000).repeat(2)
    moved = move(values, torch.Generator().manual_seed(0), by_value=True)
    assert torch.equal(moved[:1000], moved[1000:])
    assert not torch.equal(moved, values)
    assert ((moved - values).abs() <= torch.finfo(torch.float32).eps * values.abs()).all()


def test_moved_by_place_equal_numbers_part() -> None:
    moved = move(torch.full((1000,), 1.7), torch.Generator().manual_seed(0))
    assert 2 <= moved.unique().numel() <= 3


def test_another_seed_moves_otherwise() -> None:
    values = torch.randn(1000)
    first, second = (move(values, torch.Generator().manual_seed(seed), by_value=True) for seed in (0, 1))
    assert not torch.equal(first, second)


def test_noise_is_spread_evenly() -> None:
    spread = other_roundings.spread(torch.arange(100_000), 5)
    counts = torch.histc(spread, 10, 0, 1)
    assert spread.min() >= 0
    assert spread.max() < 1
    assert (counts / 10_000 - 1).abs().max() < 0.05


@SIZES
def test_what_moves_numbers_is_exact(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_roundings, "_LARGE", 16 if large else 1 << 20)
    x = torch.randn(4, 3, 8)
    with Rounded(0):
        results = [torch.cat([x, x]), torch.where(x > 0, x, -1.5), F.relu(x), x.max(-1).values, x.flip(0)]
    expected = [torch.cat([x, x]), torch.where(x > 0, x, -1.5), F.relu(x), x.max(-1).values, x.flip(0)]
    assert all(map(torch.equal, results, expected))


@SIZES
def test_what_computes_is_off_by_rounding(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_roundings, "_LARGE", 16 if large else 1 << 20)
    x = torch.randn(64, 64)
    for compute in (torch.exp, lambda x: x @ x, lambda x: x.cumsum(0)):
        with Rounded(0):
            result = compute(x)
        exact = compute(x)
        assert not torch.equal(result, exact)
        assert ((result - exact).abs() <= 1e-6 * exact.abs() + 1e-12).all()


@pytest.mark.parametrize("count", [51_380_224, (1 << 24) + 1])
def test_samples_of_a_large_tensor_are_in_it(count: int) -> None:
    """In float32 the last place of such a tensor is the one behind it."""
    values = torch.zeros(1).expand(count)
    assert not other_roundings._find_taken_over(values, [values[:1], torch.zeros(1)], False).any()


def test_all_numbers_but_whole_ones_are_off_by_a_unit_at_the_most() -> None:
    torch.manual_seed(0)
    given = [
        torch.randn(3, 50, 700).permute(0, 2, 1),
        torch.arange(4.0),
        torch.arange(4),
        torch.randn(5, 1).expand(5, 3),
    ]
    moved = move_all([*given, 7])
    assert moved[4] == 7
    assert all(map(torch.equal, moved[1:3], given[1:3]))
    for before, after in zip(given, moved, strict=False):
        assert after.shape == before.shape
        assert ((after - before).abs() <= 2 * torch.finfo(torch.float32).eps * before.abs()).all()
    assert 0.5 < (moved[0] != given[0]).double().mean() < 0.8
    assert moved[0].stride() == given[0].stride()


def test_what_goes_to_another_device_is_compared_there(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bool] = []
    isin = torch.isin

    def see(values: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        compared.append(values.device == given.device)
        return isin(values, given)

    monkeypatch.setattr(torch, "isin", see)
    with Rounded(1):
        # CUDA's kernels refuse tensors of two devices, those of "meta" take them.
        assert torch.rand(5).to("meta").is_meta
    assert compared and all(compared)
