# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Hooks in programs that are compiled ahead of time: called at each step as eager calls them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from compared import assert_same
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

import retrograd
from retrograd.frontend.doors import capture
from retrograd.runtime.artifact import ArtifactError

Gradients = tuple[Tensor | None, ...]
# Which hook was called, with what.
Log = list[tuple[str, Gradients, Gradients]]


class Gate(nn.Module):
    """Takes a tensor without a gradient and a number beside one with, and gives two results."""

    def forward(self, x: Tensor, mask: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        y = x * mask * factor
        return y, y.sum(1)


class Hooked(nn.Module):
    """Of its modules the first has no argument that requires grad, one is called twice, one inside of a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.shared, self.last = nn.Linear(6, 8), Gate(), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y, sums = self.gate(self.first(x).tanh(), mask, 2.0)
        y = checkpoint(self.shared, self.shared(y).tanh(), use_reentrant=False)
        return self.last(y.tanh()), sums


def put_hooks(model: Hooked, log: Log) -> list[Any]:
    """Hooks of both kinds, several on a module, with and without results; they keep what they are given."""

    def note(name: str, scale: float | None = None, index: int = 0) -> Any:
        def hook(_: nn.Module, inputs: Gradients, outputs: Gradients) -> Gradients | None:
            log.append((name, inputs, outputs))
            given = inputs[index]
            if scale is None or given is None:
                return None
            return (*inputs[:index], given * scale, *inputs[index + 1 :])

        return hook

    def before(name: str, scale: float | None = None) -> Any:
        hook = note(name, scale)
        return lambda module, outputs: hook(module, outputs, ())

    return [
        model.first.register_full_backward_hook(note("first")),
        model.first.register_full_backward_pre_hook(before("before first", 0.5)),
        model.gate.register_full_backward_hook(note("gate", 3.0)),
        model.gate.register_full_backward_hook(note("gate again")),
        model.shared.register_full_backward_hook(note("shared", -0.7)),
        model.last.register_full_backward_pre_hook(before("before last")),
        model.last.register_full_backward_pre_hook(before("before last, again", 1.5)),
    ]


@pytest.fixture
def model() -> Hooked:
    torch.manual_seed(0)
    return Hooked()


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """PyTorch says of a module of which no input requires grad what its hooks are called with."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Full backward hook is firing when gradients are computed")
        yield


def step(call: Any, model: nn.Module, seed: int, rows: int = 4) -> list[Tensor]:
    """A step on other arguments for each seed; gives the gradients."""
    torch.manual_seed(seed)
    x, mask = torch.randn(rows, 6), torch.rand(rows, 8).round()
    model.zero_grad()
    result, sums = call(x, mask)
    (result.square().sum() + sums.square().mean()).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same_log(found: Log, right: Log) -> None:
    """Compares which hooks were called, in which order, and with what."""
    assert [name for name, *_ in found] == [name for name, *_ in right]
    for (name, *a), (_, *b) in zip(found, right, strict=True):
        for x, y in zip((*a[0], None, *a[1]), (*b[0], None, *b[1]), strict=True):
            assert (x is None) == (y is None), name
            if x is not None and y is not None:
                assert_same([x], [y])


@pytest.mark.parametrize("options", [{}, {"partition": "budget", "memory_budget": 2.0}], ids=["whole", "budget"])
def test_hooks_are_called_as_in_eager(model: Hooked, options: dict[str, Any]) -> None:
    """At each step, the first included, which is compared; what they keep stays as it was."""
    log: Log = []
    right: Log = []
    eager = copy.deepcopy(model)
    put_hooks(model, log)
    put_hooks(eager, right)
    example = torch.randn(4, 6), torch.ones(4, 8)
    compiled = retrograd.compile_backward(model, example, **options)
    assert not log
    for seed in range(4):
        assert_same(step(compiled, model, seed), step(eager, eager, seed))
        assert len(log) == len(right) == 8 * (seed + 1)
    same_log(log, right)
    assert "hooks are called in Python" in str(compiled.explain().to_dict())
    with pytest.raises(ArtifactError, match="hooks are called in Python"):
        compiled.save(Path("never.vmfb"))


