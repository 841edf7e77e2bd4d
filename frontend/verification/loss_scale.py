# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Finds smaller tangents for a backward whose gradients overflow.

A loss is scaled up in float16 (``torch.amp.GradScaler``), by so much that the first gradients mostly overflow, and
whether a sum just does hangs on rounding. What is infinite tells nothing of what is compiled. A backward is linear in
its tangents: smaller ones tell whether it is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from retrograd.frontend.doors.absent_tangents import is_tangent
from retrograd.frontend.hooks.hook_calls import calls_hooks

# By this much tangents are made smaller at once, and a scale of 2^16 twice.
_STEP = 2.0**-8


@dataclass(frozen=True)
class Smaller:
    """Arguments of a backward whose tangents are smaller, and by how much its gradients are larger than theirs."""

    arguments: list[Any]
    factor: float

    def enlarge(self, gradients: Iterable[Any]) -> list[Any]:
        """The gradients for the tangents as they were."""
        return [g * self.factor if _is_float(g) else g for g in gradients]


def make_smaller(module: GraphModule, arguments: Sequence[Any]) -> Smaller | None:
    """The arguments of a backward's graph with smaller tangents. ``None`` where the largest is 1 or less, or infinite,
    and where the graph calls hooks, which need not be linear."""
    nodes = module.graph.find_nodes(op="placeholder")
    tangents = {
        i for i, (node, a) in enumerate(zip(nodes, arguments, strict=False)) if is_tangent(node) and _is_float(a)
    }
    largest = max((float(arguments[i].abs().max()) for i in tangents if arguments[i].numel()), default=0.0)
    if not 1.0 < largest < math.inf or calls_hooks(module.graph):
        return None
    scale = max(_STEP, 2.0 ** -math.ceil(math.log2(largest)))
    return Smaller([a * scale if i in tangents else a for i, a in enumerate(arguments)], 1 / scale)


def are_finite(values: Iterable[Any]) -> bool:
    """Whether no number of these tensors, of distributed ones that this process has, is infinite or NaN."""
    return all(bool(getattr(v, "_local_tensor", v).isfinite().all()) for v in values if _is_float(v))


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
