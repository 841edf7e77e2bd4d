# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What rounding explains is right, whatever it hangs on; nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.preparation.graph_memory import available_bytes, peak_bytes
from retrograd.frontend.verification import distances
from retrograd.frontend.verification.distances import error_of, norm_of, norms_of_finite
from retrograd.frontend.verification.judgement import (
    COARSE_SHAKES,
    SHAKES,
    Difference,
    find_difference,
    reruns,
)
from retrograd.frontend.verification.reference_graph import Graph
from retrograd.frontend.verification.unwritten_memory import _ZerosInMemory

Function = Callable[[Tensor], Tensor]


def judge(function: Function, argument: Tensor, other: Function, allowed: float = 1e-4) -> Difference | None:
    """Whether ``other`` gives what ``function`` gives."""
    graph_module = make_fx(function)(argument)
    runs = ([run] if isinstance(run, Tensor) else run for run in reruns(graph_module, [argument], lambda: None))
    return find_difference([other(argument)], [function(argument)], [allowed], lambda: runs)


def never() -> Iterator[Sequence[Any]]:
    raise AssertionError("close values are not run again")


def centred(x: Tensor) -> Tensor:
    """Nothing but what rounding leaves."""
    return (x - x.mean()).sum()


def test_close_values_are_not_run_again() -> None:
    x = torch.randn(100)
    assert find_difference([x * (1 + 1e-6), 3, None], [x, 3, None], [1e-4, 0.0, 0.0], never) is None


def test_sums_that_cancel_are_anything_within_rounding() -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)) + 100
    other = judge(centred, x, lambda t: centred(t.flip(0)) + 1e-2)
    assert other is None
    assert judge(centred, x, lambda t: centred(t) + 100.0) is not None


def test_a_mean_that_is_almost_zero() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    x = torch.cat([x, -x]) + 1e-8
    assert judge(lambda t: t.mean(), x, lambda t: t.flip(0).double().mean().float()) is None


def test_gradients_of_noise_are_measured_against_the_others() -> None:
    large, noise = torch.ones(10), torch.ones(10) * 1e-7
    assert find_difference([large, -noise], [large, noise], [1e-4, 1e-4], never, gradients=True) is None


@pytest.mark.parametrize(
    "wrong",
    [
        lambda t: t.sin() * 1.001,
        lambda t: t.sin().t().contiguous(),
        lambda t: torch.where(torch.arange(400).view(20, 20) == 7, t.sin() + 0.1, t.sin()),
        lambda t: torch.where(t > 2, float("nan"), t.sin()),
        lambda t: t.sin().diag().diag(),
        lambda t: torch.zeros_like(t),
        lambda t: t.sin()[1:],
        lambda t: t.sin().double(),
    ],
)
def test_wrong_values_are_found(wrong: Function) -> None:
    x = torch.randn(20, 20, generator=torch.Generator().manual_seed(2))
    assert judge(torch.sin, x, wrong) is not None
    assert judge(torch.sin, x, lambda t: t.double().sin().float()) is None


def test_one_wrong_element_of_many() -> None:
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(3))
    assert judge(torch.sin, x, lambda t: t.sin().index_fill(0, torch.tensor([77]), 0.9)) is not None


def test_numbers_are_not_run_again_with_coarse_rounding() -> None:
    """Which says something of what is chosen by comparison alone."""
    x, turns = torch.linspace(0.1, 1, 10), []

    def runs() -> Iterator[Sequence[Any]]:
        for turn in range(1 + SHAKES + COARSE_SHAKES):
            turns.append(turn)
            yield [x, torch.arange(10)]

    assert find_difference([x * 2, torch.arange(10)], [x, torch.arange(10)], [1e-4, 0.0], runs) is not None
    assert turns == [*range(1 + SHAKES)]
    turns.clear()
    assert find_difference([x * 2, torch.arange(10) + 1], [x, torch.arange(10)], [1e-4, 0.0], runs) is not None
    assert turns == [*range(1 + SHAKES + COARSE_SHAKES)]


def test_comparisons_that_hang_on_rounding() -> None:
    """Of numbers that are as good as equal, either may be the larger; of others not."""

    def compare(x: Tensor) -> Tensor:
        return (x * 3 - x - 2 * x + (torch.arange(8) - 3)) > 0

    x = torch.full((8,), 0.1)
    base = compare(x)
    tie = base ^ (torch.arange(8) == 3)
    assert judge(compare, x, lambda _: tie) is None
    assert judge(compare, x, lambda _: base ^ (torch.arange(8) == 6)) is not None


