# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Checks what is ours in compiled autograd's tracer."""

from __future__ import annotations

import torch

from retrograd.frontend.autograd.tracing.compiler import bring_to


def test_what_waits_on_another_device_is_copied() -> None:
    graph = torch.fx.Graph()
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    proxies = [torch.fx.Proxy(graph.placeholder(name), tracer) for name in ("here", "away")]
    tensors = [torch.empty(2), torch.empty(2, device="meta")]
    here, away = bring_to([torch.device("cpu")] * 2, tensors, proxies)
    assert here is proxies[0]
    assert away.node.target is torch.ops.aten._to_copy.default
    assert away.node.args == (proxies[1].node,)
    assert away.node.kwargs == {"device": torch.device("cpu")}
