# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Runs the graph of a traced backward op by op, in torch: what a compiled one computes, without the compiler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter


def interpret(graph_module: GraphModule, arguments: Sequence[Any], python: Any) -> list[torch.Tensor]:
    """The results of the graph, which calls ``python`` as a compiled backward does."""
    with torch.no_grad():
        return list(_Interpreter(graph_module, python).run(*arguments))


class _Interpreter(Interpreter):
    def __init__(self, graph_module: GraphModule, python: Any) -> None:
        super().__init__(graph_module)
        self._python = python
        self.extra_traceback = False

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        match getattr(target, "_overloadpacket", None):
            case torch.ops.retrograd.create_token:
                return None
            case torch.ops.retrograd.call_hook:
                values, token, kind, number = args
                return self._python.call_hook(kind, number, values), token
            case torch.ops.retrograd.call_backward:
                values, token, number = args
                return self._python.call_backward(number, values), token
            case torch.ops.retrograd.accumulate_grad:
                gradient, token, param = args
                self._python.accumulate_grad(param, gradient, False)
                return token
            case torch.ops.retrograd.final_callbacks:
                return args[0]
        return super().call_function(target, args, kwargs)