def test_hooks_that_change_and_fail(model: Hooked) -> None:
    """Of open sizes. One that another takes off is not called, one that raises ends the step, and the next is right."""
    log: Log = []
    handles: list[Any] = []
    failing = [False]

    def take_off(_: nn.Module, inputs: Gradients, outputs: Gradients) -> None:
        log.append(("takes off", inputs, outputs))
        if failing[0]:
            raise KeyError("of the user's")
        for handle in handles:
            handle.remove()
        handles.clear()

    def never(_: nn.Module, inputs: Gradients, outputs: Gradients) -> None:
        log.append(("never", inputs, outputs))

    model.last.register_full_backward_hook(take_off)
    handles.append(model.shared.register_full_backward_hook(never))
    rows = torch.export.Dim("rows", min=2, max=64)
    example = torch.randn(4, 6), torch.ones(4, 8)
    compiled = retrograd.compile_backward(
        model, example, dynamic_shapes={"x": {0: rows}, "mask": {0: rows}}, fallback="error"
    )
    plain = Hooked()
    plain.load_state_dict(model.state_dict())
    assert_same(step(compiled, model, 0, 5), step(plain, plain, 0, 5))
    failing[0] = True
    with pytest.raises(KeyError, match="of the user's"):
        step(compiled, model, 1, 3)
    failing[0] = False
    handles.append(model.first.register_forward_hook(never))
    with pytest.raises(retrograd.ArgumentError, match="hooks were added"):
        step(compiled, model, 2, 3)
    handles.pop().remove()
    handles.append(model.last.register_full_backward_hook(never))
    with pytest.raises(retrograd.ArgumentError, match="hooks were added"):
        step(compiled, model, 2, 3)
    handles[0].remove()
    assert_same(step(compiled, model, 3, 7), step(plain, plain, 3, 7))
    assert [name for name, *_ in log] == ["takes off"] * 3


def test_who_verifies_a_step_calls_no_hook_besides(model: Hooked) -> None:
    """The comparison is by numbers of its own, which hooks do not see; the step that follows is."""
    log: Log = []
    right: Log = []
    eager = copy.deepcopy(model)
    put_hooks(model, log)
    put_hooks(eager, right)
    compiled = retrograd.compile_backward(model, (torch.randn(4, 6), torch.ones(4, 8)), verify=True)
    assert_same(step(compiled, model, 0), step(eager, eager, 0))
    same_log(log, right)


def test_deprecated_hooks_are_refused(model: Hooked) -> None:
    """With the kind to use in their place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.last.register_backward_hook(lambda *_: None)
    with pytest.raises(retrograd.RetrogradError, match=r"(?s)'last'.*register_full_backward_hook"):
        retrograd.compile_backward(model, (torch.randn(4, 6), torch.ones(4, 8)))


class Explained(nn.Module):
    """Keeps gradients of activations, as those do who draw what a network looks at, and counts; one hook computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.calls, self.norms = 0, list[float]()
        self.gradient: Tensor | None = None

    def keep(self, gradient: Tensor) -> None:
        self.gradient = gradient
        self.calls += 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        y.register_hook(lambda gradient: gradient * 2)
        y.register_hook(self.keep)
        z: Tensor = self.second(y)
        z.register_hook(lambda gradient: self.norms.append(gradient.norm().item()))
        return z


def test_hooks_that_a_model_puts_on_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that do more than to compute are called, and what they leave is there; nothing is traced anew for it."""
    torch.manual_seed(0)
    model = Explained()
    eager = copy.deepcopy(model)
    compiled = retrograd.compile_backward(model, (torch.randn(4, 6),))
    assert (model.calls, model.norms, model.gradient) == (0, [], None)
    monkeypatch.delattr(capture, "_trace")
    for seed in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        for call in (compiled, eager):
            call(x).square().sum().backward()
        assert model.calls == eager.calls == seed + 1
        assert_same(*([m.gradient] if m.gradient is not None else [] for m in (model, eager)))
    assert_same([torch.tensor(model.norms)], [torch.tensor(eager.norms)])
    assert_same(*([p.grad for p in m.parameters() if p.grad is not None] for m in (model, eager)))


class SharedByHooks(nn.Module):
    """Reads by names of other code what its hooks read too: by one that is put together, in a layer of PyTorch's, and
    in a hook that it calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.gain_1, self.scale = nn.LeakyReLU(0.1), 2.0, 3.0
        self.found = list[float]()

    def keep(self, _: Tensor) -> None:
        self.found.append(self.gain_1 * self.act.negative_slope)

    def scaled(self, x: Tensor) -> Tensor:
        self.ndim = x.dim()
        return x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        y = self.scaled(self.act(x.sin() * getattr(self, f"gain_{x.dim()}")))
        y.register_hook(self.keep)
        y.register_hook(self.scaled)
        return y.cos()


