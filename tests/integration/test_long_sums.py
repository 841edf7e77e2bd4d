# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products of long sums, which a CPU computes in pieces: gradients as eager's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrograd
from retrograd.pipelines.analysis.layout.cpu_products import find_pieces
from retrograd.pipelines.devices.targets import find_target
from retrograd.pipelines.toolchain.lowering_steps import lowering_pipeline


class Vocabulary(nn.Module):
    """The gradient of what the head takes is a product whose sums run over the vocabulary."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.body(x))), y)


def test_gradients_through_the_sums_of_a_vocabulary() -> None:
    words = 7001
    model = Vocabulary(288, words)
    x, y = torch.randn(300, 288), torch.randint(words, (300,))
    assert find_pieces(300, words, 288)
    assert "bwd-split-long-products" in lowering_pipeline(find_target("cpu"))
    step = retrograd.compile_backward(model, (x, y))
    exact = Vocabulary(288, words).double()
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    expected = torch.autograd.grad(exact(x.double(), y), list(exact.parameters()))
    eager = torch.autograd.grad(model(x, y), list(model.parameters()))
    for _ in range(2):
        found = torch.autograd.grad(step(x, y), list(model.parameters()))
        for ours, theirs, true in zip(found, eager, expected, strict=True):
            assert (ours - true).norm() <= 2 * (theirs - true).norm() + 1e-7 * true.norm()
