# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A mixture of experts, sorted and counted and multiplied group by group, compiled without islands."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from transformers.integrations import moe

import retrograd

EXPERTS = 4


class Mixture(nn.Module):
    """Each row through the expert that it likes best; the rows are sorted by it, as libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = torch.softmax(self.gate(x), -1).max(-1)
        sorted_ids, order = torch.sort(chosen)
        counts = torch.histc(sorted_ids.float(), EXPERTS, 0, EXPERTS - 1)
        offsets = torch.cumsum(counts, 0).to(torch.int32)
        rows = moe._grouped_mm(x[order], self.experts, offsets) * best[order].unsqueeze(-1)
        return torch.zeros_like(rows).index_add(0, order, rows)


def test_a_mixture_of_experts_is_compiled_whole() -> None:
    torch.manual_seed(0)
    model = Mixture()
    with warnings.catch_warnings():
        warnings.simplefilter("error", retrograd.EagerIslandWarning)
        step = retrograd.compile_backward(model, (torch.randn(16, 8),))
    # Other rows choose other experts; of the last ones, all the same.
    for x in (torch.randn(16, 8), torch.randn(16, 8), torch.randn(1, 8).expand(16, 8).contiguous()):
        found, expected = (
            torch.autograd.grad(call(x).square().sum(), tuple(model.parameters())) for call in (step, model)
        )
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
