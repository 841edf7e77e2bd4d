# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Orders a backward's reads of a parameter before the hook that writes to it.

A post-accumulate hook may step an optimizer, which writes to its parameter in place. Compiled functions read a
parameter when they run, and compute moves past hooks that do not need it: so what reads one is given to the next such
hook, which has to wait for it, as it did in eager.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch

from retrograd.contract.hooks import POST_ACCUMULATE


def finish_reads(graph: torch.fx.Graph, written: Collection[torch.fx.Node], inlined: Collection[int] = ()) -> None:
    """Have each post-accumulate hook of a traced backward wait for what was computed before it from the placeholders
    ``written``; not those of the numbers ``inlined``, which are part of the graph and say what they write to.
    """
    views = set(written)
    several: set[torch.fx.Node] = set()
    pending: list[torch.fx.Node] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if _is_ours(node.target):
            # What an effect takes is there by then.
            pending = [reader for reader in pending if reader not in node.all_input_nodes]
            if node.target is torch.ops.retrograd.call_hook.default and _may_write(node, inlined):
                values, *rest = node.args
                node.args = ([*values, *pending], *rest)
                pending = []
        elif node.target is operator.getitem and node.args[0] in several:
            pending.append(node)
        elif not views.isdisjoint(node.all_input_nodes):
            if _is_view(node.target):
                views.add(node)
            elif isinstance(node.meta.get("val"), torch.Tensor):
                pending.append(node)
            else:
                several.add(node)


def _may_write(call: torch.fx.Node, inlined: Collection[int]) -> bool:
    _, _, kind, number = call.args
    return kind == POST_ACCUMULATE and number not in inlined


def _is_view(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return any(a.alias_info is not None and not a.alias_info.is_write for a in target._schema.arguments)


def _is_ours(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "retrograd"
