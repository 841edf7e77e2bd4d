# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a compiled program cannot do as eager does is refused: when it is captured, or when it is called."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import retrograd
from retrograd.frontend.doors.capture import capture_joint


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


class Base(nn.Module):
    counter: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("counter", torch.zeros(3))
        self.last: Tensor | None = None
        self.losses: list[Tensor] = []
        self.calls = 0


class Grows(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.counter = torch.cat([self.counter, x.detach()[0]])
        return x * self.counter.sum()


class Counts(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x * self.calls
        return x * 2


class Collects(Base):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        self.losses.append(out.sum())
        return out


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            Grows,
            r"sets its buffer 'counter', which it reads, to a tensor of shape \(6,\) where it was of shape \(3,\)"
            r".*self.counter = torch.cat.*torch.compile",
        ),
        (Counts, r"computes otherwise each time that it is called, by what it sets itself: calls"),
        (Collects, r"keeps a tensor in its attribute 'losses\[0\]'"),
    ],
)
def test_state_that_would_be_lost(kind: type[Base], message: str) -> None:
    model = kind()
    with pytest.raises(retrograd.CaptureError, match=f"(?s){message}"):
        retrograd.compile_backward(model, (randn(2, 3),))
    assert model.last is None
    assert torch.equal(model.counter, torch.zeros(3))


def test_capture_leaves_the_model_alone() -> None:
    class Counts(Base):
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.extra = "set"
            out: Tensor = self.linear(x)
            return out

    model = Counts()
    before = dict(vars(model))
    retrograd.compile_backward(model, (randn(2, 3),))
    assert vars(model) == before
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_pruned_layer() -> None:
    """Its weight is an attribute that a hook works out for each forward."""
    model, x = nn.Linear(4, 3), randn(2, 4)
    prune.l1_unstructured(model, "weight", amount=0.5)
    torch.testing.assert_close(retrograd.compile_backward(model, (x,))(x), model(x))


class Unregistered:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Subclass(torch.Tensor):
    pass


