# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Orders a backward's reads of a parameter before the call that writes to it, or frees its memory.

A post-accumulate hook may step an optimizer, which writes to its parameter in place; FSDP frees what it gathered when a
block has its gradients. Compiled functions read a parameter when they run, and compute moves past calls that do not
need it: so what reads one is given to the next such call, which has to wait for it, as it did in eager.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch

from retrograd.contract.hooks import CUSTOM_BACKWARD, POST_ACCUMULATE


def finish_reads(
    graph: torch.fx.Graph,
    written: Collection[torch.fx.Node],
    inlined: Collection[int] = (),
    freeing: Collection[tuple[str, int]] = (),
) -> None:
    """Have each post-accumulate hook of a traced backward wait for what was computed before it from the placeholders
    ``written``; not those of the numbers ``inlined``, which are part of the graph and say what they write to. So do
    the calls of these kinds and numbers that free memory.
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
            if (call := _call_of(node)) is None:
                continue
            if call in freeing:
                # What it takes waits for these already.
                sources = _find_sources(node)
                pending = [reader for reader in pending if reader not in sources]
            elif call[0] != POST_ACCUMULATE or call[1] in inlined:
                continue
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


def _call_of(node: torch.fx.Node) -> tuple[Any, Any] | None:
    """The kind and number of what an op of ours calls in Python."""
    if node.target is torch.ops.retrograd.call_hook.default:
        return node.args[2], node.args[3]
    if node.target is torch.ops.retrograd.call_backward.default:
        return CUSTOM_BACKWARD, node.args[2]
    return None


def _find_sources(node: torch.fx.Node) -> set[torch.fx.Node]:
    """Finds the values that the tensors which an op of ours takes are computed from. The token that it takes is of no
    effect here: it says in which order things were captured, and not what has to come first."""
    found: set[torch.fx.Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        taken = current.args[:1] if _is_ours(current.target) else (current.args, current.kwargs)
        before = [n for n in torch.utils._pytree.tree_leaves(taken) if isinstance(n, torch.fx.Node)]
        pending += [n for n in before if n not in found]
        found.update(before)
    return found


def _is_view(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return any(a.alias_info is not None and not a.alias_info.is_write for a in target._schema.arguments)


def _is_ours(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "retrograd"
