# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Faults of what comes between the trace and the compiler: of bwd-cse, whose merges are merged in the traced graph too,
of torch-mlir's importer, which they go by, and of the passes over FX. The first call compares with the graph that was
traced, and what is compiled is not used."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from executables import compile_once
from torch import Tensor, nn
from torch_mlir.extras.fx_importer import RefMapping, RefTracker

import retrograd
from retrograd.frontend.preparation import importer, prepare
from retrograd.pipelines.analysis.partition.value_numbering import find_duplicates
from retrograd.pipelines.stages import staged
from retrograd.pipelines.transforms.torch import bwd_cse

aten = torch.ops.aten
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What these tests compile is wrong on purpose: nobody else may find it."""
    monkeypatch.setenv("RETROGRAD_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(staged, "compile_executable", compile_once)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Masked(nn.Module):
    """Has two masks of one shape that are constants of its graph, and a sine and a cosine of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([1.5, 0.5, 4.0, 2.0])
        h = x @ self.weight
        return (h * first).tanh() + (h * second).tanh().square() + h.sin() * h.cos().exp()


def merge_sines(monkeypatch: pytest.MonkeyPatch) -> None:
    """bwd-cse takes a cosine for a sine."""

    def find_more(graph: Any, meanings: Sequence[Any], *rest: Any, **options: Any) -> dict[int, int]:
        names = [None if m is None else str(m).replace("aten.cos", "aten.sin") for m in meanings]
        return find_duplicates(graph, names, *rest, **options)

    monkeypatch.setattr(bwd_cse, "find_duplicates", find_more)


class Forgetful(RefTracker):  # type: ignore[misc]
    """Gives a tensor the literal of another one, as torch-mlir's tracker does where the other one is gone: here
    whenever the two have one shape."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Any, RefMapping] = {}

    def track(self, referrent: Tensor) -> RefMapping:
        return self._known.setdefault((referrent.shape, referrent.dtype), super().track(referrent))


def forget_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The importer gives the second mask the literal of the first."""
    monkeypatch.setattr(importer, "KeptTensors", Forgetful)


def _add_step(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.fx.Node], None]) -> None:
    def run(traced: prepare.Traced) -> None:
        for node in traced.graph_module.graph.nodes:
            change(node)

    monkeypatch.setattr(prepare, "PREPARE", (*prepare.PREPARE, prepare.Step(run, "a fault")))


def change_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over FX puts a sine in place of each hyperbolic tangent, and with it in place of its gradient's."""

    def change(node: torch.fx.Node) -> None:
        if node.target is aten.tanh.default:
            node.target = aten.sin.default

    _add_step(monkeypatch, change)


def change_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over FX takes each sum of gradients for a difference."""

    def change(node: torch.fx.Node) -> None:
        is_backward = node.meta.get("partitioner_tag", "is_backward") == "is_backward"
        if node.target is aten.add.Tensor and is_backward and "tanh" not in str(node.args):
            node.target = aten.sub.Tensor

    _add_step(monkeypatch, change)


FAULTS: dict[str, Plant] = {
    "bwd-cse": merge_sines,
    "importer": forget_tensors,
    "outputs": change_outputs,
    "gradients": change_gradients,
}


def compile_ahead(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    return retrograd.compile_backward(model, (x,), cache=False)


def compile_by_dynamo(model: nn.Module, _: Tensor) -> Callable[[Tensor], Tensor]:
    compiled: Callable[[Tensor], Tensor] = torch.compile(model, backend="retrograd", options={"cache": False})
    return compiled


DOORS = {"compile_backward": compile_ahead, "torch.compile": compile_by_dynamo}


def steps_of(call: Callable[[Tensor], Tensor], model: nn.Module) -> list[Tensor]:
    """Outputs and gradients of three steps with other arguments each."""
    given: list[Tensor] = []
    for seed in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        output = call(x)
        output.square().sum().backward()
        assert x.grad is not None
        given += [output.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
        for p in model.parameters():
            p.grad = None
    return given


def make() -> nn.Module:
    torch.manual_seed(0)
    return Masked()


@pytest.mark.short_cases(
    "bwd-cse-compile_backward", "importer-torch.compile", "outputs-compile_backward", "gradients-torch.compile"
)
@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_what_is_not_the_traced_graph_is_not_used(
    fault: Plant, door: Callable[..., Callable[[Tensor], Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    theirs = steps_of(model, model)
    fault(monkeypatch)
    step = door(model, torch.randn(3, 4, requires_grad=True))
    with pytest.warns(retrograd.MiscompiledWarning, match="another graph than the one that was traced"):
        ours = steps_of(step, model)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("fault", [merge_sines, change_gradients], ids=["bwd-cse", "gradients"])
def test_a_backward_as_it_runs_is_compared_with_the_engine(fault: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    theirs = steps_of(model, model)
    fault(monkeypatch)
    before = len(retrograd.explain_recompiles())
    with retrograd.enable(cache=False):
        ours = steps_of(model, model)
    torch.testing.assert_close(ours, theirs)
    assert "compiled, it is wrong" in str(retrograd.explain_recompiles()[before:])


def test_without_fallback_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    change_outputs(monkeypatch)
    model, x = make(), torch.randn(3, 4)
    step = retrograd.compile_backward(model, (x,), cache=False, fallback="error")
    for _ in range(2):
        with pytest.raises(retrograd.VerificationError, match="another graph than the one that was traced"):
            step(x)


class Twice(Masked):
    """Has the first mask in the place of the second."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tensor([0.0, 1.0, 2.0, 3.0])
        second = torch.tensor([0.0, 1.0, 2.0, 3.0])
        h = x @ self.weight
        return (h * first).tanh() + (h * second).tanh().square() + h.sin() * h.cos().exp()


def test_a_program_that_passed_for_another_model_is_compared_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two models are one module to the compiler, by the importer's fault."""
    torch.manual_seed(0)
    forget_tensors(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", retrograd.MiscompiledWarning)
        twice = Twice()
        steps_of(retrograd.compile_backward(twice, (torch.randn(3, 4, requires_grad=True),)), twice)
    model = make()
    theirs = steps_of(model, model)
    step = retrograd.compile_backward(model, (torch.randn(3, 4, requires_grad=True),))
    with pytest.warns(retrograd.MiscompiledWarning, match="another graph than the one that was traced"):
        ours = steps_of(step, model)
    torch.testing.assert_close(ours, theirs)


def test_losses_that_wait_for_their_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one's gradients are right, each time; of the second what is wrong was computed already."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), Masked())
    x = torch.randn(3, 4)

    def gradients(loss: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)

    right = retrograd.compile_backward(model, (x,), cache=False)
    torch.manual_seed(3)
    theirs = gradients(right(x).square().sum())
    change_gradients(monkeypatch)
    step = retrograd.compile_backward(model, (x,), cache=False)
    torch.manual_seed(3)
    losses = [step(x).square().sum() for _ in range(2)]
    with pytest.warns(retrograd.MiscompiledWarning, match="another graph than the one that was traced"):
        ours = gradients(losses[0])
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradients(losses[0]), theirs)
    with pytest.raises(retrograd.VerificationError, match="compute it again"):
        gradients(losses[1])
