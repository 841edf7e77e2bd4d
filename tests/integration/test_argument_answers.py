# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Models that ask what is in their arguments: each answer is a program, and every step has eager's gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrograd

Forward = Callable[[nn.Linear, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A function of a layer, rows of numbers, and integers."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(self.layer, x, y)


def labelled(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    rows = (y > 0).nonzero()
    scores: Tensor = layer(x)
    if rows.size(0) > 0:
        chosen = torch.gather(scores, 0, rows.expand(rows.size(0), scores.size(1)))
        return F.cross_entropy(chosen, torch.gather(y, 0, rows.view(-1)) - 1)
    return scores.sum() * 0


def branching(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    if (y > 0).all():
        return layer(x).sin().sum()  # type: ignore[no-any-return]
    return (layer(x) * (y > 0)[:, None]).cos().sum()  # type: ignore[no-any-return]


def by_cond(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    return torch.cond((y > 0).all(), lambda z: layer(z).sin(), lambda z: layer(z).cos(), (x,)).sum()  # type: ignore[no-any-return]


def cut_short(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    length = int(y.max())
    inside = torch.arange(y.max())[None] < y[:, None]  # type: ignore[call-overload]
    return (layer(x)[:length].sum(0) * inside.sum()).square().sum() + layer(x)[: y.max()].sum()  # type: ignore[no-any-return]


def repeated(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    return torch.repeat_interleave(layer(x), y, dim=0).cumsum(0).square().mean()


def split_up(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    rows = layer(x.repeat(y.max(), 1))[: int(y.sum())]  # type: ignore[call-overload]
    ends = F.pad(torch.repeat_interleave(y, torch.tensor([1, 1, 1, 1])).cumsum(0), (1, 0))
    return torch.stack([part.sum(0) for part in rows.split(ends.diff().tolist())]).sin().sum()


def by_value(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    values, inverse, counts = torch.unique(y, return_inverse=True, return_counts=True)
    means = torch.zeros(len(values), 4).index_add(0, inverse, layer(x)) / counts[:, None]
    runs, places = y.flip(0).unique_consecutive(return_inverse=True)
    weights = sum(value * means[row, 0] for row, value in enumerate(y.unique().tolist()))
    return (means.sin() * values[:, None]).sum() + (layer(x)[places] * runs.sum()).cos().sum() + weights  # type: ignore[no-any-return]


def one_by_one(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([layer(x[: y[i]]).sum() for i in range(y.shape[0])]).sin().sum()


def in_a_row(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    rows = layer(x)[y > 1]
    return (rows.sort(0)[0].cumsum(0)[-1] * len(rows)).square().sum()  # type: ignore[no-any-return]


def written_in_a_row(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    rows = layer(x)[y > 1]
    turned = rows.flip(0) * 2
    rows += 1
    rows[0] = turned[0] * 3
    return (rows * turned).sum()  # type: ignore[no-any-return]


def by_expert(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number in range(4):
        (rows,) = torch.where(y == number)
        if rows.numel() == 0:
            continue
        out.index_add_(0, rows, layer(x[None, rows].reshape(-1, 4)) * (number + 1))
    return out.square().sum()


def masked_by_hand(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    mask = (y > 0).float()
    mask[y == 2] = 2
    return layer(x).sum() if bool((mask > 1).any()) else layer(x).square().sum()  # type: ignore[no-any-return]


def counted(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    weights = torch.bincount(y, minlength=3).float()
    sums = torch.bincount(y, weights=torch.arange(4.0), minlength=2)
    return layer(x).mul(weights.sum() + weights[0] + sums.float()[1] * weights.numel()).square().sum()  # type: ignore[no-any-return]


def narrowed(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    return layer(x).narrow(0, y[0], 1).square().sum()  # type: ignore[no-any-return]


def chosen_behind(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    """As graph layers take an edge list without its loops."""
    edges = torch.stack([y, y.flip(0)])
    mask = edges[0] != edges[1]
    left, right = edges[:, mask]
    square = layer(x).view(1, 4, 2, 2)[..., torch.stack([y > 1, mask], 1), 0:1] * torch.equal(y, edges[0])
    total = (layer(x)[left] * x[right] * edges[..., mask].numel()).sum() + square.sin().sum()
    # And metric learning the pairs of one class.
    pairs = (y[:, None] == y).byte()
    pairs.fill_diagonal_(0)
    one, other = torch.where(pairs)
    return total + (layer(x)[one] - layer(x)[other]).square().sum() / len(one)  # type: ignore[no-any-return]


ASKING: dict[str, Forward] = {
    f.__name__: f
    for f in (
        labelled,
        branching,
        by_cond,
        cut_short,
        repeated,
        split_up,
        by_value,
        one_by_one,
        in_a_row,
        written_in_a_row,
        counted,
        narrowed,
        by_expert,
        masked_by_hand,
        chosen_behind,
    )
}
# Each that is new compiles. Of the second numbers, sums, greatest and least are others, and a zero is among them.
CONTENTS = ([1, 2, 3, 1], [3, 0, 2, 0], [1, 2, 3, 1])


def gradients(model: nn.Module, call: Callable[..., Tensor], *args: Tensor) -> list[Tensor]:
    loss = call(*args)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def sample(turn: int, contents: list[int]) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(turn)), torch.tensor(contents)


@pytest.mark.long_cases("by_expert", "one_by_one", "repeated", "narrowed")
@pytest.mark.parametrize("name", ASKING)
def test_steps_of_other_contents(name: str) -> None:
    model = Model(ASKING[name])
    step = retrograd.compile_backward(model, sample(0, CONTENTS[0]), cache=False)
    assert any("asked before each call" in line for line in step.explain().to_dict()["checks"])
    for turn, contents in enumerate(CONTENTS):
        given = sample(turn, contents)
        for found, expected in zip(gradients(model, step, *given), gradients(model, model, *given), strict=True):
            # To the largest element: another machine adds up in another order, and small elements are differences.
            bound = 1e-5 * float(expected.abs().max())
            torch.testing.assert_close(found, expected, rtol=0, atol=bound)


def test_a_result_that_is_chosen_by_an_argument() -> None:
    def chosen(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        return layer(x)[y > 1]  # type: ignore[no-any-return]

    model = Model(chosen)
    step = retrograd.compile_backward(model, sample(0, CONTENTS[0]), cache=False)
    for turn, contents in enumerate(CONTENTS):
        given = sample(turn, contents)
        torch.testing.assert_close(step(*given), model(*given))
        found, expected = (gradients(model, lambda *g, c=call: c(*g).square().sum(), *given) for call in (step, model))
        torch.testing.assert_close(found, expected)


def test_the_same_answer_takes_the_same_program() -> None:
    model = Model(branching)
    step = retrograd.compile_backward(model, sample(0, [1, 2, 3, 4]), cache=False)
    step(*sample(1, [4, 3, 2, 1]))
    assert "specializations" not in step.explain().to_dict()
    step(*sample(2, [0, 3, 2, 1]))
    (reason,) = step.explain().to_dict()["specializations"]
    assert "the contents of the arguments decide otherwise" in reason and "(True, asked" in reason


@pytest.mark.long
def test_what_is_another_answer_each_time_runs_in_eager() -> None:
    model = Model(cut_short)
    step = retrograd.compile_backward(model, sample(0, [1, 1, 1, 1]), cache=False)
    for most in (2, 3, 4):
        step(*sample(most, [1, most, 1, 1]))
    given = sample(5, [1, 5, 1, 1])
    with pytest.warns(retrograd.SpecializationWarning, match="such calls run in eager"):
        torch.testing.assert_close(gradients(model, step, *given), gradients(model, model, *given))


def test_a_file_asks_nothing(tmp_path: Path) -> None:
    step = retrograd.compile_backward(Model(branching), sample(0, [1, 2, 3, 4]), cache=False)
    with pytest.raises(retrograd.ArtifactError, match="arguments of these contents alone"):
        step.save(tmp_path / "program.rgd")


def scaled(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    return layer(x).sum() * x.abs().max().item()  # type: ignore[no-any-return]


def of_parameters(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    return layer(x).sum() if bool((layer(x) > 0).any()) else x.sum()


def written_elsewhere(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    mask = y > 0
    mask.view(2, 2)[0].logical_not_()
    return layer(x).sum() if mask.any() else layer(x).square().sum()  # type: ignore[no-any-return]


def written_uncounted(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    mask = y > 0
    mask.data.logical_not_()
    return layer(x).sum() if mask.any() else layer(x).square().sum()  # type: ignore[no-any-return]


def argument_written_uncounted(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    own = y.clone()
    view = own.view(2, 2)
    own.data.zero_()
    return layer(x).sum() if (view > 0).any() else layer(x).square().sum()  # type: ignore[no-any-return]


def drawn(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    return layer(x).sum() if bool((torch.rand(4) + y > 2).any()) else layer(x).square().sum()  # type: ignore[no-any-return]


NOT_ANSWERED = [scaled, of_parameters, written_elsewhere, written_uncounted, argument_written_uncounted, drawn]


@pytest.mark.parametrize("function", NOT_ANSWERED)
def test_what_is_not_answered(function: Forward) -> None:
    with pytest.raises(retrograd.CaptureError, match="data-dependent") as refused:
        retrograd.compile_backward(Model(function), sample(0, [1, 2, 3, 1]), cache=False)
    assert 'torch.compile(model, backend="retrograd")' in refused.value.remedy


def test_what_the_other_branch_reads_has_gradients_of_zero() -> None:
    """As in eager: an optimizer updates by its momentum what has a gradient of zero, and leaves what has none."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            scaled = x * self.scale
            first, second = self.first, self.second
            # A tensor that was computed before is read by one branch alone.
            return torch.cond(x.sum() > 0, lambda z: first(z).tanh(), lambda z: second(z + scaled).sin(), (x,)).sum()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, x = Branches(), torch.rand(3, 4)
    step = retrograd.compile_backward(model, (x,), cache=False)
    for sign in (1, -1):
        found, expected = gradients(model, step, sign * x), gradients(model, model, sign * x)
        torch.testing.assert_close(found, expected)


def test_branches_that_nothing_decides_are_named() -> None:
    def by_parameters(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        return torch.cond(layer(x).sum() > 0, lambda z: layer(z).sin(), lambda z: layer(z).cos(), (x,)).sum()  # type: ignore[no-any-return]

    with pytest.raises(retrograd.CaptureError, match=r"PyTorch.s cond, which is traced by torch\.compile alone"):
        retrograd.compile_backward(Model(by_parameters), sample(0, [1, 2, 3, 1]), cache=False)


def test_sizes_given_as_tensors() -> None:
    def padded(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        wide = x.new_zeros((torch.tensor(4), torch.tensor(6)))  # type: ignore[arg-type]
        wide[:, :4] = layer(x)
        return wide.square().sum()

    model = Model(padded)
    step = retrograd.compile_backward(model, sample(0, [1, 2, 3, 1]), cache=False)
    given = sample(1, [1, 2, 3, 1])
    torch.testing.assert_close(gradients(model, step, *given), gradients(model, model, *given))


class Padded(nn.Module):
    """Pads by numbers in a buffer and in an attribute, and takes its scale from its first batch."""

    started: Tensor
    stride: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("stride", torch.tensor(3))
        self.register_buffer("started", torch.tensor(0.0))
        self.register_buffer("scale", torch.zeros(()))
        self.left = torch.tensor(1)

    def forward(self, x: Tensor) -> Tensor:
        if not self.started:
            with torch.no_grad():
                self.scale.copy_(x.abs().max())
                self.started.fill_(1)
        widths: Any = self.left, self.stride - self.left
        return F.pad(self.layer(x / self.scale), widths).cumsum(1).square().sum()


def test_numbers_and_flags_in_buffers() -> None:
    model, other = Padded(), Padded()
    other.load_state_dict(model.state_dict())
    step = retrograd.compile_backward(model, (torch.randn(2, 4),), cache=False)
    for turn in range(4):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(turn))
        if turn == 3:
            # By a name that counts no writes.
            for each in (model, other):
                each.stride.data.fill_(5)
        torch.testing.assert_close(gradients(model, step, x), gradients(other, other, x))
        torch.testing.assert_close(model.state_dict(), other.state_dict())
    reasons = step.explain().to_dict()["specializations"]
    assert len(reasons) == 2, reasons
    model.left = torch.tensor(2)
    with pytest.raises(retrograd.ArgumentError, match=r"the tensor 'model.left', which the model reads, was replaced"):
        step(torch.randn(2, 4))


def test_a_flag_in_an_attribute_that_the_model_sets_itself() -> None:
    class Warm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.is_warm = nn.Linear(4, 4), torch.tensor(False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            result = y.sin() if self.is_warm else y.cos()
            self.is_warm = torch.tensor(True)
            return result.sum()  # type: ignore[no-any-return]

    model, x = Warm(), torch.randn(2, 4)
    expected = [gradients(model, model, x) for _ in range(2)]
    model.is_warm = torch.tensor(False)
    step = retrograd.compile_backward(model, (x,), cache=False)
    torch.testing.assert_close([gradients(model, step, x) for _ in range(2)], expected)


class Queue(nn.Module):
    """Writes where a number in a buffer says, and moves on."""

    place: Tensor
    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("place", torch.tensor([0]))
        self.register_buffer("rows", torch.zeros(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        place, y = int(self.place), self.layer(x)
        loss = (y @ self.rows.clone().T).square().sum() + y.sum()
        self.rows[place : place + 2] = y.detach()
        self.place[0] = (place + 2) % 6
        return loss  # type: ignore[no-any-return]


def test_a_counter_in_a_buffer_is_refused() -> None:
    with pytest.raises(retrograd.CaptureError, match="number in its buffer place, and writes another to it, at File"):
        retrograd.compile_backward(Queue(), (torch.randn(2, 4),), cache=False)
