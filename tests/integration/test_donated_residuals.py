# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A backward works in the memory of residuals that are dead, and gives gradients there: the same bits as where it does
not, and what anybody else may see of them is as it was."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from between_islands import Between, find_donated
from test_autograd import run_in_threads
from test_shorter_lifetimes import LOSSES, Deep, assert_close, gradients
from torch import Tensor, nn

import retrograd
from retrograd.contract.roles import INTO
from retrograd.pipelines.toolchain.lowering import lower_to_linalg
from retrograd.runtime.programs import call_times, tensors
from retrograd.runtime.programs.executor import Program
from retrograd.runtime.programs.loaded import Function, Loaded
from retrograd.runtime.programs.tensors import CopyDenied, give_up
from retrograd.runtime.steps import bound_function
from retrograd.runtime.steps.bound_function import BoundFunction
from retrograd.runtime.steps.compiled import CompiledBackward

GIVEN: dict[str, Any] = {"partition": "default", "kernels": "off", "verify": False}


@pytest.fixture(scope="module")
def model() -> Deep:
    torch.manual_seed(0)
    return Deep()


@pytest.fixture(scope="module")
def x() -> Tensor:
    # A residual is as large as the gradient of a weight.
    return torch.randn(256, 256, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def step(model: Deep, x: Tensor) -> CompiledBackward:
    return retrograd.compile_backward(model, (x,), **GIVEN)


@contextmanager
def giving_nothing_up() -> Iterator[None]:
    """Have what is compiled while this is open give nothing up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("retrograd.pipelines.stages.staged.lower_to_linalg", lower_kept)
        yield


def lower_kept(*given: Any, **more: Any) -> str:
    """Lower as ``lower_to_linalg`` does, with nothing given up."""
    return lower_to_linalg(*given, **{**more, "donating": False})


@pytest.fixture(scope="module")
def kept(model: Deep, x: Tensor) -> tuple[CompiledBackward, dict[str, list[Tensor]]]:
    """A step that gives nothing up, and its gradients: a backward of other outputs than a loss's is compiled when it is
    called."""
    with giving_nothing_up():
        step = retrograd.compile_backward(model, (x,), **GIVEN, cache=False)
        return step, {name: gradients(model, loss(step(x))) for name, loss in LOSSES.items()}


def program_of(step: CompiledBackward) -> Program:
    return step._parts.program


@pytest.mark.parametrize("name", LOSSES)
def test_the_same_bits_in_less_memory(
    model: Deep,
    x: Tensor,
    step: CompiledBackward,
    kept: tuple[CompiledBackward, dict[str, list[Tensor]]],
    name: str,
) -> None:
    (whole, found), loss = kept, LOSSES[name]
    expected = found[name]
    assert program_of(whole).donated("backward_into") == ((), ())
    donated, placed = program_of(step).donated("backward_into")
    assert len(donated) > 3
    assert len(placed) > 2
    for _ in range(3):
        assert all(map(torch.equal, gradients(model, loss(step(x))), expected))
    reports = [one.explain().to_dict() for one in (step, whole)]
    assert all(r["peak_bytes_measured"] == r["peak_bytes_predicted"] for r in reports)
    assert reports[0]["peak_bytes_measured"] < 0.9 * reports[1]["peak_bytes_measured"]


def test_nothing_is_copied_that_nobody_else_has(
    model: Deep, x: Tensor, step: CompiledBackward, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    read = tensors.as_it_is_read

    def count(tensor: Tensor) -> Tensor:
        copied.append(tensor.nbytes)
        return read(tensor)

    monkeypatch.setattr(tensors, "as_it_is_read", count)
    compiled = torch.compile(model, backend="retrograd", options={"partition": "default", "kernels": "off"})
    expected = gradients(model, LOSSES["the loss alone"](model(x)))
    for call in (step, compiled):
        assert_close(gradients(model, LOSSES["the loss alone"](call(x))), expected)
        copied.clear()
        assert_close(gradients(model, LOSSES["the loss alone"](call(x))), expected)
        # The tangent of a mean is a number.
        assert sum(copied) < 1000


def test_nobody_else_reads_what_is_given_up(
    model: Deep, x: Tensor, step: CompiledBackward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte of it is poisoned before the backward, which gets a copy, and after the backward the copy is too, but
    for the gradients that lie there."""
    expected = gradients(model, LOSSES["both outputs"](step(x)))
    poisoned: list[Tensor] = []

    def poison(arguments: list[Any], places: Iterable[int]) -> None:
        for place in places:
            kept = arguments[place].clone()
            arguments[place].untyped_storage().fill_(255)
            poisoned.append(arguments[place])
            arguments[place] = kept

    monkeypatch.setattr(bound_function, "give_up", poison)
    found = gradients(model, LOSSES["both outputs"](step(x)))
    assert len(poisoned) > 3
    assert all(map(torch.equal, found, expected))


def test_a_graph_that_is_retained(model: Deep, x: Tensor, step: CompiledBackward) -> None:
    loss = LOSSES["both outputs"](step(x))
    first = gradients(model, loss, retain_graph=True)
    for _ in range(2):
        assert all(map(torch.equal, gradients(model, loss, retain_graph=True), first))
    assert all(map(torch.equal, gradients(model, loss), first))


def test_what_the_user_holds_is_as_it_was(model: Deep, x: Tensor, step: CompiledBackward) -> None:
    expected = gradients(model, LOSSES["both outputs"](step(x)))
    before = x.clone()
    out = step(x)
    node: Any = out[1].grad_fn
    held = [t for t in node.saved_tensors if t is not None]
    copies = [t.clone() for t in held]
    tangents = [torch.ones(()), torch.from_numpy(np.full((256, 256), 1 / 1000, np.float32))]
    for parameter in model.parameters():
        parameter.grad = None
    torch.autograd.backward(out, tangents)
    assert_close([p.grad for p in model.parameters() if p.grad is not None], expected)
    assert torch.equal(x, before)
    assert all(map(torch.equal, held, copies))
    assert bool(tangents[1].eq(float(np.float32(1 / 1000))).all())


def test_gradients_keep_little_more_than_themselves(model: Deep, x: Tensor, step: CompiledBackward) -> None:
    gradients(model, LOSSES["the loss alone"](step(x)))
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(g.untyped_storage().nbytes() == g.nbytes for g in found)
    placed = step._parts.program.donated("backward_into")[1]
    arguments = step.manifest.function("backward").arguments
    hosts = [arguments[number] for number in {place.argument for place in placed}]
    sizes = [math.prod(int(str(size)) for size in host.shape) * getattr(torch, host.dtype).itemsize for host in hosts]
    assert 0 < sum(sizes) <= 17 / 16 * sum(place.size for place in placed)
    # Each is a tensor of its own to autograd and to optimizers.
    before = [g.clone() for g in found]
    found[0].zero_()
    assert all(g._base is None for g in found)
    assert all(map(torch.equal, found[1:], before[1:]))


def test_threads(model: Deep, x: Tensor, step: CompiledBackward) -> None:
    expected = torch.autograd.grad(LOSSES["both outputs"](step(x)), [*model.parameters()])
    found: list[tuple[Tensor, ...]] = []

    def run() -> None:
        found.extend(torch.autograd.grad(LOSSES["both outputs"](step(x)), [*model.parameters()]) for _ in range(5))

    run_in_threads([run] * 3)
    assert len(found) == 15
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, expected, strict=True))


