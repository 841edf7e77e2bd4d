# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Activation checkpointing and marked values: what is recomputed and saved, with eager's gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import retrograd
import retrograd.build


class Block(nn.Module):
    def __init__(self, mark: bool, dropout: float) -> None:
        super().__init__()
        self.wide, self.narrow, self.dropout, self.mark = nn.Linear(6, 12), nn.Linear(12, 6), nn.Dropout(dropout), mark

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.wide(x))
        if self.mark:
            hidden = retrograd.save(hidden, "hidden")
        out: Tensor = self.dropout(torch.sin(self.narrow(hidden)))
        return out


class Checkpointed(nn.Module):
    """Two blocks under a checkpoint each, with nothing between them."""

    def __init__(self, *, mark: bool = False, dropout: float = 0.0, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(mark, dropout) for _ in range(2))
        self.options = {"use_reentrant": False, **options}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, **self.options)
        return x.cos()


def policy(action: CheckpointPolicy) -> Callable[[], Any]:
    """Products are saved, of the rest each op is treated like this."""

    def choose(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else action

    return lambda: create_selective_checkpoint_contexts(choose)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "selective": {"context_fn": policy(CheckpointPolicy.MUST_RECOMPUTE)},
    "marked": {"mark": True},
}
# Bytes: what crosses between the blocks (x is an argument), the four products, the boundary with both hidden values.
SAVED = {"plain": 4 * 3 * 6, "selective": 4 * 3 * 36, "marked": 4 * 3 * (6 + 24)}


def argument() -> Tensor:
    return torch.randn(3, 6, requires_grad=True)


def assert_eager(call: Callable[..., Tensor], model: nn.Module) -> None:
    x = argument()
    inputs = [x, *model.parameters()]
    found, expected = (torch.autograd.grad(f(x).square().sum(), inputs) for f in (call, model))
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm() / b.norm()) <= 2e-5


@pytest.mark.short_cases("plain-budget", "marked-default", "selective-min-cut")
@pytest.mark.parametrize("partition", ["default", "min-cut", "budget"])
@pytest.mark.parametrize("case", CASES)
def test_compile_backward(case: str, partition: Any) -> None:
    model = Checkpointed(**CASES[case])
    budget = 1.5 if partition == "budget" else None
    step = retrograd.compile_backward(model, (argument(),), partition=partition, memory_budget=budget, verify=True)
    assert_eager(step, model)
    report = step.explain().to_dict()
    assert report["saved_bytes"] == SAVED[case]
    assert ("tanh" in report["recomputed"]) == (case != "marked")
    assert ("mm" in report["recomputed"]) == (case == "plain")


@pytest.mark.short_cases("marked")
@pytest.mark.parametrize("case", CASES)
def test_torch_compile(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    saved: list[int] = []
    build = retrograd.build.build

    def spy(*args: Any, **named: Any) -> Any:
        built = build(*args, **named)
        saved.append(built.staged.partition["saved_bytes"])
        return built

    monkeypatch.setattr(retrograd.build, "build", spy)
    model = Checkpointed(**CASES[case])
    assert_eager(torch.compile(model, backend="retrograd", dynamic=False), model)
    assert saved == [SAVED[case]]


@pytest.mark.long
def test_a_mask_in_a_block_is_the_same_again() -> None:
    model = Checkpointed(dropout=0.5)
    # The first call compares gradients with those of the traced graph, run op by op from the same seed.
    step = retrograd.compile_backward(model, (argument(),), verify=True)
    step(argument()).square().sum().backward()
    assert step.explain().to_dict()["saved_bytes"] == SAVED["plain"]


def test_a_mark_is_the_identity_in_eager() -> None:
    x = torch.randn(3, 4, requires_grad=True).t()
    marked = retrograd.save(x, "x")
    assert marked.data_ptr() == x.data_ptr()
    assert (marked.shape, marked.stride()) == (x.shape, x.stride())
    (gradient,) = torch.autograd.grad((marked * 3).sum(), x)
    assert gradient.eq(3).all()
    wrong: Any
    for wrong in ((1.0, "x"), (x, 3)):
        with pytest.raises(TypeError, match="takes a tensor and a name"):
            retrograd.save(*wrong)


def test_what_is_written_to_after_the_mark_is_saved_as_it_was() -> None:
    class Written(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kept = retrograd.save(torch.exp(x), "kept")
            out = kept * kept
            return out + kept.clone().mul_(2)

    assert_eager(retrograd.compile_backward(Written(), (argument(),), verify=True), Written())


def test_contradictions_name_the_line() -> None:
    model = Checkpointed(mark=True, context_fn=policy(CheckpointPolicy.MUST_RECOMPUTE))
    with pytest.raises(retrograd.PipelineError, match="it must be recomputed, and its result must be saved") as caught:
        retrograd.compile_backward(model, (argument(),))
    assert "test_checkpoint.py" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"use_reentrant": True},
            r"a reentrant checkpoint .* cannot be traced, at .*test_checkpoint.py.*\n.*\n.*use_reentrant=False",
        ),
        (
            {"context_fn": policy(CheckpointPolicy.MUST_CPU_OFFLOAD)},
            r"MUST_CPU_OFFLOAD is not supported, at .*test_checkpoint.py.*\n.*use MUST_SAVE",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(retrograd.CaptureError, match=message):
        retrograd.compile_backward(Checkpointed(**options), (argument(),))
    assert torch_checkpoint.CheckpointFunction.__name__ == "CheckpointFunction", "torch is as it was"
