# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which values a call waits for: those that were computed from what a post-accumulate hook may write to, or a call of
FSDP's may free."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.autograd.steps.parameter_reads import finish_reads
from retrograd.frontend.hooks import hook_ops


def test_a_hook_waits_for_what_reads_a_parameter_before_it() -> None:
    def backward(weight: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
        token = hook_ops.create_token()
        other = gradient.sin()
        wanted = gradient @ weight.t()
        largest, place = weight.max(0)
        with hook_ops.declared_results({("post_acc_grad", n): [] for n in range(2)}):
            _, token = hook_ops.call_hook([], token, "post_acc_grad", 0)
            late = weight.cos()
            _, token = hook_ops.call_hook([], token, "post_acc_grad", 1)
        hook_ops.final_callbacks(token)
        return [wanted, other, largest, place, late]

    graph = make_fx(backward, tracing_mode="fake")(torch.ones(3, 3), torch.ones(2, 3)).graph
    weight, _ = graph.find_nodes(op="placeholder")
    finish_reads(graph, [weight])
    hooks: Any = graph.find_nodes(op="call_function", target=torch.ops.retrograd.call_hook.default)
    given = [[str(value.target).rpartition("aten.")[2] for value in hook.args[0]] for hook in hooks]
    assert [values[0] for values in given] == ["mm.default", "cos.default"]
    # Both results of the maximum.
    assert len(given[0]) == 3 and len(given[1]) == 1
    graph.lint()


def test_a_call_that_frees_parameters_waits_for_what_does_not_lead_to_what_it_takes() -> None:
    def backward(weight: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
        token = hook_ops.create_token()
        before = (gradient @ weight.t()).sin()
        alone = gradient * weight[0]
        with hook_ops.declared_results({("post", 0): [], ("backward", 0): [torch.empty(2, 3, device="meta")]}):
            _, token = hook_ops.call_hook([], token, "post", 0)
            (given,), token = hook_ops.call_backward([before], token, 0)
        late = weight.cos()
        hook_ops.final_callbacks(token)
        return [before, alone, given, late]

    graph = make_fx(backward, tracing_mode="fake")(torch.ones(3, 3), torch.ones(2, 3)).graph
    weight, _ = graph.find_nodes(op="placeholder")
    finish_reads(graph, [weight], freeing=[("backward", 0)])
    (hook,) = graph.find_nodes(op="call_function", target=torch.ops.retrograd.call_hook.default)
    (call,) = graph.find_nodes(op="call_function", target=torch.ops.retrograd.call_backward.default)
    assert hook.args[0] == []
    assert [value.target for value in call.args[0]] == [torch.ops.aten.sin.default, torch.ops.aten.mul.Tensor]
    graph.lint()