def test_what_hooks_read_and_the_model_too_is_looked_at() -> None:
    """Another value of that is compiled for once more."""
    model = SharedByHooks()
    eager = copy.deepcopy(model)
    x = torch.linspace(-2, 2, 5).requires_grad_()
    compiled = retrograd.compile_backward(model, (x,))
    for part, name in (("", "found"), ("", "gain_1"), ("act", "negative_slope"), ("", "scale")):
        gradients: list[Tensor] = []
        for owner, call in ((model, compiled), (eager, eager)):
            if name != "found":
                setattr(owner.get_submodule(part), name, 0.7)
            gradients += torch.autograd.grad(call(x).sum(), x)
        assert_same(gradients[:1], gradients[1:])
    assert model.found == eager.found


def test_a_hook_that_goes_by_what_the_model_computed_is_refused() -> None:
    """It would see tensors of the trace."""
    seen: list[Tensor] = []

    def model(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda gradient: seen.append(gradient * y))
        return y * 2

    with pytest.raises(retrograd.CaptureError, match=r"(?s)goes by other tensors.*in model.*inlineable"):
        retrograd.compile_backward(model, (torch.randn(3, requires_grad=True),))


def test_hooks_of_several_gradients() -> None:
    """One for any of them is called once a step; one for all would never be, and is refused."""
    calls: list[int] = []

    def model(x: Tensor, mode: Literal["any", "all"]) -> Tensor:
        y = x.sin()
        z = y * 2
        register_multi_grad_hook((y, z), lambda _: calls.append(1), mode=mode)
        return z.cos()

    x = torch.randn(3, requires_grad=True)
    compiled = retrograd.compile_backward(model, (x, "any"))
    for step in range(3):
        assert len(calls) == step
        compiled(x, "any").sum().backward()
    with pytest.raises(retrograd.CaptureError, match=r"(?s)register_multi_grad_hook.*in model.*one by one"):
        retrograd.compile_backward(model, (x, "all"))


def test_a_hook_that_writes_to_what_the_backward_reads_is_told(model: Hooked) -> None:
    """Eager refuses it as well; a write to what is read no more, or only elsewhere, is none of the backward's."""
    written = {"last": model.last.bias, "shared": model.shared.weight}
    chosen = ["last"]

    def write(*_: Any) -> None:
        with torch.no_grad():
            written[chosen[0]].mul_(0.5)

    model.last.register_full_backward_hook(write)
    compiled = retrograd.compile_backward(model, (torch.randn(4, 6), torch.ones(4, 8)))
    step(compiled, model, 0)
    chosen[0] = "shared"
    with pytest.raises(RuntimeError, match="inplace operation"):
        step(model, model, 1)
    with pytest.raises(RuntimeError, match=r"wrote to a tensor of shape \(8, 8\)"):
        step(compiled, model, 1)
    chosen[0] = "last"
    step(compiled, model, 2)


def test_a_hook_of_a_module_sees_no_gradient_where_none_is_asked_for() -> None:
    model, log = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), Log()
    model[0].register_full_backward_hook(lambda _, inputs, outputs: log.append(("first", inputs, outputs)))
    model[1].register_full_backward_hook(lambda _, inputs, outputs: log.append(("second", inputs, outputs)))
    step = retrograd.compile_backward(model, (torch.randn(4, 3, requires_grad=True),))
    for asked, frozen in ((True, False), (False, False), (False, True)):
        model[0].requires_grad_(not frozen)
        x = torch.randn(4, 3, requires_grad=asked)
        with warnings.catch_warnings():
            # PyTorch's, of a module without such an argument.
            warnings.simplefilter("ignore", UserWarning)
            step(x).sum().backward()
            found = [*log]
            log.clear()
            model(x).sum().backward()
        same_log(found, log)
        log.clear()
    assert "fewer tensors that require grad" in str(step.explain())
