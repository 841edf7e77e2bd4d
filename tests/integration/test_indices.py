# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Indices that are out of range are refused, as in eager, before compiled code reads or writes what is not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrograd

TOKENS, LABELS = torch.tensor([[1, 2, 10], [0, 3, 4]]), torch.tensor([[2, 10, -100], [3, 4, 0]])


class Bigrams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 11)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.table(tokens).flatten(0, 1), labels.flatten())


@pytest.fixture(scope="module")
def model() -> Bigrams:
    torch.manual_seed(0)
    return Bigrams()


def check(call: Callable[..., Tensor], model: Bigrams, kind: type[Exception]) -> None:
    (found,) = torch.autograd.grad(call(TOKENS, LABELS), list(model.parameters()))
    (expected,) = torch.autograd.grad(model(TOKENS, LABELS), list(model.parameters()))
    torch.testing.assert_close(found, expected)
    for wrong in (11, -1, 10**9):
        with pytest.raises(kind, match=rf"the index {wrong} is out of range: from 0 to 10$"):
            call(TOKENS.clone().fill_(wrong), LABELS)
        with pytest.raises(kind, match=rf"the index {wrong} is out of range: from 0 to 10, or -100"):
            call(TOKENS, torch.cat([LABELS[:1], LABELS[1:].clone().fill_(wrong)]))


def test_compiled_and_loaded(model: Bigrams, tmp_path: Path) -> None:
    step = retrograd.compile_backward(model, (TOKENS, LABELS), portable=True)
    check(step, model, retrograd.ArgumentError)
    step.save(tmp_path / "model.vmfb")
    check(retrograd.load(tmp_path / "model.vmfb", model), model, retrograd.ArgumentError)
    with pytest.raises(retrograd.ArgumentError, match=r"args\[1\]: the index 11"):
        step(TOKENS, LABELS + 1)


def test_torch_compile(model: Bigrams) -> None:
    torch.compiler.reset()
    check(torch.compile(model, backend="retrograd"), model, IndexError)
    with torch.no_grad():
        torch.compiler.reset()
        call = torch.compile(model, backend="retrograd")
        torch.testing.assert_close(call(TOKENS, LABELS), model(TOKENS, LABELS))
        with pytest.raises(IndexError, match="the index 12 is out of range"):
            call(TOKENS.clone().fill_(12), LABELS)
