# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``flex_attention``, whose gradients eager computes on a GPU alone: beside the same attention written out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flexible

import retrograd

ROWS = 16


class Attending(nn.Module):
    """Two heads of 8 with a bias that grows with the distance, causal; ``written`` out, or by ``flex_attention``."""

    def __init__(self, *, biased: bool, written: bool) -> None:
        super().__init__()
        self.project, self.slope = nn.Linear(16, 48), nn.Parameter(torch.ones(2))
        self.biased, self.written = biased, written
        self.mask = flexible.create_block_mask(lambda b, h, i, j: i >= j, None, None, ROWS, ROWS, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(2, ROWS, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        output = self.write_out(q, k, v) if self.written else self.attend(q, k, v)
        # A view, as of a result that lies in memory as the query does.
        return output.transpose(1, 2).view(2, ROWS, 16).square().mean()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slope = self.slope

        def score(number: Tensor, _batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return number + slope[head] * (j - i)

        output: Tensor = flexible.flex_attention(
            q, k, v, score_mod=score if self.biased else None, block_mask=self.mask
        )
        return output

    def write_out(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(ROWS)[:, None], torch.arange(ROWS)
        scores = q @ k.transpose(-1, -2) / 8**0.5
        scores = scores + self.slope[:, None, None] * (j - i) * self.biased
        output = scores.masked_fill(i < j, -torch.inf).softmax(-1) @ v
        return output.transpose(1, 2).contiguous().transpose(1, 2)


def compile_whole(model: nn.Module, x: Tensor) -> Callable[[Tensor], Any]:
    return retrograd.compile_backward(model, (x,))


def compile_by_dynamo(model: nn.Module, _x: Tensor) -> Callable[[Tensor], Any]:
    torch._dynamo.reset()
    return torch.compile(model, backend="retrograd")


@pytest.mark.parametrize(("door", "biased"), [(compile_whole, False), (compile_by_dynamo, True)])
def test_its_gradients(door: Callable[..., Any], biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Refuses gradients on a CPU, which eager has no kernel for.
    monkeypatch.setattr(flexible, "_validate_device", lambda *_: None)
    torch.manual_seed(0)
    model, written = Attending(biased=biased, written=False), Attending(biased=biased, written=True)
    written.load_state_dict(model.state_dict())
    x = torch.randn(2, ROWS, 16)
    step = door(model, x)
    step(x).backward()
    written(x).backward()
    torch.testing.assert_close(model.project.weight.grad, written.project.weight.grad)
    if biased:
        torch.testing.assert_close(model.slope.grad, written.slope.grad)
