# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Find the arguments of which a model overwrites a part.

Where an argument's elements are one in memory, as those of ``x.expand(3, 4)`` are, eager sees a write to one of its
rows in all of them. A traced graph has tensors with no memory, and sees it in one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten

# What functionalization makes of a write to a view.
_WRITES = {
    aten.select_scatter,
    aten.slice_scatter,
    aten.diagonal_scatter,
    aten.as_strided_scatter,
    aten.unfold_backward,
}


def find_partly_written(graph: Graph, mutated: Sequence[int]) -> tuple[int, ...]:
    """Those of the arguments ``mutated`` of a traced graph, by number, whose values a write to a part may go into."""
    placeholders = graph.find_nodes(op="placeholder")
    return tuple(number for number in mutated if _meets_write(placeholders[number]))


def _meets_write(argument: Node) -> bool:
    seen, waiting = {argument}, [argument]
    while waiting:
        for user in waiting.pop().users:
            # The op that was decomposed, if any was.
            op = user.meta.get("original_aten") or user.target
            if getattr(op, "overloadpacket", None) in _WRITES:
                return True
            if user not in seen:
                seen.add(user)
                waiting.append(user)
    return False
