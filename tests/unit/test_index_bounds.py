# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which arguments of a traced graph are indices, and of what: eager refuses the ones that lie outside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from retrograd.contract.indices import IndexBound
from retrograd.frontend.doors.capture import capture_joint
from retrograd.runtime.arguments.index_bounds import IndexCheck

END = 2**63 - 1


def bounds(model: Callable[..., Any], *args: Tensor) -> tuple[IndexBound, ...]:
    with contextlib.ExitStack() as stack:
        return capture_joint(stack, model, args).signature.indices


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


CASES: dict[str, tuple[Callable[..., Any], Tensor, Tensor, IndexBound]] = {
    "embedding": (lambda w, i: F.embedding(i, w, padding_idx=1), randn(11, 4), zeros(2, 2), IndexBound(1, 0, 10)),
    "bag": (lambda w, i: F.embedding_bag(i, w, mode="sum"), randn(11, 4), zeros(2, 2), IndexBound(1, 0, 10)),
    "labels": (lambda x, t: F.cross_entropy(x, t), randn(3, 5), zeros(3), IndexBound(1, 0, 4, exempt=-100)),
    "smoothed": (
        lambda x, t: F.cross_entropy(x, t, torch.ones(5), ignore_index=2, label_smoothing=0.1),
        randn(3, 5),
        zeros(3),
        IndexBound(1, 0, 4, exempt=2),
    ),
    "pixels": (lambda x, t: F.nll_loss(x, t), randn(3, 5, 2, 2), zeros(3, 2, 2), IndexBound(1, 0, 4, exempt=-100)),
    "gather": (lambda x, i: x.gather(-1, i), randn(3, 4), zeros(3, 2), IndexBound(1, 0, 3)),
    "index": (lambda x, i: x[:, i], randn(3, 4), zeros(2).int(), IndexBound(1, -4, 3)),
    "two": (lambda x, i: x[i, i], randn(3, 4), zeros(2), IndexBound(1, -3, 2)),
    "index_select": (lambda x, i: x.index_select(1, i), randn(3, 4), zeros(2), IndexBound(1, 0, 3)),
    "index_add": (lambda x, i: torch.zeros(5, 4).index_add(0, i, x), randn(3, 4), zeros(3), IndexBound(1, 0, 4)),
    "index_put": (lambda x, i: torch.zeros(5, 4).index_put((i,), x), randn(3, 4), zeros(3), IndexBound(1, -5, 4)),
    "from the end twice": (
        lambda x, i: x[torch.where(i < 0, i + 6, i)], randn(3, 4), zeros(2), IndexBound(1, -9, 2)
    ),
    "scatter_add": (
        lambda x, i: torch.zeros(3, 6).scatter_add(1, i, x), randn(3, 4), zeros(3, 4), IndexBound(1, 0, 5)
    ),
    "take": (lambda x, i: x.take(i), randn(3, 4), zeros(2), IndexBound(1, -12, 11)),
    "slice": (
        lambda w, i: F.embedding(i[:, :-1], w), randn(11, 4), zeros(2, 3), IndexBound(1, 0, 10, slices=((1, 0, -1, 1),))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bounds_are_those_of_eager(name: str) -> None:
    model, x, index, expected = CASES[name]
    assert bounds(model, x, index) == (expected,)
    for number in (expected.least, expected.most, *([] if expected.exempt is None else [expected.exempt])):
        model(x, torch.full_like(index, number))
    for number in (expected.least - 1, expected.most + 1):
        with pytest.raises((IndexError, RuntimeError), match=r"range|bounds|index_size"):
            model(x, torch.full_like(index, number))


def test_tokens_that_are_labels_too() -> None:
    def next_token(table: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(F.embedding(tokens[:, :-1], table).flatten(0, 1), tokens[:, 1:].flatten())

    found = bounds(next_token, randn(9, 9), zeros(2, 3))
    assert found == (
        IndexBound(1, 0, 8, slices=((1, 0, -1, 1),)),
        IndexBound(1, 0, 8, exempt=-100, slices=((1, 1, END, 1),)),
    )


@pytest.mark.parametrize(
    "model",
    [
        lambda x, i: x * i,
        lambda x, i: x[i.clamp(0, 2)],
        lambda x, i: x[torch.where(i > 5, 0, i)],
        lambda x, i: x[torch.where(i < 0, i + i.shape[0] * i, i)],
        lambda x, i: F.ctc_loss(x.log_softmax(-1).unsqueeze(1), i[None], torch.tensor([3]), torch.tensor([1])),
    ],
    ids=["no index", "clamped", "chosen", "raised", "padded"],
)
def test_what_eager_takes_whatever_it_is_has_no_bounds(model: Callable[..., Any]) -> None:
    index = torch.tensor([1, 2, 77]) if "ctc" in str(model.__code__.co_names) else zeros(3)
    assert bounds(model, randn(3, 3), index) == ()


def test_checks() -> None:
    check = IndexCheck(IndexBound(1, -3, 2, exempt=7, slices=((0, 1, END, 1),)))
    assert check.find_problem(torch.tensor([99, 2, -3, 7])) is None
    assert check.find_problem(torch.tensor([99])) is None
    assert check.find_problem(torch.tensor([0, 3])) == "the index 3 is out of range: from -3 to 2, or 7"
    assert check.find_problem(torch.tensor([0, 7, -4])) == "the index -4 is out of range: from -3 to 2, or 7"


def test_a_tensor_that_was_written_to_is_looked_at_again() -> None:
    check, index = IndexCheck(IndexBound(0, 0, 2)), torch.tensor([1])
    assert check.find_problem(index) is None and check.find_problem(index) is None
    index.fill_(3)
    assert check.find_problem(index) == "the index 3 is out of range: from 0 to 2"
    with torch.inference_mode():
        untracked = torch.tensor([1])
        assert check.find_problem(untracked) is None
        untracked.fill_(3)
        assert check.find_problem(untracked) is not None


class Device:
    """Answers when it is told to, or waited for; ``waits`` counts that."""

    def __init__(self) -> None:
        self.ready, self.waits = False, 0

    def ask(self, extremes: Tensor) -> Callable[[bool], tuple[int, int] | None]:
        low, high = extremes.tolist()

        def read(wait: bool) -> tuple[int, int] | None:
            self.waits += wait
            return (low, high) if wait or self.ready else None

        return read


def test_on_a_device_the_first_tensor_alone_is_waited_for() -> None:
    device = Device()
    check = IndexCheck(IndexBound(0, 0, 2), device.ask)
    assert check.find_problem(torch.tensor([3])) == "the index 3 is out of range: from 0 to 2"
    assert check.find_problem(torch.tensor([2])) is None
    wrong = torch.tensor([1, 5])
    assert check.find_problem(wrong) is None
    assert check.find_problem(wrong) is None
    device.ready = True
    told = "the index 5 is out of range: from 0 to 2, in an earlier call, which gave NaN for what it leads to"
    assert check.find_problem(torch.tensor([0])) == told
    # The tensor of that call was not looked at, and the wrong one did not pass.
    assert check.find_problem(wrong) is None
    assert check.find_problem(torch.tensor([0])) == told
    assert check.find_problem(torch.tensor([0])) is None
    assert not device.waits


def test_a_host_that_is_far_ahead_waits() -> None:
    device = Device()
    check = IndexCheck(IndexBound(0, 0, 2), device.ask)
    for _ in range(12):
        assert check.find_problem(torch.tensor([2])) is None
    assert device.waits == 2
