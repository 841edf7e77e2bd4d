# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Residuals that lie one behind another, in which a backward works and gives gradients larger than each of them: the
same bits, in less memory."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from models import MODELS
from test_autograd import run_in_threads
from test_donated_residuals import GIVEN, giving_nothing_up
from test_shorter_lifetimes import LOSSES, Deep, gradients
from torch import Tensor

import retrograd
from retrograd.runtime.programs import arenas
from retrograd.runtime.programs.arenas import Arena
from retrograd.runtime.steps import bound_function
from retrograd.runtime.steps.compiled import CompiledBackward

LOSS = LOSSES["the loss alone"]


@pytest.fixture(scope="module")
def model() -> Deep:
    torch.manual_seed(0)
    # A residual is a third of the gradient of a weight.
    return Deep(192, 4)


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(64, 192, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def step(model: Deep, x: Tensor) -> CompiledBackward:
    return retrograd.compile_backward(model, (x,), **GIVEN)


@pytest.fixture(scope="module")
def kept(model: Deep, x: Tensor) -> tuple[CompiledBackward, dict[str, list[Tensor]]]:
    """A step that gives nothing up, and its gradients."""
    with giving_nothing_up():
        step = retrograd.compile_backward(model, (x,), **GIVEN, cache=False)
        return step, {name: gradients(model, loss(step(x))) for name, loss in LOSSES.items()}


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[Arena]:
    """The arenas that were copied."""
    found, copy = list[Arena](), arenas._copy_joined

    def count(arguments: list[Any], arena: Arena) -> None:
        found.append(arena)
        copy(arguments, arena)

    monkeypatch.setattr(arenas, "_copy_joined", count)
    return found


def test_the_same_bits_in_less_memory(
    model: Deep,
    x: Tensor,
    step: CompiledBackward,
    kept: tuple[CompiledBackward, dict[str, list[Tensor]]],
    copied: list[Arena],
) -> None:
    (whole, expected), program = kept, step._parts.program
    joined, placed = program.arenas("backward_into"), program.donated("backward_into")[1]
    assert joined[0].size >= 2 * 192 * 192 * 4
    assert {place.argument for place in placed} == {joined[0].first}
    assert max(place.size for place in placed) == 192 * 192 * 4
    for _ in range(3):
        assert all(map(torch.equal, gradients(model, LOSS(step(x))), expected["the loss alone"]))
    assert not copied
    reports = [one.explain().to_dict() for one in (step, whole)]
    assert all(r["peak_bytes_measured"] == r["peak_bytes_predicted"] for r in reports)
    assert reports[0]["peak_bytes_measured"] < 0.85 * reports[1]["peak_bytes_measured"]


def test_another_backward_leaves_them_as_they_are(
    model: Deep,
    x: Tensor,
    step: CompiledBackward,
    kept: tuple[CompiledBackward, dict[str, list[Tensor]]],
    copied: list[Arena],
) -> None:
    """That of all outputs, which is compiled when it is first used."""
    for _ in range(2):
        for name in LOSSES:
            assert all(map(torch.equal, gradients(model, LOSSES[name](step(x))), kept[1][name])), name
    assert not copied


def test_a_graph_that_is_retained_and_what_the_user_holds(model: Deep, x: Tensor, step: CompiledBackward) -> None:
    expected = gradients(model, LOSS(step(x)))
    out = step(x)
    loss = LOSS(out)
    held = [t for t in out[0].grad_fn.saved_tensors if t is not None]
    copies = [t.clone() for t in held]
    for _ in range(2):
        assert all(map(torch.equal, gradients(model, loss, retain_graph=True), expected))
    assert all(map(torch.equal, gradients(model, loss), expected))
    assert all(map(torch.equal, held, copies))


def test_nobody_else_reads_what_is_given_up(
    model: Deep, x: Tensor, step: CompiledBackward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte of the residuals is poisoned before the backward, which gets copies in an arena; after it that is too,
    but for the gradients that lie there."""
    expected, take = gradients(model, LOSS(step(x))), arenas.take_joined
    taken: list[tuple[Tensor, Arena]] = []

    def poison(arguments: list[Any], joined: Iterable[Arena]) -> None:
        for arena in joined:
            whole = arguments[arena.first].untyped_storage()
            for member in arena.members:
                arguments[member.number] = arguments[member.number].clone()
            whole.fill_(255)
            take(arguments, [arena])
            taken.append((arguments[arena.first], arena))

    monkeypatch.setattr(bound_function, "take_joined", poison)
    found = gradients(model, LOSS(step(x)))
    placed = step._parts.program.donated("backward_into")[1]
    for whole, arena in taken:
        kept = torch.zeros(arena.size, dtype=torch.bool)
        for place in placed:
            if place.argument == arena.first:
                kept[place.offset : place.offset + place.size] = True
        whole[~kept] = 255
    assert taken
    assert all(map(torch.equal, found, expected))


def test_gradients_keep_little_more_than_themselves(model: Deep, x: Tensor, step: CompiledBackward) -> None:
    gradients(model, LOSS(step(x)))
    found = [p.grad for p in model.parameters() if p.grad is not None]
    shared = step.explain().to_dict()["shared_gradient_bytes"]
    program = step._parts.program
    sizes = {arena.first: arena.size for arena in program.arenas("backward_into")}
    (size,) = {sizes[place.argument] for place in program.donated("backward_into")[1]}
    assert size * 15 / 16 <= shared <= size
    assert "gradients in one storage" in str(step.explain())
    # What is kept or sent elsewhere is the tensor alone.
    assert all(g.untyped_storage().nbytes() == g.nbytes and g._base is None for g in found)
    largest = max(found, key=Tensor.numel)
    for made in (copy.deepcopy(largest), pickle.loads(pickle.dumps(largest))):
        assert torch.equal(made, largest)
        assert made.untyped_storage().nbytes() == largest.nbytes
    torch.save(largest, file := io.BytesIO())
    assert largest.nbytes < len(file.getvalue()) < largest.nbytes + 4096
    # A second backward adds to each of them.
    once = [g.clone() for g in found]
    LOSS(step(x)).backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), once, strict=True) if p.grad is not None)


@pytest.mark.parametrize("is_retained", [False, True])
def test_a_default_device_of_the_users(model: Deep, x: Tensor, step: CompiledBackward, is_retained: bool) -> None:
    """Joined, and as copies where the graph is retained."""
    expected = gradients(model, LOSS(step(x)))
    with torch.device("meta"):
        loss = LOSS(step(x))
        found = gradients(model, loss, retain_graph=is_retained)
    assert all(map(torch.equal, found, expected))


def test_threads(model: Deep, x: Tensor, step: CompiledBackward) -> None:
    expected = torch.autograd.grad(LOSS(step(x)), [*model.parameters()])
    found: list[tuple[Tensor, ...]] = []

    def run() -> None:
        found.extend(torch.autograd.grad(LOSS(step(x)), [*model.parameters()]) for _ in range(5))

    run_in_threads([run] * 3)
    assert len(found) == 15
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, expected, strict=True))


def test_the_gradient_of_an_embedding_is_added_up_in_dead_residuals(copied: list[Arena]) -> None:
    """IREE fills it with zeros, which it may in memory that is imported for that."""
    case = MODELS["language_model"].build(batch=4, tokens=16, width=128, heads=2, layers=1, vocabulary=256)
    model: Any = case.model
    expected = gradients(model, model(*case.args))
    step = retrograd.compile_backward(model, case.args, **GIVEN)
    for _ in range(3):
        found = gradients(model, step(*case.args))
        assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in zip(found, expected, strict=True))
    program = step._parts.program
    (filled,) = program._current().function("backward_into").filled
    assert filled == program.arenas("backward_into")[0].first
    assert any(
        place.argument == filled and place.size == 256 * 128 * 4 for place in program.donated("backward_into")[1]
    )
    assert not copied
    report = step.explain().to_dict()
    assert report["peak_bytes_measured"] == report["peak_bytes_predicted"]


def test_torch_compile(model: Deep, x: Tensor, step: CompiledBackward, copied: list[Arena]) -> None:
    expected = gradients(model, LOSS(step(x)))
    compiled = torch.compile(model, backend="retrograd", options={"partition": "default", "kernels": "off"})
    for _ in range(2):
        found = gradients(model, LOSS(compiled(x)))
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, expected, strict=True))
    # The first backward is compared with torch's, which holds what it takes.
    copied.clear()
    gradients(model, LOSS(compiled(x)))
    assert not copied
