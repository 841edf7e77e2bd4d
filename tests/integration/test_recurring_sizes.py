# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Graphs of open sizes under ``torch.compile`` on CUDA: sizes that come again are compiled for, others run in eager.
Here a CPU is taken for a device."""

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

import retrograd
from retrograd.frontend.doors import dynamo, recurring_sizes


def test_sizes_that_come_again_are_compiled_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dynamo, "_are_on_cuda", lambda _inputs: True)
    monkeypatch.setattr(recurring_sizes, "MOST_SIZES", 1)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="retrograd")
    with caplog.at_level(logging.WARNING, "retrograd"):
        for rows in (3, 4, 5, 5, 4, 5, 5, 4, 6, 4):
            x = torch.randn(rows, 8)
            for call in (compiled, eager):
                # The size is a number of the graph, too.
                (call(x).square().sum() / x.shape[0]).backward()
            for ours, theirs in zip(
                (*model.parameters(), *model.buffers()), (*eager.parameters(), *eager.buffers()), strict=True
            ):
                torch.testing.assert_close(ours, theirs)
                torch.testing.assert_close(ours.grad, theirs.grad)
    told = [record.getMessage() for record in caplog.records if record.name.startswith("retrograd.frontend.doors")]
    # Of 4 rows there is a third time as well, when one size was compiled for already.
    assert [message.partition(",")[0] for message in told] == ["sizes are open", "compiling for the sizes 5"]


def test_what_cannot_be_compiled_goes_on_in_eager(caplog: pytest.LogCaptureFixture) -> None:
    graph = torch.fx.Graph()
    graph.output((graph.call_function(torch.sin, (graph.placeholder("x"),)),))
    module = torch.fx.GraphModule(nn.Module(), graph)

    def refuse(_module: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        raise ValueError("not this one")

    call = recurring_sizes.RecurringSizes(module, [torch.ones(2)], refuse)
    with caplog.at_level(logging.WARNING, "retrograd"):
        for _ in range(recurring_sizes.COMINGS + 1):
            assert torch.equal(call(torch.ones(2))[0], torch.ones(2).sin())
    assert sum("run in eager: not compiled for the sizes" in record.getMessage() for record in caplog.records) == 1


def test_who_leaves_sizes_open_on_cuda_is_told(caplog: pytest.LogCaptureFixture) -> None:
    sizes = ({0: torch.export.Dim("rows", min=2, max=64)},)
    with caplog.at_level(logging.WARNING, "retrograd"):
        for target in ("cpu", "cuda:sm_90"):
            retrograd.compile_backward(
                nn.Tanh(), (torch.randn(4, requires_grad=True),), target=target, dynamic_shapes=sizes
            )
    assert [r.getMessage().partition(",")[0] for r in caplog.records if "CUDA" in r.getMessage()] == ["sizes are open"]
