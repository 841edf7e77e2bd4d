# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The first run of a captured backward: eagerly, while what opaque calls give is recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import _C
from torch._dynamo.compiled_autograd import Op
from torch._dynamo.external_utils import (
    FakeCompiledAutogradEngine,
    call_accumulate_grad,
    call_backward,
    call_hook,
)

from retrograd.frontend.autograd.python_calls import accumulate_into, call_user_hook, final_callbacks
from retrograd.frontend.hook_ops import BACKWARD

# The kind of each hook in the graph, by what compiled autograd calls it.
HOOK_KINDS = {
    "tensor_pre_hook": "tensor_pre",
    "pre_hook": "pre",
    "post_hook": "post",
    "post_acc_grad_hook": "post_acc_grad",
    "unpack_hook": "unpack",
}
_REPLACED = {
    call_hook: call_user_hook,
    call_accumulate_grad: accumulate_into,
    FakeCompiledAutogradEngine._exec_final_callbacks_stub: final_callbacks,
}


def make_runnable(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Put eager's own behaviour in the place of compiled autograd's helpers; the graph then runs as eager does."""
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node.target in _REPLACED:
            node.target = _REPLACED[node.target]
    graph_module.recompile()
    return graph_module


def opaque_kind(node: torch.fx.Node) -> str | None:
    """The kind of Python call that a node is; None where it can be traced."""
    if node.op != "call_function":
        return None
    if node.target is call_user_hook:
        return HOOK_KINDS[str(node.kwargs["hook_type"])]
    if node.target is _C._dynamo.compiled_autograd.call_cpp_tensor_pre_hooks:
        return "cpp_tensor_pre"
    custom = isinstance(node.target, Op) and node.target.is_custom_function
    return BACKWARD if node.target is call_backward or custom else None


class Recorder(torch.fx.Interpreter):
    """Runs a captured backward on real tensors, as it would have run in eager mode.

    ``results`` has, for each opaque call by its node, what it gave: tensors as meta tensors of their strides.
    """

    def __init__(self, graph_module: torch.fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.results: dict[str, Any] = {}
        # Errors of the user's hooks are theirs as they are.
        self.extra_traceback = False

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if opaque_kind(n) is not None:
            self.results[n.name] = torch.utils._pytree.tree_map(_describe, result)
        return result


def _describe(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