def test_of_many_comparisons_a_few_may_hang_on_rounding() -> None:
    """No run need show it of one in 100,000."""
    x = torch.linspace(-1, 1, 200_000)

    def compare(x: Tensor) -> Tensor:
        return x > 0.5

    def flip(count: int) -> Function:
        return lambda _: compare(x) ^ (torch.arange(200_000) < count)

    assert judge(compare, x, flip(2)) is None
    assert judge(compare, x, flip(3)) is not None


def test_comparisons_of_which_each_run_decides_some_alone() -> None:
    """In a deep network under autocast each run has a few comparisons that no other has."""
    generator = torch.Generator().manual_seed(4)
    sure = torch.rand(100_000, generator=generator) > 0.5
    runs = [[sure ^ (torch.rand(100_000, generator=generator) < 0.01)] for _ in range(3 + SHAKES + COARSE_SHAKES)]
    ours, eager, *others = runs
    assert find_difference(ours, eager, [0.0], lambda: iter(others)) is None
    wrong = [ours[0] ^ (torch.arange(100_000) < 30_000)]
    assert find_difference(wrong, eager, [0.0], lambda: iter(others)) is not None


def test_beside_what_rounding_makes_infinite() -> None:
    """Either is right there, and the rest is compared."""

    def divide(x: Tensor) -> Tensor:
        return torch.cat([1 / (x[:1] * 3 - x[:1] - 2 * x[:1]), x[1:].sin()])

    x = torch.cat([torch.tensor([0.1]), torch.linspace(1, 2, 7)])
    infinite = torch.arange(8) == 0
    assert judge(divide, x, lambda t: divide(t).masked_fill(infinite, float("inf"))) is None
    assert judge(divide, x, lambda t: torch.cat([divide(t)[:1], t[1:].cos()]).masked_fill(infinite, float("inf")))


def test_infinities_in_the_same_places_are_right() -> None:
    x = torch.tensor([1.0, float("inf"), -float("inf"), float("nan")])
    assert error_of(x, x.clone()) == 0.0
    assert error_of(x, x.flip(0)) == float("inf")
    assert error_of(torch.tensor([1 + 1j]), torch.tensor([1 + 1j])) == 0.0


def test_numbers_whose_squares_are_too_large() -> None:
    x = torch.tensor([1e300, 1.0], dtype=torch.float64)
    assert error_of(x, x.clone()) == 0.0
    assert error_of(x * 3, x) == pytest.approx(2.0)
    assert error_of(-x * 1e8, x * 1e8) == float("inf")


@pytest.mark.parametrize("held", [0.0, 1e300, float("inf"), float("nan")])
@pytest.mark.parametrize("wrong", [False, True])
def test_memory_that_no_op_has_written(wrong: bool, held: float) -> None:
    """It may hold anything, and what hangs on it; the rest of that result may not."""

    def padded(x: Tensor) -> Tensor:
        return torch.cat([x.sin(), torch.empty(2, dtype=x.dtype)]) * 2

    x = torch.randn(3, dtype=torch.float64)
    graph = Graph(make_fx(padded)(x), gradients=False)
    eager = graph.run([x])
    eager[0][3:] = held
    found = torch.cat([x.cos() if wrong else x.sin(), torch.full((2,), 1e300, dtype=x.dtype)]) * 2
    modes = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    difference = graph.find_difference([found], [x], eager)
    assert (difference is not None) is wrong
    assert (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    ) == modes


@torch.library.custom_op("retrograd_tests::padded_roots", mutates_args=())
def padded_roots(x: Tensor) -> Tensor:
    given = torch.empty(x.shape[0] + 2, dtype=x.dtype)
    given[:-2] = x.sqrt()
    return given


@padded_roots.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0] + 2)


