# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sizes that change from step to step under ``retrograd.enable()``: two compilations, whatever sizes follow."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from io import StringIO
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import retrograd
from retrograd.fallback import EagerIslandWarning
from retrograd.frontend.autograd.steps import history
from retrograd.frontend.decompositions import table as decompositions
from retrograd.frontend.python.source_locations import CaptureError

# Takes a model and sizes, and gives its loss.
Loss = Callable[[Any, Any], torch.Tensor]


def train(model: nn.Module, loss: Loss, steps: Sequence[Any], *, keep: int = 2) -> list[str]:
    """Train two copies of a model, without updates; gradients are added up over ``keep`` steps, and equal eager's.
    Returns what was compiled."""
    eager, ours = copy.deepcopy(model), copy.deepcopy(model)
    before = len(retrograd.explain_recompiles())
    for number, sizes in enumerate(steps):
        for m in (eager, ours):
            if number % keep == 0:
                m.zero_grad()
            torch.manual_seed(number)
            value = loss(m, sizes)
            if m is eager:
                value.backward()
                continue
            with retrograd.enable():
                value.backward()
        expected = [p.grad for p in eager.parameters()]
        torch.testing.assert_close([p.grad for p in ours.parameters()], expected, rtol=2e-5, atol=1e-6)
    return [str(entry) for entry in retrograd.explain_recompiles()[before:]]


def count(entries: Sequence[str]) -> int:
    """How many programs were compiled, where none of the steps runs eagerly for good."""
    assert not any("runs eagerly" in entry for entry in entries), entries
    return sum(" compiled: " in entry for entry in entries)


class Product(torch.autograd.Function):
    """A product that keeps its arguments."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w.t(), x.t() @ gradient


class Classifier(nn.Module):
    """Two layers, of which the second is a custom function's, with hooks that scale and hooks that pack."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5, bias=False)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: self.look(t.float())):
            h = torch.tanh(self.first(x))
        h.register_hook(lambda gradient: self.look(gradient) * 3)
        return Product.apply(h, self.second.weight.t())  # type: ignore[no-any-return, no-untyped-call]

    def look(self, tensor: torch.Tensor) -> torch.Tensor:
        self.seen.append(tuple(tensor.shape))
        return tensor


@pytest.mark.long
def test_batches_with_hooks_and_a_custom_function() -> None:
    """Gradients are there already in each second step, which makes other captures of the same program."""

    def loss(model: Any, batch: int) -> torch.Tensor:
        model.seen.clear()
        value = F.cross_entropy(model(torch.randn(batch, 6)), torch.randint(5, (batch,)))
        shapes.append(model.seen)
        return value

    shapes: list[list[tuple[int, ...]]] = []
    batches = [4, 7, 1, 13, 2, 1, 30]
    entries = train(Classifier(), loss, batches)
    assert count(entries) == 2, entries
    assert "from now on for any axis 0 of saved tensor" in entries[1] and "(so far 4, 7)" in entries[1]
    # The last step's: what hooks were given has its sizes, in eager's order.
    eager, ours = shapes[-2:]
    assert eager == ours and (30, 8) in ours


@pytest.mark.long
def test_images() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))

    def loss(model: Any, batch: int) -> torch.Tensor:
        return F.cross_entropy(model(torch.randn(batch, 2, 4, 4)), torch.randint(3, (batch,)))

    assert count(train(model, loss, [3, 5, 1, 8], keep=1)) == 2


class Attention(nn.Module):
    """Tokens that look at those before them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.project, self.head = nn.Embedding(7, 8), nn.Linear(8, 24), nn.Linear(8, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(self.embedding(ids)).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: torch.Tensor = self.head(h.transpose(1, 2).flatten(2))
        return found


@pytest.mark.long
def test_batches_of_token_rows() -> None:
    def loss(model: Any, sizes: tuple[int, int]) -> torch.Tensor:
        ids = torch.randint(7, sizes)
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    entries = train(Attention(), loss, [(2, 5), (3, 4), (4, 7), (1, 6), (5, 1), (2, 2)], keep=1)
    assert count(entries) == 2, entries


class Written(nn.Module):
    """Writes to parts of what it computes, and to other forms of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.sin(self.layer(x))
        h[:, 1:3].mul_(2)
        h[:, 6] = h[:, 5].detach() * 3
        h.view(-1, 2, 4)[:, 1].mul_(0.5)
        F.leaky_relu(h.t(), 0.2, inplace=True)
        return h


