# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Hooks of saved tensors around what is compiled with its forward: part of the program if they are marked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from io import StringIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import retrograd

# Counted in C: what a marked hook reads of Python is part of what it is.
CALLS = StringIO()


@retrograd.inlineable
def pack(tensor: Tensor) -> Any:
    CALLS.write(".")
    return tensor.bfloat16(), tensor.dtype


@retrograd.inlineable
def unpack(packed: Any) -> Tensor:
    CALLS.write(".")
    tensor, dtype = packed
    whole: Tensor = tensor.to(dtype)
    return whole


class Model(nn.Module):
    """Its gradients are those of eager with ``hidden`` rounded, where that is packed."""

    def __init__(self, hooks: tuple[Any, Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 8)
        self.hooks = hooks

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.hooks is None:
            hidden = torch.exp(hidden)
        else:
            with saved_tensors_hooks(*self.hooks):
                hidden = torch.exp(hidden)
        out: Tensor = self.last(hidden)
        return out


def gradients(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> Sequence[Tensor]:
    return torch.autograd.grad(call(x).sin().sum(), list(model.parameters()))


def expected(model: Any, x: Tensor) -> Sequence[Tensor]:
    """Eager's gradients, with what exp gives rounded for the backward."""
    weight, bias = model.last.weight, model.last.bias
    with torch.no_grad():
        hidden = model.first(x).exp()
        rounded = hidden.bfloat16().float()
        tangent = (hidden @ weight.t() + bias).cos()
        inner = (tangent @ weight) * rounded
        return [inner.t() @ x, inner.sum(0), tangent.t() @ rounded, tangent.sum(0)]


def check(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).norm() / b.norm()) <= 2e-5


def under(hooks: tuple[Any, Any], call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``call``, and no more than that, under the hooks."""

    def called(x: Tensor) -> Tensor:
        with saved_tensors_hooks(*hooks):
            return call(x)

    return called


def calls_of(function: Callable[[], Any]) -> int:
    """How often it called the hooks."""
    before = CALLS.tell()
    function()
    return CALLS.tell() - before


@pytest.fixture(scope="module")
def packed() -> tuple[Model, retrograd.CompiledBackward]:
    model = Model()
    with saved_tensors_hooks(pack, unpack):
        return model, retrograd.compile_backward(model, (torch.randn(128, 16),), verify=True)


def test_hooks_around_the_compilation_are_compiled_in(packed: tuple[Model, retrograd.CompiledBackward]) -> None:
    model, step = packed
    x = torch.randn(128, 16)
    gradients(step, model, x)

    def run() -> None:
        check(gradients(step, model, x), expected(model, x))
        check(gradients(under((pack, unpack), step), model, x), expected(model, x))

    assert calls_of(run) == 0
    saved = [a for a in step.manifest.function("backward").arguments if a.role == "saved"]
    assert [(a.name, a.dtype) for a in saved] == [("saved.exp_packed_0", "bfloat16")]
    with pytest.raises(ValueError, match=r"compiled with the hooks pack \(.*, called under .*lambda.*compile again"):
        under((lambda t: t, lambda t: t), step)(x)


def test_of_what_is_packed_only_the_packed_copy_is_alive_in_between(
    packed: tuple[Model, retrograd.CompiledBackward],
) -> None:
    model, step = packed
    x = torch.randn(128, 16)
    plain = retrograd.compile_backward(model, (x,))
    reports = []
    for compiled in (step, plain):
        gradients(compiled, model, x)
        reports.append(compiled.explain().to_dict())
    ours, others = reports
    assert ours["saved_bytes"] == 2 * 128 * 64 and others["saved_bytes"] == 4 * 128 * 64
    assert ours["peak_bytes_measured"] <= others["peak_bytes_measured"] - 2 * 128 * 64


def test_hooks_that_are_not_compiled_in_are_called(packed: tuple[Model, retrograd.CompiledBackward]) -> None:
    model, x = packed[0], torch.randn(128, 16)
    step = retrograd.compile_backward(model, (x,))
    log: list[str] = []

    def note(text: str, tensor: Tensor) -> Tensor:
        log.append(text)
        return tensor

    def run() -> None:
        hooks = partial(note, "pack"), partial(note, "unpack")
        check(gradients(under(hooks, step), model, x), gradients(model, model, x))
        with pytest.warns(UserWarning, match=r"are called in Python, .* open them around compile_backward"):
            gradients(under((pack, unpack), step), model, x)

    # On what exp gives, and on the weight and the argument, which the backward needs as well.
    assert calls_of(run) == 2 * 3
    assert log == ["pack"] * 3 + ["unpack"] * 3


@pytest.mark.short_cases("graph modules")
@pytest.mark.parametrize("hooks", ["marked", "graph modules"])
def test_torch_compile(hooks: str) -> None:
    torch._dynamo.reset()
    model, x = Model(), torch.randn(128, 16)
    pair = pack, unpack
    if hooks == "graph modules":
        pair = torch.fx.symbolic_trace(lambda t: t.bfloat16()), torch.fx.symbolic_trace(lambda t: t.float())
    compiled: list[Any] = []

    def backend(graph_module: Any, inputs: Any) -> Any:
        compiled.append(graph_module)
        return torch._dynamo.lookup_backend("retrograd")(graph_module, inputs)

    step = torch.compile(model, backend=backend, dynamic=False)

    def run() -> None:
        check(gradients(under(pair, step), model, x), expected(model, x))

    run()

    assert calls_of(run) == 0 and len(compiled) == 1
    check(gradients(step, model, x), gradients(model, model, x))
    assert len(compiled) == 2, "compiled for no hooks"
    run()
    assert len(compiled) == 2


def test_hooks_inside_of_the_model() -> None:
    x = torch.randn(128, 16)
    model = Model((pack, unpack))
    step = retrograd.compile_backward(model, (x,))
    check(gradients(step, model, x), expected(model, x))
    model = Model((lambda t: t.bfloat16(), lambda t: t.float()))
    plain = Model()
    with pytest.warns(UserWarning, match="are open in the model and are not called"):
        step = retrograd.compile_backward(model, (x,))
    check(gradients(step, model, x), gradients(plain, plain, x))


def test_what_the_hooks_cannot_pack_is_refused() -> None:
    kept = torch.ones(())
    with (
        saved_tensors_hooks(retrograd.inlineable(lambda t: t * kept), retrograd.inlineable(lambda t: t)),
        pytest.raises(retrograd.CaptureError, match="they read a tensor other than what they are given"),
    ):
        retrograd.compile_backward(Model(), (torch.randn(128, 16),))
    with warnings.catch_warnings(), saved_tensors_hooks(pack, unpack):
        # Nothing that is saved is an integer, which these hooks make something else of.
        warnings.simplefilter("error")
        retrograd.compile_backward(lambda x: x.exp() * x.argmax(), (torch.randn(3, requires_grad=True),))
