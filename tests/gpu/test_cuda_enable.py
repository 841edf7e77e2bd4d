# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``retrograd.enable()`` and ``torch.compile(backend="retrograd")`` on CUDA tensors."""

import threading
from typing import Any

import pytest
import torch
from steps import relative_error, require_device
from test_hooks_in_models import Explained
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograd
from retrograd.frontend.autograd.steps.history import Recompile


def setup_module() -> None:
    require_device()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)).cuda()


def train(model: nn.Module, steps: int, seen: list[float]) -> list[Tensor]:
    """Parameters after some steps; a hook on the activations and one after an accumulation are called in each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.get_parameter("0.weight")
    handle = weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm())))
    for i in range(steps):
        optimizer.zero_grad()
        y = model(torch.randn(4, 6, generator=torch.Generator().manual_seed(i)).cuda())
        y.register_hook(lambda gradient: gradient * 2)
        y.pow(2).sum().backward()
        optimizer.step()
    handle.remove()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("graphs", [False, True])
def test_hooks_of_a_program_that_is_compiled_ahead(graphs: bool) -> None:
    """Of modules and of tensors; a program that calls some is in no CUDA graph."""
    torch.manual_seed(0)
    model, expected = Explained().to("cuda"), Explained().to("cuda")
    expected.load_state_dict(model.state_dict())
    calls: list[Tensor] = []

    def double(_: nn.Module, before: Any, after: Any) -> tuple[Tensor]:
        calls.append(before[0])
        return (before[0] * 2,)

    for each in (model, expected):
        each.second.register_full_backward_hook(double)
    compiled = retrograd.compile_backward(model, (torch.randn(4, 6).cuda(),), cuda_graphs=graphs)
    for seed in range(4):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).cuda()
        for call in (compiled, expected):
            call(x).square().sum().backward()
    assert model.calls == expected.calls == 4
    assert len(calls) == 8
    for ours, eager in zip(calls[::2], calls[1::2], strict=True):
        assert relative_error(ours, eager) < 1e-5
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert relative_error(p.grad, q.grad) < 1e-5


def test_every_backward_runs_on_the_device_of_its_tensors() -> None:
    before = len(retrograd.explain_recompiles())
    expected_calls: list[float] = []
    calls: list[float] = []
    expected = train(make_model(), 4, expected_calls)
    with retrograd.enable():
        found = train(make_model(), 4, calls)
    told: list[Recompile] = retrograd.explain_recompiles()[before:]
    assert [entry.outcome for entry in told] == ["compiled"], told
    assert calls == pytest.approx(expected_calls, rel=1e-4)
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) < 1e-4


def test_dynamo() -> None:
    model, x = make_model(), torch.randn(4, 6, device="cuda")
    compiled = torch.compile(model, backend="retrograd")
    found, expected = (torch.autograd.grad(call(x).pow(2).sum(), [*model.parameters()]) for call in (compiled, model))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.device == theirs.device and relative_error(ours, theirs) < 1e-5


def test_reentrant_checkpoints_inside_one_another_do_not_wait_for_themselves() -> None:
    """On CUDA PyTorch runs a backward inside a backward in a thread of the device."""
    model = make_model()
    x: Any = torch.randn(4, 6, device="cuda", requires_grad=True)

    def inner(y: Tensor) -> Tensor:
        result: Tensor = checkpoint(model, y, use_reentrant=True)
        return result

    def run() -> None:
        for _ in range(3):
            y: Tensor = checkpoint(inner, x, use_reentrant=True)
            with retrograd.enable():
                y.pow(2).sum().backward()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(300)
    assert not thread.is_alive()
    found, x.grad = x.grad, None
    for _ in range(3):
        checkpoint(inner, x, use_reentrant=True).pow(2).sum().backward()
    assert found is not None and x.grad is not None
    assert relative_error(found, x.grad) < 1e-5