def test_a_failure_half_way(model: Deep, x: Tensor, step: CompiledBackward, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = gradients(model, LOSSES["both outputs"](step(x)))
    loss = LOSSES["both outputs"](step(x))

    def fail(*_: Any) -> None:
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(BoundFunction, "_invoke", fail)
        with pytest.raises(MemoryError, match="none left"):
            loss.backward()
    del loss
    assert all(map(torch.equal, gradients(model, LOSSES["both outputs"](step(x))), expected))


def test_a_caller_who_gives_storage_gets_results_there(x: Tensor, step: CompiledBackward) -> None:
    program = program_of(step)
    function = step.manifest.function("backward")
    donated, placed = program.donated("backward_into")
    generator = torch.Generator().manual_seed(2)
    given = [torch.rand([*a.example], generator=generator) for a in function.arguments]
    before = [t.clone() for t in given]
    results = [program.allocate(function.results) for _ in range(2)]
    for one in results:
        program.invoke("backward_into", given, one)
    assert all(map(torch.equal, given, before))
    assert all(map(torch.equal, *results))
    bound = BoundFunction(program, function)
    owned: list[Any] = [t.clone() for t in given]
    addresses = {i: owned[i].data_ptr() for i in donated}
    found = bound(owned)
    assert not owned
    assert all(map(torch.equal, found, results[0]))
    assert all(found[p.result].data_ptr() == addresses[p.argument] + p.offset for p in placed)


def test_what_others_may_know_is_copied() -> None:
    whole, mapped = torch.arange(64.0), np.arange(64, dtype=np.float32)
    kept = torch.arange(64.0)
    made: list[Any] = [
        torch.arange(64.0),
        kept,
        whole[:32],
        torch.from_numpy(mapped),
        torch.arange(64.0).share_memory_(),
        torch.arange(64.0).view(8, 8).t(),
        torch.ones(()).expand(64),
        torch.arange(65.0)[1:],
    ]
    values, addresses = [t.clone() for t in made], [t.data_ptr() for t in made]
    give_up(made, range(len(made)))
    assert all(map(torch.equal, made, values))
    assert [t.data_ptr() == address for t, address in zip(made, addresses, strict=True)] == [True, *7 * [False]]
    assert all(t.is_contiguous() for t in made)


def test_a_call_that_is_made_again_finds_what_it_wrote_over(
    model: Deep, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IREE finds while it runs that it has to copy to a result. On a device that works in the calling thread the
    kernels before the copy have run by then."""
    step, denied = retrograd.compile_backward(model, (x,), **GIVEN), list[str]()
    call = Loaded._call

    def call_and_deny(self: Loaded, function: Function, views: Sequence[Any]) -> None:
        call(self, function, views)
        if function.donated and not function.copies:
            denied.append(function.name)
            function.copies = True
            raise CopyDenied

    monkeypatch.setattr(Loaded, "_call", call_and_deny)
    for loss in LOSSES.values():
        expected = gradients(model, loss(model(x)))
        for _ in range(2):
            assert_close(gradients(model, loss(step(x))), expected)
    assert len(denied) == len(LOSSES)


class Words(nn.Module):
    """Words from those before them; the state is carried on, and is no part of a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers, self.head = nn.Embedding(12, 8), nn.LSTM(8, 10, 2, proj_size=6), nn.Linear(6, 12)

    def forward(self, words: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden, state = self.layers(self.words(words), state)
        return self.head(hidden), state


@pytest.mark.long
def test_steps_in_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a backward that copies to its results, which only a device that works in the calling thread refuses."""
    monkeypatch.setattr(call_times, "_TRIED_SECONDS", 1e9)
    torch.manual_seed(0)
    model = Words()
    words, state = torch.randint(12, (6, 3)), (torch.zeros(2, 3, 6), torch.zeros(2, 3, 10))
    step = retrograd.compile_backward(model, (words[:-1], state))

    def run(call: Callable[..., Any]) -> list[Tensor]:
        scores, _ = call(words[:-1], state)
        return [*torch.autograd.grad(F.cross_entropy(scores.flatten(0, 1), words[1:].flatten()), [*model.parameters()])]

    expected = run(model)
    for _ in range(6):
        assert_close(run(step), expected)


@pytest.mark.filterwarnings("ignore::retrograd.EagerIslandWarning")
def test_what_one_stage_gives_another_is_worked_in() -> None:
    """``sub`` crosses an island of the backward: it is no residual, and nobody's once the second stage has read it."""
    torch.manual_seed(0)
    model, data = Between(), torch.randn(512, 64)
    step = retrograd.compile_backward(model, (data,), **GIVEN)
    assert "sub" in find_donated(step)["backward_1"]
    expected = gradients(model, model(data).square().sum())
    for _ in range(3):
        assert_close(gradients(model, step(data).square().sum()), expected)


def test_a_stage_gives_a_result_where_a_residual_was() -> None:
    """One of the residual's size, which the library then multiplies; a graph that is retained reads its residuals
    again."""
    torch.manual_seed(0)
    norms = (nn.GELU(), nn.LayerNorm(128), nn.LayerNorm(128))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), *norms, nn.Linear(128, 10))
    data = torch.randn(1024, 64)
    step = retrograd.compile_backward(model, (data,), partition="default", kernels="library", verify=False)
    stages = [stage for half in step._parts.cut.values() for stage in half.stages]
    placed = [place for stage in stages for place in program_of(step).donated(stage.name + INTO)[1]]
    assert {place.size for place in placed} == {1024 * 128 * 4}
    expected = gradients(model, model(data).square().mean())
    for _ in range(3):
        loss = step(data).square().mean()
        assert_close(gradients(model, loss, retain_graph=True), expected)
        assert_close(gradients(model, loss), expected)


@pytest.mark.filterwarnings("ignore::retrograd.EagerIslandWarning")
def test_on_cuda_that_takes_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = Between(), torch.randn(512, 64)
    steps = [retrograd.compile_backward(model, (data,), **GIVEN, target="cuda:sm_90")]
    monkeypatch.setattr("retrograd.pipelines.stages.staged.lower_to_linalg", lower_kept)
    steps += [retrograd.compile_backward(model, (data,), **GIVEN, target="cuda:sm_90", cache=False)]
    scratch = [step.explain().to_dict()["backward_transient_bytes"] for step in steps]
    assert scratch[0] == scratch[1] - 512 * 96 * 4