@pytest.mark.parametrize("held", [0.0, 1e300, float("nan")])
@pytest.mark.parametrize("wrong", [False, True])
def test_memory_that_the_kernel_of_an_op_has_not_written(wrong: bool, held: float) -> None:
    """Of an op that is not PyTorch's, whose name says nothing; a NaN that it computes is one of the compiled code."""

    def function(x: Tensor) -> Tensor:
        roots: Tensor = padded_roots(x)
        return roots * 2

    x = torch.tensor([4.0, -1.0, 9.0], dtype=torch.float64)
    graph = Graph(make_fx(function)(x), gradients=False)
    eager = graph.run([x])
    eager[0][3:] = held
    last = 5.0 if wrong else 6.0
    found = [torch.tensor([4.0, float("nan"), last, 1.0, 1.0], dtype=x.dtype)]
    assert (graph.find_difference(found, [x], eager) is not None) is wrong
    without_nan = [found[0].nan_to_num()]
    assert graph.find_difference(without_nan, [x], eager) is not None


def test_memory_that_an_op_leaves_is_cleared_whatever_it_held() -> None:
    x = torch.tensor([4.0, -1.0, 9.0], dtype=torch.float64)
    for count in range(0, 200, 8):
        held = [torch.full((5,), float("nan"), dtype=torch.float64) for _ in range(count)]
        del held[::2], held
        with _ZerosInMemory():
            roots = padded_roots(x)
        assert roots[3:].tolist() == [0.0, 0.0]


def test_memory_of_a_graph() -> None:
    """Two values of 4000 bytes are alive at a time; views take none."""

    def chain(x: Tensor) -> Tensor:
        return x.sin().view(10, 100).cos().t().exp()

    graph_module = make_fx(chain, tracing_mode="fake")(torch.randn(1000))
    assert peak_bytes(graph_module) == 8000
    free = available_bytes(torch.device("cpu"))
    assert free is None or free > 0


@dataclass
class Firsts:
    """First runs of a graph, which are asked for once."""

    compared: list[list[Tensor]]
    moved: list[Tensor]

    def compare(self, _places: Sequence[int]) -> Iterator[Sequence[Any]]:
        return iter(self.compared)

    def move(self) -> Sequence[Any]:
        return self.moved


def test_arguments_off_by_rounding_explain_numbers_first() -> None:
    x = torch.linspace(0.1, 1, 10)
    first = Firsts([], [x * (1 + 1e-3)])
    assert find_difference([x * (1 + 1e-2)], [x], [1e-4], never, first=first) is None
    with pytest.raises(AssertionError, match="not run again"):
        find_difference([x * 1.1], [x], [1e-4], never, first=first)
    infinite = Firsts([], [x * float("inf")])
    with pytest.raises(AssertionError, match="not run again"):
        find_difference([x * float("nan")], [x], [1e-4], never, first=infinite)


def test_numbers_that_are_compared_explain_choices_first() -> None:
    x = torch.arange(8) > 3
    found = x ^ (torch.arange(8) == 3) ^ (torch.arange(8) == 4)
    runs = [x, x ^ (torch.arange(8) == 3), x ^ (torch.arange(8) == 4)]
    assert find_difference([found], [x], [0.0], never, first=Firsts([[run] for run in runs], [])) is None
    for told in ([], [[~x], *[[run] for run in runs]], [[run] for run in runs[:2]]):
        with pytest.raises(AssertionError, match="not run again"):
            find_difference([found], [x], [0.0], never, first=Firsts(told, []))


def test_distances_of_large_tensors_are_those_of_their_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(3, 5, 7, 4, dtype=torch.complex64), torch.randn(3, 5, 7, 4, dtype=torch.complex64)
    b[1, 2, 3, 0] = a[1, 2, 3, 0] = float("inf")
    pairs = [
        (a, b),
        (a.permute(0, 2, 3, 1), b.permute(0, 2, 3, 1)),
        (a, b.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)),
    ]
    whole = [error_of(found, expected) for found, expected in pairs]
    monkeypatch.setattr(distances, "_PIECE", 11)
    assert [error_of(found, expected) for found, expected in pairs] == pytest.approx(whole)
    assert whole == pytest.approx([whole[0]] * 3)
    assert whole[0] > 0.5
    monkeypatch.undo()
    finite = torch.randn(1000)
    assert norm_of(finite) == pytest.approx(float(finite.double().norm()))
    found = finite.clone()
    found[3] += 2
    assert norms_of_finite(found, finite) == pytest.approx((2, float(finite.double().norm())))
    for number in (float("inf"), -float("inf"), float("nan"), 1e38):
        assert (norms_of_finite(torch.full((3,), number), torch.full((3,), number)) is None) == (number != 1e38)
