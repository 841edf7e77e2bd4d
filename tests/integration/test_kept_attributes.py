# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attributes and buffers that a model sets to other tensors are set by each call, as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import retrograd


def batch(seed: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))


class Base(nn.Module):
    center: Tensor
    step: Tensor
    queue: Tensor
    result: Tensor
    none: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("center", torch.zeros(3))
        self.register_buffer("step", torch.tensor(0))
        self.register_buffer("queue", torch.randn(4, 3))
        self.register_buffer("result", torch.zeros(1))
        self.register_buffer("none", None)
        self.mean = torch.zeros(3)
        self.hidden: tuple[Tensor, Tensor] | None = None
        self.kept: Any = None


class Running(Base):
    """DINO's center, MoCo's queue, a count of steps, a mean that is no buffer, and what is kept to look at."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.center = self.center * 0.9 + self.linear(x).mean(0) * 0.1
        self.step = self.step + 1
        y: Tensor = self.linear(x) - self.center - self.mean
        similar = y @ self.queue.t() / self.step
        self.mean = torch.lerp(self.mean, y.detach().mean(0), 0.1)
        self.queue = torch.cat([self.queue, y.detach()])[-4:]
        self.kept = {"loss": y.square().sum(), "rows": [y.detach(), x]}
        self.result, self.none = y, y.detach().sum(0)
        return similar.softmax(-1)


class Remembers(Base):
    """A cell whose state begins when it is first called."""

    def forward(self, x: Tensor) -> Tensor:
        if self.hidden is None:
            self.hidden = (torch.zeros_like(x), torch.zeros_like(x))
        h, c = self.hidden
        c = c * 0.5 + self.linear(x)
        h = torch.tanh(c + h)
        self.hidden = (h.detach(), c.detach())
        return h


class Takes(Base):
    """Takes what its caller has put there, once."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        if self.kept is not None:
            result = result * self.kept
            self.kept = None
        return result


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Remembers(), Running()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x))
        return result


class Caches(Base):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.table = torch.arange(3.0)
        return self.table * torch.relu(self.linear(x))


def state(model: nn.Module) -> list[Any]:
    """What is in the attributes of all modules, tensors or not."""
    tables = [table for module in model.modules() for table in (vars(module), module._buffers, module._parameters)]
    names = [sorted(name for name in table if name not in ("_modules", "_buffers", "_parameters")) for table in tables]
    return [
        leaf for table, own in zip(tables, names, strict=True) for n in own for leaf in pytree.tree_leaves(table[n])
    ]


def step_alike(step: Callable[..., Any], model: nn.Module, expected: nn.Module, seed: int) -> None:
    """Take a step compiled, and one in eager, and compare what they leave."""
    for call in (step, expected):
        call(batch(seed)).square().sum().backward()
    check_state(model, expected)


def check_state(found: nn.Module, expected: nn.Module) -> None:
    for a, b in zip(state(found), state(expected), strict=True):
        if isinstance(b, Tensor):
            torch.testing.assert_close(a, b)
            assert a.requires_grad == b.requires_grad
    for p, q in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.long_cases("Inner-1")
@pytest.mark.parametrize(("kind", "others"), [(Running, 0), (Inner, 1), (Caches, 1)])
def test_attributes_are_set_as_in_eager(kind: Callable[[], nn.Module], others: int) -> None:
    model = kind()
    expected = copy.deepcopy(model)
    before = dict(vars(model))
    step = retrograd.compile_backward(model, (batch(0),))
    assert vars(model) == before
    for seed in range(3):
        for one, call in ((model, step), (expected, expected)):
            call(batch(seed)).square().sum().backward()
            assert all(t.is_leaf for t in one.parameters())
        check_state(model, expected)
    assert step.specializations is not None and len(step.specializations.texts) == others


def test_gradient_of_what_is_kept() -> None:
    model = Running()
    expected = copy.deepcopy(model)
    step = retrograd.compile_backward(model, (batch(0),), verify=True)
    for one, call in ((model, step), (expected, expected)):
        (call(batch(0)).square().sum() + one.kept["loss"] + one.result.sum()).backward()
    check_state(model, expected)


def test_other_values_put_in_between() -> None:
    """A state that is put back to its beginning, a buffer that is written to, and gradients that are off."""
    model = Inner()
    expected = copy.deepcopy(model)
    step = retrograd.compile_backward(model, (batch(0),))
    for seed in range(6):
        for one, call in ((model, step), (expected, expected)):
            if seed == 3:
                one.first.hidden, one.second.mean = None, torch.ones(3)
                one.second.queue.mul_(2)
            with torch.set_grad_enabled(seed != 4):
                result = call(batch(seed))
            if seed != 4:
                result.square().sum().backward()
        check_state(model, expected)


