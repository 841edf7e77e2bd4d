# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Graphs of Dynamo's with streams of their own are left to eager."""

import logging
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from retrograd.frontend.doors.dynamo import compile_with_dynamo


def refuse(_captured: Any) -> Any:
    raise AssertionError("nothing is compiled")


def test_a_tensor_that_is_recorded_for_a_stream(caplog: pytest.LogCaptureFixture) -> None:
    graph = Graph()
    x, stream = graph.placeholder("x"), graph.placeholder("stream")
    y = graph.call_function(torch.sin, (x,))
    graph.call_method("record_stream", (y, stream))
    graph.output((y,))
    module = GraphModule(torch.nn.Module(), graph)
    with caplog.at_level(logging.WARNING, "retrograd"):
        call = compile_with_dynamo(module, [torch.ones(2)], refuse)
    assert call == module.forward
    assert "run in eager: a tensor is recorded for another stream" in caplog.text
