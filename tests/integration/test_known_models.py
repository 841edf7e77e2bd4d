# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Models that were compiled before are opened without a trace, and are what the model is in eager."""

from __future__ import annotations

import copy
import gc
import logging
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from executables import compile_once
from torch import Tensor, nn

import retrograd
from retrograd.compilation import Compilation
from retrograd.first_calls import Checks
from retrograd.kept_model import KeptModel
from retrograd.known_models import ModelInQuestion
from retrograd.options import Request
from retrograd.pipelines.stages import staged
from retrograd.runtime.cache import Cache
from retrograd.store import Store

Model = Callable[..., Any]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of models is each test's own; what iree-compile makes of the same text is the same."""
    monkeypatch.setenv("RETROGRAD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(staged, "compile_executable", compile_once)


@pytest.fixture(autouse=True)
def _told(caplog: pytest.LogCaptureFixture) -> None:
    """A test that fails shows why a model was not known."""
    for name in ("retrograd.known_models", "retrograd.frontend.doors.model_record"):
        caplog.set_level(logging.DEBUG, logger=name)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by one for each model that is traced and compiled."""
    found: list[Any] = []
    original = Compilation.compile

    def noted(self: Compilation, *args: Any, **kwargs: Any) -> Any:
        found.append(self.model)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Compilation, "compile", noted)
    return found


class Layers(nn.Module):
    """Products, a norm with buffers, dropout, a residual, and a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)
        self.dropout = nn.Dropout(0.5)
        self.unread = nn.Parameter(torch.ones(3))
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(torch.relu(self.norm(self.first(x))))
        loss: Tensor = (self.second(hidden) * self.factor + x).pow(2).mean()
        return loss