def writes(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    a.add_(1)
    return x * a * b


SHARED = torch.randn(3)
OVERLAPPING = torch.randn(5)


@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        (
            lambda x, b: x * b.tensor,
            (randn(3), Unregistered(torch.ones(3))),
            r"args\[1\] is a Unregistered, whose tensor",
        ),
        (lambda x, a: x * a.sum(), (randn(3), np.ones(3)), r"args\[1\] is a NumPy array.*from_numpy"),
        (lambda x: x * 2, (randn(3).detach().as_subclass(Subclass).requires_grad_(),), r"args\[0\] is a Subclass"),
        (lambda x: (x * 2, {x}), (randn(3),), r"output\[1\] of what the model returns is a set"),
        (lambda x, s: x * s.unsqueeze_(0), (randn(3), torch.ones(3)), r"changes the shape, strides or storage"),
        (writes, (randn(3), SHARED, SHARED), r"shares its memory with another.*clone"),
        (writes, (randn(3), OVERLAPPING[:3], OVERLAPPING[2:]), r"shares its memory with another.*clone"),
    ],
    ids=["object", "numpy", "subclass", "output", "metadata", "twice", "overlapping"],
)
def test_arguments_and_results_that_would_be_wrong(
    model: Callable[..., Any], args: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(retrograd.CaptureError, match=f"(?s){message}"):
        retrograd.compile_backward(model, args)


def test_written_memory_that_another_argument_shares() -> None:
    step = retrograd.compile_backward(writes, (randn(3), torch.randn(3), torch.randn(3)))
    base, x = torch.randn(6), randn(3)
    for a, b in ((base[:3], base[:3]), (base[:3], base[2:5])):
        with pytest.raises(retrograd.ArgumentError, match=r"args\[2\] shares memory with args\[1\]"):
            step(x, a, b)
    expected = writes(x, base[:3].clone(), base[3:])
    torch.testing.assert_close(step(x, base[:3], base[3:]), expected)


def test_changed_modules(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval(), randn(4, 3)
    step = retrograd.compile_backward(model, (x,), portable=True)
    step.save(tmp_path / "model.vmfb")
    hook = model[0].register_forward_hook(lambda module, args, out: out * 2)
    with pytest.raises(retrograd.ArgumentError, match="hooks were added"):
        step(x)
    hook.remove()
    model[1].train()
    with pytest.raises(retrograd.ArgumentError, match="compiled in eval mode, and BatchNorm1d no longer is"):
        retrograd.load(tmp_path / "model.vmfb", model)
    model[1].eval()
    torch.testing.assert_close(step(x), model(x))
    model[0] = nn.Linear(3, 3)
    with pytest.raises(retrograd.ArgumentError, match="the module '0', a Linear, was replaced"):
        step(x)


def swap_hook(model: nn.Sequential) -> None:
    model[0]._forward_hooks.clear()
    model[0].register_forward_hook(lambda module, args, out: out * 3)


def add_bias(model: nn.Sequential) -> None:
    model[0].bias = nn.Parameter(torch.randn(3))


def put_another_hook(model: nn.Sequential) -> None:
    """By the key of the one before."""
    (key,) = model[0]._forward_hooks
    model[0]._forward_hooks[key] = lambda module, args, out: out * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.append(nn.Tanh()), "the module '2' was added to the model"),
        (
            lambda model: model._modules.update({"0": model._modules.pop("0")}),
            "the modules 0, 1 are in another order now",
        ),
        (put_another_hook, "hooks were added to the model's modules, or removed"),
        (add_bias, r"the model had no '0.bias' when it was compiled"),
        (swap_hook, "hooks were added to the model's modules, or removed"),
        (lambda model: nn.utils.weight_norm(model[0]), "hooks were added to the model's modules, or removed"),
    ],
)
def test_models_that_compute_something_else_by_now(change: Callable[[nn.Sequential], object], message: str) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh()), randn(2, 3)
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    step = retrograd.compile_backward(model, (x,))
    torch.testing.assert_close(step(x), model(x))
    change(model)
    with pytest.raises(retrograd.ArgumentError, match=f"{message}.*; compile again"):
        step(x)


def test_loaded_into_a_model_that_has_more(tmp_path: Path) -> None:
    retrograd.compile_backward(nn.Linear(3, 3, bias=False), (randn(2, 3),), portable=True).save(tmp_path / "model.vmfb")
    with pytest.raises(retrograd.ArgumentError, match="the model has 'bias', which the one that was compiled had not"):
        retrograd.load(tmp_path / "model.vmfb", nn.Linear(3, 3))


def test_hooks_of_all_modules() -> None:
    """They would run for modules of PyTorch's tracer, too."""
    model, x = nn.Linear(3, 3), randn(2, 3)
    step = retrograd.compile_backward(model, (x,))
    hook = nn.modules.module.register_module_forward_pre_hook(lambda module, args: None)
    try:
        with pytest.raises(retrograd.ArgumentError, match="a hook for all modules was added"):
            step(x)
        with pytest.raises(retrograd.CaptureError, match=r"a hook for all modules(?s:.*)on the modules that it is for"):
            retrograd.compile_backward(model, (x,))
    finally:
        hook.remove()
    torch.testing.assert_close(step(x), model(x))


def test_autocast(tmp_path: Path) -> None:
    model, x = nn.Linear(3, 3), randn(2, 3)
    plain = retrograd.compile_backward(model, (x,))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = retrograd.compile_backward(model, (x,))
        assert mixed(x).dtype is torch.bfloat16
        with pytest.raises(retrograd.ArgumentError, match="autocast for cpu off, and it is bfloat16 now"):
            plain(x)
    mixed.save(tmp_path / "mixed.vmfb")
    for step in (mixed, retrograd.load(tmp_path / "mixed.vmfb", model)):
        with pytest.raises(retrograd.ArgumentError, match="autocast for cpu bfloat16, and it is off now"):
            step(x)