@pytest.mark.long
def test_views_that_are_written_to() -> None:
    """What is written to in place leaves views by sizes and strides in the backward, of open sizes here."""

    def loss(model: Any, batch: int) -> torch.Tensor:
        value: torch.Tensor = model(torch.randn(batch, 6)).square().mean()
        return value

    entries = train(Written(), loss, (4, 4, 6, 6, 11, 1, 9))
    assert count(entries) == 3 and "no size is left open" not in "".join(entries), entries


def test_numbers_of_layers() -> None:
    """A slope and a divisor that change with each step, with batches that do, and gradients added up: PyTorch captures
    each number anew, and what was compiled for others serves."""

    def loss(model: Any, step: tuple[int, float]) -> torch.Tensor:
        rows, slope = step
        h = F.leaky_relu(model[1](model[0](torch.randn(rows, 3))), slope)
        return h.clamp(max=4 * slope).div(slope + 2).square().sum()

    steps = [(4, 0.1), (5, 0.25), (5, 0.5), (1, -0.5), (7, 1.0), (2, 0.0), (1, 0.75), (7, 1.0)]
    entries = train(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), loss, steps)
    assert count(entries) == 2, entries
    assert "it adds to 4 gradients that are there (none before)" in entries[1]
    assert "from now on for any number of leaky_relu_backward0 (so far 0.1, 0.25)" in entries[1]


@pytest.mark.long
def test_a_forward_that_dynamo_compiled() -> None:
    """Dynamo's second graph has its sizes as numbers, another structure than the first's; what the first one's sizes
    were tells which are open."""
    layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    call = torch.compile(lambda x, model: model(x), backend="aot_eager")

    def loss(model: Any, rows: int) -> torch.Tensor:
        return F.mse_loss(call(torch.randn(rows, 3), model), torch.zeros(rows, 2))

    assert count(train(layers, loss, [3, 5, 8, 2], keep=1)) == 2


@pytest.mark.long
def test_islands_take_open_sizes() -> None:
    def loss(model: Any, rows: int) -> torch.Tensor:
        points = model(torch.randn(rows, 3)).tanh()
        found: torch.Tensor = torch.cdist(points, points.flip(0) + 1).sum()
        return found

    # Distances, for which there is a decomposition, stand for an op that does not compile.
    kept = tuple(e for e in decompositions.DECOMPOSITIONS if "cdist" not in str(e.op))
    with mock.patch.object(decompositions, "DECOMPOSITIONS", kept), pytest.warns(EagerIslandWarning):
        entries = train(nn.Linear(3, 4), loss, [2, 4, 5, 3], keep=1)
    assert count(entries) == 2 and all("runs in torch" in entry for entry in entries), entries


def test_inlined_hooks() -> None:
    """Those whose code runs on open sizes are part of the program of all sizes, with the tensors that they read; one
    that takes a size as a number is called."""
    scale, calls = torch.tensor(2.0), {"mean": StringIO(), "square": StringIO(), "length": StringIO()}

    @retrograd.inlineable
    def mean(gradient: torch.Tensor) -> torch.Tensor:
        calls["mean"].write(".")
        return gradient * scale / gradient.shape[0]

    @retrograd.inlineable
    def square(gradient: torch.Tensor) -> torch.Tensor:
        calls["square"].write(".")
        return gradient * gradient * scale

    @retrograd.inlineable
    def length(gradient: torch.Tensor) -> torch.Tensor:
        calls["length"].write(".")
        return gradient / len(gradient)

    def loss(model: Any, rows: int) -> torch.Tensor:
        if not model.weight._backward_hooks:
            model.weight.register_hook(square)
        h = model(torch.randn(rows, 3))
        h.register_hook(mean)
        k = h.sin()
        k.register_hook(length)
        scale.fill_(1 + rows / 4)
        found: torch.Tensor = k.square().sum()
        return found

    steps = [2, 4, 5, 7, 5, 1, 6]
    entries = train(nn.Linear(3, 4), loss, steps, keep=1)
    assert count(entries) == 2, entries
    assert "length (" in entries[1] and "goes by the number that a size is" in entries[1], entries
    assert entries[1].count("called in Python") == 1, entries
    # Twice the steps, in eager and here, where two are recorded, and one for a size of 1; the trace of open sizes runs
    # the code of those that see such.
    eager = len(steps)
    assert {name: text.tell() - eager for name, text in calls.items()} == {"mean": 4, "square": 3, "length": 8}