class Wave(nn.Module):
    """The least that is compiled; of its ops the sine has no decomposition."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layer(x).sin().pow(2).mean()
        return loss


def step(call: Model, model: nn.Module, x: Tensor) -> list[Tensor]:
    """What a step gives: the loss, the gradients of the argument and of the parameters, the buffers."""
    torch.manual_seed(7)
    x = x.detach().requires_grad_()
    loss = call(x)
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    assert x.grad is not None
    return [loss.detach(), x.grad, *(g for g in gradients if g is not None), *(b.clone() for b in model.buffers())]


def argument() -> Tensor:
    return torch.linspace(-1, 1, 24).reshape(4, 6).requires_grad_()


def compiled_before(model: Model, *args: Any, **options: Any) -> None:
    """Compile a copy of a model and take a step, as another process may have."""
    other = copy.deepcopy(model)
    loss = retrograd.compile_backward(other, args, **options)(*args)
    loss.backward()


def look_up(model: nn.Module, x: Tensor) -> tuple[KeptModel, bytes]:
    """Find what is kept of a model that takes ``x``, and its code; there has to be some."""
    question = ModelInQuestion.of(model, Request(), (x,), {})
    assert question is not None
    found = question.find()
    assert found is not None
    return found


def test_a_known_model_is_not_traced_and_trains_alike(traces: list[Any]) -> None:
    model, x = Layers(), argument()
    fresh = retrograd.compile_backward(model, (x,))
    expected = step(fresh, model, x)
    again = Layers()
    known = retrograd.compile_backward(again, (x,))
    found = step(known, again, x)
    assert len(traces) == 1
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert known.explain().to_dict()["verification"] == [
        f"@{name}: verified, by an earlier program from the cache" for name in ("forward", "backward")
    ]
    assert known.explain().to_dict()["cached"]


def test_a_known_model_has_eagers_gradients() -> None:
    model, x = Layers(), argument()
    model.dropout.p = 0.0
    compiled_before(model, x)
    eager = copy.deepcopy(model)
    found = step(retrograd.compile_backward(model, (x,)), model, x)
    for a, b in zip(found, step(eager, eager, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_known_model_does_not_hold_its_arguments() -> None:
    model, x = Wave(), argument()
    compiled_before(model, x)
    known = retrograd.compile_backward(model, (x,))
    held = weakref.ref(x)
    del x
    gc.collect()
    assert held() is None
    assert known.explain().to_dict()["cached"]


def test_a_changed_model_is_traced(traces: list[Any]) -> None:
    model, x = Layers(), argument()
    model.dropout.p = 0.0
    compiled_before(model, x)
    model.factor = 3.0
    eager = copy.deepcopy(model)
    found = step(retrograd.compile_backward(model, (x,)), model, x)
    assert len(traces) == 2
    for a, b in zip(found, step(eager, eager, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_known_model_is_compiled_anew_for_other_values(traces: list[Any]) -> None:
    model, x = Layers(), argument()
    model.dropout.p = 0.0
    compiled_before(model, x)
    known = retrograd.compile_backward(model, (x,))
    assert len(traces) == 1
    model.factor = 3.0
    eager = copy.deepcopy(model)
    for a, b in zip(step(known, model, x), step(eager, eager, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert len(traces) == 2


def test_what_was_never_called_is_not_known(traces: list[Any]) -> None:
    model, x = Wave(), argument()
    retrograd.compile_backward(model, (x,))
    again = retrograd.compile_backward(model, (x,))
    assert len(traces) == 2
    again(x)
    # Its backward was not called.
    retrograd.compile_backward(model, (x,))
    assert len(traces) == 3


def test_what_was_found_to_be_wrong_is_not_known(traces: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Wave(), argument()
    made: list[Checks] = []
    original = Checks.check_of

    def noted(self: Checks, *args: Any) -> Any:
        made.append(self)
        return original(self, *args)

    monkeypatch.setattr(Checks, "check_of", noted)
    compiled_before(model, x)
    retrograd.compile_backward(model, (x,))
    assert len(traces) == 1
    next(call for call in made[0].calls if call.name == "forward").care.forget()
    retrograd.compile_backward(model, (x,))
    assert len(traces) == 2


def test_an_entry_that_cannot_be_read_is_a_miss(traces: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Wave(), argument()
    with monkeypatch.context() as patch:
        patch.setattr(KeptModel, "dump", lambda self: b"no pickle")
        compiled_before(model, x)
    retrograd.compile_backward(model, (x,))
    assert len(traces) == 2


def test_without_the_cache_nothing_is_kept_or_known(traces: list[Any], tmp_path: Path) -> None:
    model, x = Wave(), argument()
    compiled_before(model, x, cache=False)
    assert not [*tmp_path.glob("cache/*")]
    compiled_before(model, x)
    retrograd.compile_backward(model, (x,), cache=False)
    assert len(traces) == 3


def test_a_known_model_is_saved_and_shows_its_ir(tmp_path: Path, traces: list[Any]) -> None:
    model, x = Layers(), argument()
    compiled_before(model, x)
    known = retrograd.compile_backward(model, (x,))
    model.eval()
    known.save(tmp_path / "file.rg")
    assert not model.training
    model.train()
    assert "func.func @backward" in known.mlir("scheduled")
    assert len(traces) == 2
    loaded = retrograd.load(tmp_path / "file.rg", model)
    buffers = [b.clone() for b in model.buffers()]
    expected = step(known, model, x)
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    for a, b in zip(step(loaded, model, x), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_known_model_that_has_changed_since_is_not_saved(tmp_path: Path) -> None:
    model, x = Layers(), argument()
    compiled_before(model, x)
    known = retrograd.compile_backward(model, (x,))
    model.factor = 2.0
    with pytest.raises(retrograd.ArtifactError, match=r"another one than was compiled.*factor"):
        known.save(tmp_path / "file.rg")


def test_a_known_model_runs_without_gradients_twice_and_under_enable() -> None:
    model, x = Layers(), argument()
    model.dropout.p = 0.0
    compiled_before(model, x)
    known = retrograd.compile_backward(model, (x,))
    eager = copy.deepcopy(model)
    with torch.no_grad():
        assert not known(x).requires_grad
        eager(x)
    loss, expected = known(x), eager(x)
    for _ in range(2):
        found = torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True, allow_unused=True)
        wanted = torch.autograd.grad(expected, [x, *eager.parameters()], retain_graph=True, allow_unused=True)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    with retrograd.enable():
        for a, b in zip(step(known, model, x), step(eager, eager, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    (first,) = torch.autograd.grad(known(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gradients of gradients of Layers"):
        first.sum().backward()


def test_what_was_compared_with_other_kernels_is_not_known(traces: list[Any]) -> None:
    model, x = Wave(), argument()
    compiled_before(model, x, fallback="error")
    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        # PyTorch warns of it.
        warnings.simplefilter("ignore")
        library.impl("sin", lambda x: x.cos() * 2, "CPU")
        step = retrograd.compile_backward(model, (x,), fallback="error")
        assert len(traces) == 2
        with pytest.raises(retrograd.VerificationError, match="forward gives wrong values"):
            step(x)


def test_what_was_compared_with_kernels_of_one_place_is_not_known(traces: list[Any]) -> None:
    model, x = Wave(), argument()

    def compile_with(kernel: Callable[[Tensor], Tensor]) -> None:
        # The decorator has a place in torch/library.py, whatever it decorates.
        with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.library.impl("aten::sin", "CPU", lib=library)(kernel)
            step = retrograd.compile_backward(model, (x,), fallback="error")
            step(x).backward()

    # As PyTorch's own, and then as no sine is.
    compile_with(lambda x: (x - torch.pi / 2).cos())
    with pytest.raises(retrograd.VerificationError, match="forward gives wrong values"):
        compile_with(lambda x: x.cos() * 2)
    assert len(traces) == 2


class Fickle(nn.Module):
    """Does something else the first time that it runs, which is noted in no module."""

    def __init__(self, flags: set[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)
        self._seen: Callable[[], set[str]] = lambda: flags

    def forward(self, x: Tensor) -> Tensor:
        factor = 2.0 if "seen" in self._seen() else 3.0
        self._seen().add("seen")
        loss: Tensor = (self.layer(x) * factor).pow(2).mean()
        return loss


def test_a_model_that_changes_as_it_runs_is_not_kept(traces: list[Any]) -> None:
    x = argument()
    compiled_before(Fickle(set()), x)
    model = Fickle({"seen"})
    eager = copy.deepcopy(model)
    for a, b in zip(step(retrograd.compile_backward(model, (x,)), model, x), step(eager, eager, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert len(traces) == 2


def test_a_model_whose_code_was_evicted_is_traced(traces: list[Any]) -> None:
    model, x = Wave(), argument()
    compiled_before(model, x)
    kept, code = look_up(model, x)
    assert code not in kept.dump()
    (Cache().folder / f"{kept.code}.entry").unlink()
    retrograd.compile_backward(model, (x,))
    assert len(traces) == 2


class Attention(nn.Module):
    """What a library computes in part, in stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.takes, self.gives = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.takes(x).view(2, 64, 3, 2, 16).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        loss: Tensor = self.gives(attended.transpose(1, 2).reshape(2, 64, 32)).pow(2).mean()
        return loss