def test_constant_that_was_written_to() -> None:
    scale, x = torch.ones(3), randn(3)
    step = retrograd.compile_backward(lambda t: t * scale, (x,))
    assert torch.equal(step(x), x)
    scale.add_(1)
    with pytest.raises(retrograd.ArgumentError, match=r"a tensor of shape \(3,\) that the model reads"):
        step(x)


def test_compiled_model_inside_another() -> None:
    step = retrograd.compile_backward(nn.Linear(3, 3), (randn(2, 3),))
    with pytest.raises(retrograd.CaptureError, match=r"trace the model itself.*test_side_effects"):
        retrograd.compile_backward(lambda x: step(x) * 2, (randn(2, 3),))


def test_hooks_of_parameters() -> None:
    first, x = nn.Linear(3, 3), randn(2, 3)
    model = nn.Sequential(first, nn.Tanh())
    seen: list[torch.Size] = []
    first.weight.register_hook(lambda gradient: seen.append(gradient.shape))
    retrograd.compile_backward(model, (x,))(x).sum().backward()
    assert seen == [torch.Size((3, 3))]


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.table = torch.arange(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table + self.weight


def test_tensor_attribute_that_was_replaced() -> None:
    model, x = Table(), randn(2, 3)
    step = retrograd.compile_backward(model, (x,))
    torch.testing.assert_close(step(x), model(x))
    model.table = torch.ones(3)
    with pytest.raises(retrograd.ArgumentError, match=r"the tensor 'model\.table', which the model reads"):
        step(x)


class Tables(Table):
    """Reads a tensor in a list, and the contents of one."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = {"first": [torch.ones(3)]}
        self.pair = (torch.ones(3), 1.0)
        self.large = torch.ones(2**16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = float(self.table.numpy()[1]) + self.table.tolist()[2]
        x = x * self.pair[0] * self.large.sum()
        result: torch.Tensor = x * self.tables["first"][0] * factor + self.weight
        return result


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda model: model.tables["first"].__setitem__(0, torch.zeros(3)), r"\['first'\]\[0\]\", which the model"),
        (lambda model: model.table.mul_(2), "was written to"),
        (lambda model: setattr(model.table, "data", model.table * 2), "was written to"),
        (lambda model: model.table.numpy().fill(2), "was written to"),
        (lambda model: model.large.numpy().fill(2), "was written to"),
        (lambda model: model.table.requires_grad_(), "requires grad now"),
        (lambda model: setattr(model, "table", model.table * 2), r"'model\.table', which the model reads"),
        (lambda model: setattr(model, "pair", (torch.zeros(3), 1.0)), r"'model\.pair\[0\]', which the model reads"),
        (lambda model: setattr(model, "tables", {"first": [torch.zeros(3)]}), r"\['first'\]\[0\]\", which the model"),
        (lambda model: model.register_parameter("more", nn.Parameter(torch.ones(1))), "parameters or buffers"),
    ],
    ids=[
        *("in a list", "contents", "data", "by NumPy", "by NumPy, many", "gradient", "contents of another"),
        *("in another tuple", "in another dict", "parameter"),
    ],
)
def test_tensors_that_a_model_reads_beside_its_state(change: Callable[[Tables], Any], told: str) -> None:
    model, x = Tables(), randn(2, 3)
    step = retrograd.compile_backward(model, (x,))
    torch.testing.assert_close(step(x), model(x))
    change(model)
    with pytest.raises(retrograd.ArgumentError, match=told):
        step(x)


def test_assignment_to_data() -> None:
    def assigns(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.data = x.detach().sum(0)
        return x * state

    with pytest.raises(retrograd.CaptureError, match=r"assigns to .data of a tensor.*test_side_effects"):
        retrograd.compile_backward(assigns, (randn(2, 3), torch.zeros(3)))


def write_to_windows(x: Tensor) -> Tensor:
    y = x * 1
    y.unfold(0, 2, 2)[0].add_(1.0)
    return y * 2


def test_writes_to_windows() -> None:
    """PyTorch makes zero of the last element, which is in no window, in a graph."""
    x = randn(5)
    with pytest.raises(retrograd.CaptureError, match=r"writes to windows that Tensor.unfold gave(?s:.*)clone\(\)"):
        retrograd.compile_backward(write_to_windows, (x,))
    with pytest.raises(Exception, match=r"writes to windows that Tensor.unfold gave"):
        torch.compile(write_to_windows, backend="retrograd")(x)
    for _ in range(2):
        with retrograd.enable():
            (found,) = torch.autograd.grad(write_to_windows(x).square().sum(), x)
        (expected,) = torch.autograd.grad(write_to_windows(x).square().sum(), x)
        torch.testing.assert_close(found, expected)


def add_up_windows(spectrum: Tensor) -> Tensor:
    signal = torch.istft(torch.view_as_complex(spectrum), 8, 3, window=torch.hann_window(8, dtype=spectrum.dtype))
    return signal.square().sum() + signal[1] * signal[4]


@pytest.mark.short_cases("torch.compile")
@pytest.mark.parametrize("door", ["compile_backward", "torch.compile"])
def test_windows_that_are_added_up(door: str) -> None:
    """As a write to windows is put back, and not refused as one."""
    x = torch.randn(5, 7, 2, dtype=torch.float64, requires_grad=True)
    if door == "torch.compile":
        call = torch.compile(add_up_windows, backend="retrograd")
    else:
        call = retrograd.compile_backward(add_up_windows, (x,))
    loss, expected = call(x), add_up_windows(x)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, x), torch.autograd.grad(expected, x))


def test_gradients_of_windows_inside_of_a_model() -> None:
    def model(x: Tensor) -> Tensor:
        windows = x.unfold(0, 2, 1).clone()
        windows[0].add_(1.0)
        (gradient,) = torch.autograd.grad(windows.square().sum(), x, create_graph=True)
        return gradient.square().sum()

    x = randn(5)
    (found,) = torch.autograd.grad(retrograd.compile_backward(model, (x,))(x), x)
    (expected,) = torch.autograd.grad(model(x), x)
    torch.testing.assert_close(found, expected)


def test_a_model_that_keeps_a_tensor_compiles_by_the_other_door() -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    model, x = Collects(), torch.randn(4, 3)
    compiled = torch.compile(model, backend="retrograd")
    for number in range(2):
        expected = torch.autograd.grad(model(x).square().sum(), model.linear.weight)
        kept = model.losses[-1]
        found = torch.autograd.grad(compiled(x).square().sum(), model.linear.weight)
        torch.testing.assert_close(found, expected)
        assert len(model.losses) == 2 * number + 2
        torch.testing.assert_close(model.losses[-1], kept)
        x = x * 2


class Forces(nn.Module):
    """A potential, which has its argument require grad to derive by it."""

    def __init__(self, sets: bool) -> None:
        super().__init__()
        self.linear, self.sets = nn.Linear(3, 3), sets

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.sets:
            x.requires_grad = True
        else:
            x.requires_grad_()
        energy = torch.tanh(self.linear(x)).square().sum()
        (forces,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, forces


@pytest.mark.parametrize("sets", [False, True])
def test_an_argument_that_the_model_has_require_grad(sets: bool, tmp_path: Path) -> None:
    """Its gradient is one that the caller sees."""
    model = Forces(sets)
    step = retrograd.compile_backward(model, (torch.randn(2, 3),))
    step.save(tmp_path / "model.vmfb")
    for call in (step, retrograd.load(tmp_path / "model.vmfb", model)):
        for given in (torch.randn(2, 3), torch.randn(2, 3, requires_grad=True)):
            found, expected = given.detach().clone(), given.detach().clone()
            for x, one in ((found, call), (expected, model)):
                model.zero_grad()
                sum(part.square().sum() for part in one(x)).backward()
            assert found.requires_grad
            torch.testing.assert_close(found.grad, expected.grad)


def test_parameters_that_require_grad_while_the_model_runs() -> None:
    def thaw(model: Any, x: Tensor) -> Tensor:
        result: Tensor = model.linear.requires_grad_()(x)
        return result

    def freeze(model: Any, x: Tensor) -> Tensor:
        for parameter in model.linear.parameters():
            parameter.requires_grad_(False)
        result: Tensor = model.linear(x) * model.counter
        return result

    def detached(model: Any, x: Tensor) -> Tensor:
        frozen = {name: p.detach() for name, p in model.linear.named_parameters()}
        result: Tensor = torch.func.functional_call(model.linear, frozen, (x,))
        return result

    x = randn(2, 3)
    frozen = type("Frozen", (Base,), {"forward": thaw})()
    frozen.linear.requires_grad_(False)
    with pytest.raises(
        retrograd.CaptureError, match=r"'linear.weight' require grad, which(?s:.*)before it is compiled"
    ):
        retrograd.compile_backward(frozen, (x,))
    with pytest.raises(retrograd.CaptureError, match=r"require none, which no trace does(?s:.*)functional_call"):
        retrograd.compile_backward(type("Freezes", (Base,), {"forward": freeze})(), (x,))
    model = type("Detached", (Base,), {"forward": detached})()
    torch.testing.assert_close(retrograd.compile_backward(model, (x,))(x), model(x))


def by_slice(model: Any, x: Tensor) -> Any:
    return model.linear(x)[:, : model.calls].sum()


def by_size(model: Any, x: Tensor) -> Any:
    return model.linear(x).sum() + torch.ones(torch.Size((model.calls,))).sum()


def by_array(model: Any, x: Tensor) -> Any:
    return model.linear(x) * torch.from_numpy(np.full(3, model.calls, dtype=np.float32))


def by_result(model: Any, x: Tensor) -> Any:
    return {"out": model.linear(x), "calls": model.calls}


def by_container(model: Any, x: Tensor) -> Any:
    model.numbers[0] += 1
    return model.linear(x)[: model.numbers[0]]


@pytest.mark.parametrize("computes", [by_slice, by_size, by_array, by_result, by_container])
def test_numbers_that_are_others_at_each_call(computes: Callable[[Any, Tensor], Any]) -> None:
    def forward(model: Any, x: Tensor) -> Any:
        model.calls = model.calls % 3 + 1
        return computes(model, x)

    model: Any = type("Counting", (Base,), {"forward": forward})()
    model.numbers = [0]
    with pytest.raises(retrograd.CaptureError, match=r"computes otherwise each time(?s:.*)(calls|numbers)"):
        retrograd.compile_backward(model, (randn(2, 3),))
    assert (model.calls, model.numbers) == (0, [0])


def test_a_recurrent_layer_that_remembers() -> None:
    """It brings a list of its parameters up to date in its first run, in which the model's state begins."""

    def forward(model: Any, x: Tensor) -> Any:
        result, state = model.layer(x, model.state)
        model.state = tuple(part.detach() for part in state)
        return result

    model: Any = type("Remembers", (Base,), {"forward": forward})()
    model.layer, model.state = nn.LSTM(3, 3), None
    with contextlib.ExitStack() as stack:
        kept = capture_joint(stack, model, (randn(2, 3),)).signature.kept
    assert [spec.name for spec in kept] == ["state"] and model.state is None


def test_a_layer_that_is_dropped_by_a_coin_compiles_in_parts() -> None:
    """The remedy that a model of others leaves its user."""

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.first(x)
            return torch.tanh(self.second(y)) if random.uniform(0, 1) < 0.5 else y

    model, x = Drops(), randn(2, 3)
    with pytest.raises(retrograd.CaptureError, match=r"Python's random(?s:.*)torch.compile\(model, backend="):
        retrograd.compile_backward(model, (x,))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="retrograd")
    for seed in range(4):
        gradients = []
        for call in (model, compiled):
            random.seed(seed)
            model.zero_grad()
            call(x).square().sum().backward()
            gradients.append([p.grad for p in model.parameters()])
        torch.testing.assert_close(*gradients)
