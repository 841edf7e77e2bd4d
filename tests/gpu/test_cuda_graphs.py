# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Halves that are replayed as CUDA graphs: the same training as without, and memory that stays as it is."""

from typing import Any

import pytest
import torch
from models.case import Case
from steps import on_device, require_device
from torch import Tensor, nn

import retrograd
from retrograd.runtime.steps.compiled import CompiledBackward


def setup_module() -> None:
    require_device()


def make(name: str) -> tuple[Case, CompiledBackward]:
    case = on_device(name)
    return case, retrograd.compile_backward(case.model, case.args, cuda_graphs=True)


def module(case: Case) -> nn.Module:
    assert isinstance(case.model, nn.Module)
    return case.model


def inputs(case: Case) -> tuple[Any, ...]:
    """Arguments with other numbers: what is no number of its own stays."""
    return tuple(
        torch.randn_like(a).requires_grad_(a.requires_grad) if isinstance(a, Tensor) and a.is_floating_point() else a
        for a in case.args
    )


def train(case: Case, call: Any, steps: int, accumulate: int = 1) -> list[Tensor]:
    """Losses of training by SGD on other inputs at each step; the model is as it was in the end."""
    model = module(case)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            loss = case.loss(call(*inputs(case)))
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    model.load_state_dict(state)
    return losses


def replays(compiled: CompiledBackward) -> list[int]:
    return [call.replays for _, call in compiled._parts.captured]


@pytest.mark.parametrize("name", ["mlp", "transformer", "language_model", "resnet18"])
def test_training_is_the_same(name: str) -> None:
    case, compiled = make(name)
    plain = retrograd.compile_backward(case.model, case.args)
    found, expected = train(case, compiled, 12), train(case, plain, 12)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert min(replays(compiled)) >= 6
    assert all("captured" in line for line in compiled.explain().to_dict()["cuda_graphs"])


@pytest.mark.parametrize("name", ["mlp", "resnet18"])
def test_training_is_the_same_where_the_host_is_timed(name: str) -> None:
    """Whether it is captured hangs on who else has the device."""
    case = on_device(name)
    timed = retrograd.compile_backward(case.model, case.args, cuda_graphs="auto")
    plain = retrograd.compile_backward(case.model, case.args)
    found, expected = train(case, timed, 14), train(case, plain, 14)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for (_, call), line in zip(timed._parts.captured, timed.explain().to_dict()["cuda_graphs"], strict=True):
        assert call.replays >= 6 or "the device is busy" in line


def test_gradients_that_add_up() -> None:
    case, compiled = make("mlp")
    plain = retrograd.compile_backward(case.model, case.args)
    found, expected = train(case, compiled, 8, accumulate=3), train(case, plain, 8, accumulate=3)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert min(replays(compiled)) >= 3


def test_two_forwards_before_their_backwards() -> None:
    case, compiled = make("transformer")
    plain = retrograd.compile_backward(case.model, case.args)
    train(case, compiled, 6)
    gradients = []
    for call in (compiled, plain):
        module(case).zero_grad()
        torch.manual_seed(3)
        losses = [case.loss(call(*inputs(case))) for _ in range(3)]
        for loss in reversed(losses):
            loss.backward()
        gradients.append([p.grad.clone() for p in module(case).parameters() if p.grad is not None])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-5)


def test_memory_stays_as_it_is() -> None:
    case, compiled = make("transformer")
    train(case, compiled, 8)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    train(case, compiled, 200)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_under_torch_compile() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).cuda()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="retrograd", mode="reduce-overhead")
    for _ in range(8):
        x = torch.randn(16, 32, device="cuda")
        model.zero_grad()
        compiled(x).square().mean().backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        model(x).square().mean().backward()
        torch.testing.assert_close(found, [p.grad for p in model.parameters()], rtol=1e-4, atol=1e-6)