class Writes(nn.Module):
    """Writes to its argument, and gives a view."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        counts.add_(1)
        viewed: Tensor = self.layer(x * counts).view(6, 4)
        return viewed


@pytest.mark.short_cases("off")
@pytest.mark.parametrize("kernels", ["library", "off"])
def test_islands_and_stages_are_kept(kernels: str, traces: list[Any]) -> None:
    model, x = Attention(), torch.randn(2, 64, 32, requires_grad=True)
    compiled_before(model, x, kernels=kernels, free_early=True)
    known = retrograd.compile_backward(model, (x,), kernels=kernels, free_early=True)
    assert len(traces) == 1
    eager = copy.deepcopy(model)
    for a, b in zip(step(known, model, x), step(eager, eager, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_writes_and_views_are_as_in_eager(traces: list[Any]) -> None:
    model, x = Writes(), argument()
    first = retrograd.compile_backward(copy.deepcopy(model), (x, torch.ones(6)))
    output = first(x, torch.ones(6))
    output.sum().backward()
    known = retrograd.compile_backward(model, (x, torch.ones(6)))
    assert len(traces) == 1
    counts, expected = torch.ones(6), torch.ones(6)
    found, wanted = known(x, counts), model(x, expected)
    assert found._is_view() == output._is_view()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(counts, expected)
    for a, b in zip(
        torch.autograd.grad(found.pow(2).sum(), [x, *model.parameters()]),
        torch.autograd.grad(wanted.pow(2).sum(), [x, *model.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_two_outputs_are_not_kept(traces: list[Any]) -> None:
    class Both(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            hidden = super().forward(input)
            return hidden, hidden.sum()

    model, x = Both(6, 6), argument()
    _, total = retrograd.compile_backward(copy.deepcopy(model), (x,))(x)
    total.backward()
    hidden, total = retrograd.compile_backward(model, (x,))(x)
    hidden_eager, total_eager = model(x)
    found = torch.autograd.grad(hidden.pow(2).sum() + total, [x, *model.parameters()])
    wanted = torch.autograd.grad(hidden_eager.pow(2).sum() + total_eager, [x, *model.parameters()])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert len(traces) == 2


def test_a_lookup_finds_what_was_kept_for_this_very_model() -> None:
    model, x = Wave(), argument()
    compiled_before(model, x)
    kept, _ = look_up(model, x)
    assert {Store().get_by_key(key) for key in kept.checks.values()} == {b"right"}