def test_saved_and_bound(tmp_path: Path) -> None:
    model = Running()
    expected, other = copy.deepcopy(model), copy.deepcopy(model)
    step = retrograd.compile_backward(model, (batch(0),))
    step.save(tmp_path / "model.vmfb")
    loaded = retrograd.load(tmp_path / "model.vmfb", other)
    third = copy.deepcopy(model)
    bound = step.bind(third)
    for seed in range(2):
        for call in (expected, loaded, bound):
            call(batch(seed)).square().sum().backward()
        check_state(other, expected)
        check_state(third, expected)
    held = {**dict(expected.named_parameters()), **dict(expected.named_buffers()), "mean": expected.mean}
    torch.testing.assert_close(retrograd.load(tmp_path / "model.vmfb", held)(batch(2)), expected(batch(2)))
    torch.testing.assert_close(held["center"], expected.center)
    torch.testing.assert_close(held["mean"], expected.mean)


class Kinds(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.step = self.step + 0.5
        result: Tensor = self.linear(x) * self.step
        return result


class Mixed(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = x if self.kept is None else self.kept[0] + x
        self.kept = (self.linear(h).detach(), "text")
        result: Tensor = self.linear(h)
        return result


class Writes(Base):
    def forward(self, x: Tensor) -> Tensor:
        rolled = self.mean.roll(1)
        rolled[:1] = x.detach().sum()
        self.mean = rolled
        result: Tensor = self.linear(x) * rolled
        return result


def test_remedies_work() -> None:
    """What is refused names a remedy, and by that compiles."""
    model, x = Kinds(), batch(0)
    with pytest.raises(retrograd.CaptureError, match=r"float32 where it was .*int64(?s:.*)call the model once before"):
        retrograd.compile_backward(model, (x,))
    model(x)
    expected = copy.deepcopy(model)
    step = retrograd.compile_backward(model, (x,))
    for _ in range(2):
        torch.testing.assert_close(step(x), expected(x))
    mixed = Mixed()
    mixed(x)
    with pytest.raises(
        retrograd.CaptureError, match=r"attribute 'kept', of tensors and other values(?s:.*)alone in it"
    ):
        retrograd.compile_backward(mixed, (x,))
    writes = Writes()
    with pytest.raises(
        retrograd.CaptureError, match=r"neither a parameter, a buffer nor an argument(?s:.*)register_buf"
    ):
        retrograd.compile_backward(writes, (x,))
    mean = writes.mean
    del writes.mean
    writes.register_buffer("mean", mean)
    again = copy.deepcopy(writes)
    step = retrograd.compile_backward(writes, (x,))
    for _ in range(2):
        torch.testing.assert_close(step(x), again(x))


def test_what_is_taken_away() -> None:
    model = Takes()
    expected, given = copy.deepcopy(model), iter([torch.ones(3), torch.full((3,), 2.0), None, torch.ones(3)])
    model.kept = torch.zeros(3)
    step = retrograd.compile_backward(model, (batch(0),))
    for kept in given:
        for one, call in ((model, step), (expected, expected)):
            one.kept = kept
            call(batch(0)).square().sum().backward()
            assert one.kept is None
        check_state(model, expected)


class Counted(Base):
    """Counts its calls beside a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        count = 0 if self.kept is None else self.kept[1]
        self.kept = (x.detach().mean(0), count + 1)
        result: Tensor = self.linear(x)
        return result


class Turns(Base):
    flag = False

    def forward(self, x: Tensor) -> Tensor:
        self.flag = not self.flag
        self.kept = {"sum": x.detach().sum(), "flag": self.flag}
        result: Tensor = self.linear(x)
        return result


class Sized(Base):
    """What it keeps beside a tensor is the same each time."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = (x.detach().sum(), len(x), "text")
        result: Tensor = self.linear(x)
        return result


@pytest.mark.parametrize(("kind", "kept"), [(Counted, None), (Counted, (torch.zeros(3), 0)), (Turns, None)])
def test_numbers_beside_tensors_that_are_other_ones_each_time(kind: Callable[[], Any], kept: Any) -> None:
    model = kind()
    model.kept = kept
    with pytest.raises(retrograd.CaptureError, match=r"otherwise each time(?s:.*)kept(?s:.*)keep it as a buffer"):
        retrograd.compile_backward(model, (batch(0),))
    assert model.kept is kept


@pytest.mark.parametrize(("kind", "kept"), [(Counted, (torch.zeros(3), torch.tensor(0))), (Sized, None)])
def test_numbers_beside_tensors(kind: Callable[[], Any], kept: Any) -> None:
    """As the remedy says, and where they are the same."""
    model = kind()
    model.kept = kept
    expected = copy.deepcopy(model)
    step = retrograd.compile_backward(model, (batch(0),))
    for seed in range(3):
        step_alike(step, model, expected, seed)
        assert [n for n in model.kept if not isinstance(n, Tensor)] == [
            n for n in expected.kept if not isinstance(n, Tensor)
        ]


def with_derived_weights() -> nn.Sequential:
    """Layers whose weights hooks work out anew at each forward."""
    torch.manual_seed(0)
    normed = nn.utils.weight_norm(nn.Linear(3, 3))
    pruned: nn.Module = prune.random_unstructured(nn.Linear(3, 3), "weight", 0.5)
    return nn.Sequential(normed, nn.Tanh(), pruned, nn.utils.spectral_norm(nn.Linear(3, 3)))


def test_derived_weights_are_those_of_the_last_step() -> None:
    model, expected = with_derived_weights(), with_derived_weights()
    step = retrograd.compile_backward(model, (batch(0),))
    for seed in range(2):
        step_alike(step, model, expected, seed)
        for one in (model, expected):
            with torch.no_grad():
                for p in one.parameters():
                    p.mul_(1.5)
        for number in (0, 2, 3):
            torch.testing.assert_close(vars(model[number])["weight"], vars(expected[number])["weight"])


class Retains(Base):
    """As Grad-CAM looks at a layer."""

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = self.linear(x).sin()
        kept.retain_grad()
        self.kept = kept
        result: Tensor = kept * 2
        return result


class Leaf(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.linear(x).detach().requires_grad_()]
        result: Tensor = self.linear(x) * self.kept[0]
        return result


@pytest.mark.parametrize(("kind", "how"), [(Retains, "retain_grad"), (Leaf, "requires_grad_")])
def test_gradients_of_what_is_kept_itself(kind: Callable[[], Any], how: str) -> None:
    """A result of a program has none; under enable() it has."""
    model, expected = kind(), kind()
    with pytest.raises(retrograd.CaptureError, match=rf"by {how}\(\)(?s:.*)self.linear\(x\)(?s:.*)enable\(\)"):
        retrograd.compile_backward(model, (batch(0),))
    expected.load_state_dict(model.state_dict())
    expected(batch(0)).square().sum().backward()
    with retrograd.enable():
        model(batch(0)).square().sum().backward()
    for found, wanted in zip(pytree.tree_leaves(model.kept), pytree.tree_leaves(expected.kept), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)


class Returned(Base):
    """What is kept otherwise is a result."""

    def __init__(self, kind: Callable[[], Any]) -> None:
        super().__init__()
        self.within = kind()

    def forward(self, x: Tensor) -> dict[str, Any]:
        result, kept = self.within(x), self.within.kept
        self.within.kept = None
        return {"result": result, "kept": kept}


@pytest.mark.parametrize(("kind", "how"), [(Retains, "retain_grad"), (Leaf, "requires_grad_")])
def test_gradients_of_what_is_returned(kind: Callable[[], Any], how: str) -> None:
    model = Returned(kind)
    with pytest.raises(retrograd.CaptureError, match=rf"model returns a(?s:.*)by {how}\(\)(?s:.*)enable\(\)"):
        retrograd.compile_backward(model, (batch(0),))
    with retrograd.enable():
        found = model(batch(0))
        found["result"].square().sum().backward()
    expected = model(batch(0))
    expected["result"].square().sum().backward()
    for kept, wanted in zip(*map(pytree.tree_leaves, (found["kept"], expected["kept"])), strict=True):
        torch.testing.assert_close(kept.grad, wanted.grad)


class Stores(Base):
    """Says of a hook that keeps a gradient that it is tensor code alone."""

    gradient: Tensor | None = None

    def store(self, gradient: Tensor) -> None:
        self.gradient = gradient.norm()

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        h.register_hook(retrograd.inlineable(self.store))
        return h.sin()


def test_what_a_hook_keeps_is_refused() -> None:
    model = Stores()
    with pytest.raises(
        retrograd.CaptureError, match=r"keeps a tensor as 'gradient'(?s:.*)in the backward(?s:.*)enable"
    ):
        retrograd.compile_backward(model, (batch(0),))
    assert model.gradient is None


class Shared(Base):
    """Two attributes are one tensor at first."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = self.kept = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) * self.mean + self.kept
        self.mean = self.mean * 2
        return result


def test_one_of_two_names_is_set() -> None:
    model = Shared()
    expected = copy.deepcopy(model)
    step = retrograd.compile_backward(model, (batch(0),))
    for seed in range(3):
        step_alike(step, model, expected, seed)
    model.kept = torch.zeros(3)
    with pytest.raises(retrograd.ArgumentError, match=r"kept', which the model reads, was replaced"):
        step(batch(0))


class Truncated(Base):
    """What it has kept requires grad at the next call, which leaves that out, or goes on by it."""

    goes_on = False

    def __init__(self) -> None:
        super().__init__()
        self.hidden = (torch.zeros(2, 3), torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        assert self.hidden is not None
        h, c = self.hidden if self.goes_on else (self.hidden[0].detach(), self.hidden[1].detach())
        c = c * 0.5 + self.linear(x)
        self.hidden = (torch.tanh(c + h), c)
        result: Tensor = self.hidden[0].sin()
        return result


@pytest.mark.short_cases("False-True", "True-False")
@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("runs_before", [False, True])
def test_what_is_kept_requires_grad(goes_on: bool, runs_before: bool) -> None:
    """From the second call on, or when it is compiled."""
    model = Truncated()
    model.goes_on = goes_on
    expected = copy.deepcopy(model)
    if runs_before:
        model(batch(7)), expected(batch(7))
    step = retrograd.compile_backward(model, (batch(0),))
    for seed in range(4):
        for one, call in ((model, step), (expected, expected)):
            one.zero_grad()
            loss = call(batch(seed)).square().sum()
            if goes_on:
                loss = loss + call(batch(seed + 1)).square().sum()
            loss.backward()
            if goes_on:
                assert one.hidden is not None
                one.hidden = (one.hidden[0].detach(), one.hidden[1].detach())
        check_state(model, expected)


class Reads(Base):
    """Reads what requires grad and is set by no call."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean + x.detach().sum()
        result: Tensor = self.linear(x) * self.kept
        return result


def test_what_is_read_alone_and_requires_grad() -> None:
    model = Reads()
    model.kept = torch.ones(3, requires_grad=True)
    with pytest.raises(retrograd.CaptureError, match=r"requires grad is neither an argument nor a parameter"):
        retrograd.compile_backward(model, (batch(0),))


class InBlock(Base):
    """Sets what it reads in a checkpointed block, or outside; and there alone what is to be looked at."""

    is_outside = False

    def inner(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        self.kept = x.detach().sum()
        mean = None if self.__dict__["mean"] is None else self.mean + 1
        if not self.is_outside:
            self.mean = torch.ones(()) if mean is None else mean
        return self.linear(x).sin(), mean

    def forward(self, x: Tensor) -> Tensor:
        result, mean = checkpoint(self.inner, x, use_reentrant=False)
        if self.is_outside:
            self.mean = mean
        found: Tensor = result
        return found


def test_set_in_a_checkpointed_block() -> None:
    """Eager sets it again in the backward."""
    model, x = InBlock(), batch(0).requires_grad_()
    for mean in (model.mean, None):
        model.__dict__["mean"] = mean
        with pytest.raises(retrograd.CaptureError, match=r"'mean', which it reads, in a checkpointed(?s:.*)outside"):
            retrograd.compile_backward(model, (x,))
    model.is_outside, model.mean = True, torch.zeros(3)
    expected = copy.deepcopy(model)
    step = retrograd.compile_backward(model, (x,))
    for _ in range(2):
        for call in (step, expected):
            call(x).square().sum().backward()
        check_state(model, expected)


class AddsTo(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.mean += 1
        result: Tensor = self.linear(x) * self.mean
        self.mean = self.mean * 2
        return result


def test_numbers_written_to_a_plain_attribute() -> None:
    """As a buffer it may be written to."""
    model = AddsTo()
    with pytest.raises(retrograd.CaptureError, match=r"writes to a tensor(?s:.*)self.mean \+= 1(?s:.*)register_buffer"):
        retrograd.compile_backward(model, (batch(0),))
    mean = model.mean
    assert mean.eq(0).all()
    del model.mean
    model.register_buffer("mean", mean)
    expected = copy.deepcopy(model)
    step = retrograd.compile_backward(model, (batch(0),))
    for seed in range(3):
        step_alike(step, model, expected, seed)