@pytest.mark.long
def test_optimizers_in_the_backward() -> None:
    """What they write to has one size at all steps."""
    models = [nn.Linear(3, 4) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    calls = StringIO()
    marks: list[Callable[[Any], Any]] = [lambda hook: hook, retrograd.inlineable]
    for model, mark in zip(models, marks, strict=True):
        optimizers = {p: torch.optim.AdamW([p], lr=0.01) for p in model.parameters()}

        def step(parameter: nn.Parameter, optimizers: Any = optimizers) -> None:
            calls.write(".")
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(mark(step))
    before = len(retrograd.explain_recompiles())
    seen = []
    for rows in (3, 3, 5, 8, 2, 1, 6):
        x, start = torch.randn(rows, 3), calls.tell()
        models[0](x).square().mean().backward()
        with retrograd.enable():
            models[1](x).square().mean().backward()
        seen.append(calls.tell() - start - 2)
        pairs = zip(*(m.parameters() for m in models), strict=True)
        assert all(float((a - b).detach().norm()) <= 2e-5 * float(a.detach().norm()) for a, b in pairs)
    entries = [str(entry) for entry in retrograd.explain_recompiles()[before:]]
    assert count(entries) == 2 and not any("called in Python" in entry for entry in entries), entries
    # Watched where state is set up, at two sets of sizes, and at a size of 1.
    assert seen == [2, 2, 2, 0, 0, 2, 0]


def test_a_number_that_an_op_takes_as_such_is_compiled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are left open all the same, for each number by itself; of these a limited number."""
    monkeypatch.setattr("retrograd.frontend.autograd.steps.known_variants.MOST_VARIANTS", 2)

    def loss(model: Any, step: tuple[int, float]) -> torch.Tensor:
        rows, power = step
        found: torch.Tensor = model(torch.randn(rows, 3)).abs().pow(power).sum()
        return found

    steps = [(4, 1.5), (4, 2.5), (6, 2.5), (5, 2.5), (3, 3.5), (9, 2.5)]
    entries = train(nn.LayerNorm(3), loss, steps, keep=1)
    outcomes = ["compiled" if " compiled: " in e else "eager" if "runs eagerly" in e else "" for e in entries]
    assert outcomes == ["compiled", "compiled", "compiled", "eager"], entries
    assert "no number is left open: CaptureError: capture: a number that was 1.5 and 2.5 is traced" in entries[1]
    assert "from now on for any axis 0" in entries[2] and "compiled for 2 sets" in entries[3]


def test_a_number_that_begins_at_zero_and_one() -> None:
    """As a jacobian's rows do: nothing is left open before another number is met, and then for good."""

    def loss(model: Any, row: int) -> torch.Tensor:
        found: torch.Tensor = model(torch.ones(7, 3))[row].sin().sum()
        return found

    entries = train(nn.Linear(3, 2), loss, [0, 1, 2, 3, 4, 5, 6, 0], keep=1)
    assert count(entries) <= 3, entries


def test_what_cannot_be_left_open_is_compiled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each set of sizes by itself then, and of these a limited number in one capture; both are told."""

    class Refusal:
        def __init__(self, structure: Any) -> None:
            raise CaptureError("this size is special", "keep it")

    monkeypatch.setattr("retrograd.frontend.autograd.sizes.open_variants.OpenSizes", Refusal)
    monkeypatch.setattr("retrograd.frontend.autograd.steps.known_variants.MOST_VARIANTS", 1)

    def loss(model: Any, rows: int) -> torch.Tensor:
        found: torch.Tensor = (torch.randn(rows, 3) * model.weight).sin().sum()
        return found

    entries = train(nn.LayerNorm(3, bias=False), loss, [2, 3, 4, 5, 2, 3], keep=1)
    outcomes = ["compiled" if " compiled: " in e else "eager" if "runs eagerly" in e else "" for e in entries]
    assert outcomes == ["compiled", "compiled", "eager"], entries
    assert "no size is left open: CaptureError: capture: this size is special" in entries[1]
    assert "compiled for 1 sets" in entries[2]


class InPlace(nn.Module):
    """Convolutions of images of any size, norms of which some look at their input in another shape, and activations
    that are written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.InstanceNorm2d(4, affine=True),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(4, 3, 4, stride=2, padding=1),
            nn.GroupNorm(1, 3),
            nn.LeakyReLU(0.1, inplace=True),
            nn.Conv2d(3, 2, 3, stride=2, padding=1),
            nn.BatchNorm2d(2),
            nn.Hardtanh(inplace=True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


@pytest.mark.long
def test_images_of_any_size_through_layers_that_work_in_place() -> None:
    """A backward does not say how large the result of a convolution is, nor that a view has all of its tensor."""

    def loss(model: Any, sizes: tuple[int, int, int]) -> torch.Tensor:
        images = torch.randn(sizes[0], 3, *sizes[1:])
        value: torch.Tensor = (model(images) * torch.linspace(0, 1, 2)[:, None, None]).square().mean()
        return value

    shapes = [(3, 9, 12), (2, 13, 7), (5, 10, 10), (7, 8, 9), (1, 11, 16)]
    entries = train(InPlace(), loss, shapes, keep=1)
    assert count(entries) == 2, entries


class Strided(nn.Module):
    """Views of which sizes, steps and starts in memory all go by the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        count = len(h)
        table = (h @ h.t()).clone().fill_diagonal_(0.5)
        table.diagonal().mul_(2)
        padded = torch.zeros(2, count + 1, 4)
        padded[0, 1:] = h
        padded[:, -1] = h[0]
        padded[:, :-1].add_(padded[:, 1:].detach())
        padded.view(-1)[::2] *= 3
        shifted = h.as_strided((count - 1, 4), (4, 1), 4)
        windows = h.unfold(0, 3, 1).square()
        longest = max(count, 7)
        table = torch.nn.functional.pad(table, (0, longest))
        found: torch.Tensor = (
            table.softmax(-1).square().sum() + padded.square().mean() + shifted.exp().mean() + windows.mean()
        )
        return found


def test_views_that_go_by_the_number_of_rows() -> None:
    """What is taken for granted of such a view is a condition of the program."""

    def loss(model: Any, rows: int) -> torch.Tensor:
        value: torch.Tensor = model(torch.randn(rows, 6))
        return value

    entries = train(Strided(), loss, [9, 13, 8, 11, 23], keep=1)
    assert count(entries) == 2, entries


def test_ever_new_graphs_at_one_line_are_compiled_when_they_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture of experts, say, that goes by which of them have rows: what comes once repays no compilation."""
    monkeypatch.setattr(history, "MOST_GRAPHS", 2)
    x = torch.randn(3, 4, requires_grad=True)

    def step(depth: int) -> list[str]:
        before, x.grad = len(retrograd.explain_recompiles()), None
        loss = x * 1
        for _ in range(depth):
            loss = loss.sin()
        with retrograd.enable():
            loss.sum().backward()
        expected = torch.ones_like(x)
        inner = [x.detach()]
        for _ in range(depth - 1):
            inner.append(inner[-1].sin())
        for value in reversed(inner if depth else []):
            expected = expected * value.cos()
        torch.testing.assert_close(x.grad, expected)
        return [entry.outcome for entry in retrograd.explain_recompiles()[before:]]

    assert [step(depth) for depth in (1, 2)] == [["compiled"], ["compiled"]]
    # Neither ran again: the next is left, told once, and compiled when it comes a second time.
    assert [step(depth) for depth in (3, 4, 3)] == [["runs eagerly"], [], ["compiled"]]
    # What both are used of is no such thing.
    assert [step(depth) for depth in (3, 3, 2, 5)] == [[], [], [], ["compiled"]]
