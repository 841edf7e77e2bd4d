# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Losses as formulas: values and gradients beside PyTorch's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.decompositions.table import decomposition_table
from retrograd.frontend.traceable.content_free import TraceableFunctions
from retrograd.frontend.traceable.portable_ops import portable_ops

# Lengths may be numbers, which the declaration of the function leaves out.
ctc_loss: Callable[..., Tensor] = F.ctc_loss
FRAMES, LABELS = torch.tensor([9, 7, 5, 3]), torch.tensor([3, 5, 0, 1])


def check(loss: Callable[..., Tensor], *leaves: Tensor) -> None:
    """The loss and its gradients, with weights that differ from element to element: run as it is traced, and traced
    with the decompositions."""

    def run() -> list[Tensor]:
        value = loss(*leaves)
        weights = torch.arange(1.0, 1 + value.numel(), dtype=value.dtype).reshape(value.shape)
        return [value.detach(), *torch.autograd.grad((value * weights).sum(), leaves)]

    expected = run()
    with TraceableFunctions():
        found = run()
        traced = make_fx(run, decomposition_table())()()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, equal_nan=True)
    torch.testing.assert_close(traced, expected, rtol=1e-10, atol=1e-10, equal_nan=True)


def make_targets(blank: int, lengths: Tensor, layout: str) -> Tensor:
    classes = torch.tensor([c for c in range(6) if c != blank])
    # Few classes, so that some follow themselves.
    targets = classes[torch.randint(2, (4, 5))]
    return targets if layout == "padded" else torch.cat([targets[i, :n] for i, n in enumerate(lengths)])


@pytest.mark.parametrize(
    ("blank", "reduction", "normalized"), [(0, "mean", True), (3, "none", False), (3, "sum", True)]
)
@pytest.mark.parametrize("layout", ["padded", "in a row"])
@pytest.mark.parametrize("lengths", ["tensors", "lists"])
def test_ctc_loss(lengths: str, layout: str, blank: int, reduction: str, normalized: bool) -> None:
    torch.manual_seed(0)
    scores = torch.randn(9, 4, 6, dtype=torch.float64, requires_grad=True)
    targets = make_targets(blank, LABELS, layout)
    given: list[Any] = [t if lengths == "tensors" else t.tolist() for t in (FRAMES, LABELS)]

    def loss(x: Tensor) -> Tensor:
        return ctc_loss(x.log_softmax(2) if normalized else x, targets, *given, blank, reduction)

    check(loss, scores)


@pytest.mark.parametrize("zero_infinity", [True, False])
def test_ctc_loss_where_labels_do_not_fit(zero_infinity: bool) -> None:
    """An infinite loss has no gradient that is a number, unless it is asked to be nothing."""
    torch.manual_seed(0)
    scores = torch.randn(9, 4, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([3, 5, 0, 4])
    targets = make_targets(0, labels, "padded")
    check(
        lambda x: ctc_loss(x.log_softmax(2), targets, FRAMES, labels, reduction="none", zero_infinity=zero_infinity),
        scores,
    )


def test_what_a_ctc_loss_saves_is_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's kernel leaves what the memory held before past the ends of rows: NaN, where it is asked to fill it."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    targets = make_targets(0, LABELS, "padded")
    given = torch.randn(9, 4, 6).log_softmax(2), targets, FRAMES, LABELS, 0, False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        unset, saved = torch.ops.aten._ctc_loss.Tensor(*given)[1], torch.ops.retrograd.ctc_loss(*given)[1]
    finally:
        torch.use_deterministic_algorithms(False)
    assert unset.isnan().any() and not saved.isnan().any()


def test_ctc_loss_without_labels() -> None:
    scores = torch.randn(9, 2, 6, dtype=torch.float64, requires_grad=True)
    none = torch.zeros(0, dtype=torch.long)
    check(lambda x: ctc_loss(x.log_softmax(2), none, torch.tensor([9, 8]), torch.tensor([0, 0])), scores)


def test_ctc_loss_of_one_sequence() -> None:
    torch.manual_seed(0)
    scores = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    check(lambda x: ctc_loss(x.log_softmax(1), torch.tensor([1, 2, 2]), (7,), (3,)), scores)


@pytest.mark.parametrize("shape", [(4, 3), (4, 1), (4,)])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("full", [True, False])
def test_gaussian_nll_loss(full: bool, reduction: str, shape: tuple[int, ...]) -> None:
    """One variance is below eps: it is raised to it, and has the gradient that it has there."""
    torch.manual_seed(0)
    means, variances = (torch.rand(s, dtype=torch.float64) for s in ((4, 3), shape))
    variances[0] = 1e-9
    target = torch.randn(4, 3, dtype=torch.float64)
    check(
        lambda x, v: F.gaussian_nll_loss(x, target, v, full=full, reduction=reduction),
        means.requires_grad_(),
        variances.requires_grad_(),
    )


@pytest.mark.parametrize("shape", [(4,), (3, 4)])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_multilabel_margin_loss_has_the_shape_it_has_in_eager(reduction: str, shape: tuple[int, ...]) -> None:
    target = torch.tensor([3, 0, -1, 1]).expand(shape)
    with FakeTensorMode() as mode, TraceableFunctions():
        made = F.multilabel_margin_loss(
            mode.from_tensor(torch.ones(shape)), mode.from_tensor(target), reduction=reduction
        )
    assert made.shape == F.multilabel_margin_loss(torch.ones(shape), target, reduction=reduction).shape


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_multilabel_margin_loss_counts_no_class_behind_the_first_end(shape: tuple[int, ...], reduction: str) -> None:
    rows = torch.tensor([[3, 0, -1, 1], [2, -1, 0, 0], [-1, -1, 1, 2]])
    target = rows[0] if len(shape) == 1 else rows
    torch.manual_seed(0)
    x = torch.randn(shape, requires_grad=True)

    def run(x: Tensor) -> tuple[Tensor, ...]:
        loss = F.multilabel_margin_loss(x, target, reduction=reduction)
        return loss, *torch.autograd.grad(loss.sum(), x)

    with portable_ops():
        traced = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    torch.testing.assert_close(traced(x), run(x))


def test_variance_below_zero_gives_no_number() -> None:
    with TraceableFunctions():
        loss = F.gaussian_nll_loss(torch.ones(2), torch.ones(2), torch.tensor([1.0, -1.0]))
    assert loss.isnan()
