# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How far from eager's values rounding may take those of a compiled graph."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

Tolerance = Callable[[torch.dtype], float]

# Ops that CUDA's libraries compute in TF32 where the user's settings allow it, which for convolutions and recurrent
# layers they do unless told otherwise. Which kernels do is the libraries' choice, by sizes and layouts: of a graph that
# is compiled others may than of the same in eager.
_OF_CUDNN = re.compile(r"conv(?!ert)|rnn|lstm|gru")
_PRODUCTS = re.compile(r"^(|add|b|baddb)mm$|^(|add)mv$|^v?dot$|^matmul$|^linear$|attention")


def find_tolerances(graph: Graph, tolerance_of: Tolerance) -> dict[Node, float]:
    """The relative error that rounding explains, of each value of a graph whose nodes have ``val`` metadata.

    A value is allowed what its own dtype is, and what those are that it is computed from: rounded in bfloat16 elsewhere
    than eager does, under autocast say, they differ by that, whatever they are widened to. What a library may compute
    in TF32 is allowed what float16 is, which has as many digits. Arguments are exact, and so are integers.
    """
    found: dict[Node, float] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        is_tensor = isinstance(value, torch.Tensor)
        own = tolerance_of(value.dtype) if is_tensor and node.op != "placeholder" else 0.0
        if _may_be_tf32(node):
            own = max(own, tolerance_of(torch.float16))
        is_exact = is_tensor and not (value.is_floating_point() or value.is_complex())
        inherited = () if is_exact else (found[source] for source in node.all_input_nodes)
        found[node] = max((own, *inherited))
    return found


def _may_be_tf32(node: Node) -> bool:
    """Whether an op gives float32 on a CUDA device that a library may have multiplied as TF32."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = node.target._schema.name.partition("::")[2]
    allows = (_OF_CUDNN.search(name) and _allows_tf32_in_cudnn()) or (_PRODUCTS.search(name) and _allows_tf32())
    return bool(allows) and any(
        isinstance(leaf, torch.Tensor) and leaf.is_cuda and leaf.dtype is torch.float32
        for leaf in tree_leaves(node.meta.get("val"))
    )


# Not by allow_tf32, which raises where settings were made one by one.
def _allows_tf32_in_cudnn() -> bool:
    cudnn: Any = torch.backends.cudnn
    places = (cudnn.conv, cudnn.rnn, cudnn, torch.backends)
    return "tf32" in [place.fp32_precision for place in places]


def _allows_tf32() -> bool:
    places = (torch.backends.cuda.matmul, torch.backends)
    return "tf32" in [place.fp32_precision for place in places]
