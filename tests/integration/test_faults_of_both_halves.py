# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A fault that both halves share: the backward does what its graph does with what the forward saved, and its gradients
are wrong. The first call compares them with gradients computed from the inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection

import pytest
import torch
from executables import compile_once
from torch import Tensor, nn

import retrograd
from retrograd.frontend.verification import from_inputs
from retrograd.pipelines.analysis.partition import partition_plan
from retrograd.pipelines.stages import staged


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What these tests compile is wrong on purpose: nobody else may find it."""
    monkeypatch.setenv("RETROGRAD_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(staged, "compile_executable", compile_once)


def chosen(x: Tensor, weight: Tensor) -> Tensor:
    gate = torch.sigmoid(x @ weight)
    best = (gate * torch.tanh(x * 1.3 + 0.1) + (1 - gate) * x).amax(0)
    return best.square().sum() + best.sum()


def given() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(32, 16, requires_grad=True), (torch.randn(16, 16) / 4).requires_grad_()


def tear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans compute again what is compared with a saved maximum."""

    def none(*_: Collection[int]) -> frozenset[int]:
        return frozenset()

    monkeypatch.setattr(partition_plan, "find_torn", none)


def test_torn_comparison_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    tear(monkeypatch)
    arguments = given()
    theirs = torch.autograd.grad(chosen(*arguments), arguments)
    unchecked = retrograd.compile_backward(chosen, arguments, verify=False, cache=False)
    wrong = torch.autograd.grad(unchecked(*arguments), arguments)
    assert not all(torch.allclose(a, b, rtol=1e-3) for a, b in zip(wrong, theirs, strict=True))

    step = retrograd.compile_backward(chosen, arguments, cache=False)
    with pytest.warns(retrograd.MiscompiledWarning, match="together give wrong gradients"):
        ours = torch.autograd.grad(step(*arguments), arguments)
    torch.testing.assert_close(ours, theirs)
    again = torch.autograd.grad(step(*arguments), arguments)
    torch.testing.assert_close(again, theirs)
    assert "wrong together with the forward" in str(step.explain().to_dict()["verification"])


@pytest.mark.short_cases("after its first step")
@pytest.mark.parametrize("ended", ["after its first step", "after its forward"])
def test_torn_comparison_is_caught_by_programs_that_find_it_in_the_cache(
    ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward passed, whether the earlier program came to its backward or not."""
    tear(monkeypatch)
    arguments = given()
    theirs = torch.autograd.grad(chosen(*arguments), arguments)
    loss = retrograd.compile_backward(chosen, arguments)(*arguments)
    if ended == "after its first step":
        with pytest.warns(retrograd.MiscompiledWarning, match="together give wrong gradients"):
            torch.autograd.grad(loss, arguments)
    later = retrograd.compile_backward(chosen, arguments)
    with pytest.warns(retrograd.MiscompiledWarning, match="together give wrong gradients"):
        ours = torch.autograd.grad(later(*arguments), arguments)
    torch.testing.assert_close(ours, theirs)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
    "batch norm, evaluated": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval(),
    "dropout": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.GELU()),
}


@pytest.mark.short_cases("dropout")
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_right_gradients_are_compared_from_the_inputs(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(2, 3, 8, 8)
    step = retrograd.compile_backward(model, (x,), cache=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", retrograd.MiscompiledWarning)
        step(x).square().sum().backward()
    assert step.explain().to_dict()["verification"] == [
        "@forward: verified by its first call",
        "@backward: verified by its first call",
    ]


class Overwrites(nn.Module):
    """Adds to a buffer that its gradients depend on."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x * self.weight * self.scale.clone())
        self.scale.add_(1.0)
        return y


def test_overwritten_argument_is_compared_as_saved() -> None:
    torch.manual_seed(0)
    model, x = Overwrites(), torch.randn(3, 4)
    step = retrograd.compile_backward(model, (x,), cache=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", retrograd.MiscompiledWarning)
        step(x).sum().backward()
    (_, backward) = step.explain().to_dict()["verification"]
    assert backward.startswith("@backward: verified by its first call, with what the forward saved (an argument")


def test_arguments_are_forgotten_where_no_backward_comes() -> None:
    forwards = from_inputs.Forwards()
    graph = torch.fx.symbolic_trace(lambda x: (x * 2,))
    x = torch.ones(3)
    results = [x * 2]
    forwards.keep(graph, [x], None, results, lambda _: None)
    assert forwards._run is not None
    results.clear()
    assert forwards._run is None
