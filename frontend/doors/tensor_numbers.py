# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Numbers of Python's that Dynamo hands to a graph as tensors without axes: what ``random.random()`` gives, say.

It captures with a tensor of the default dtype, and calls with one of float64, the number as Python has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def taking_numbers(
    call: Callable[..., Any], graph_module: torch.fx.GraphModule, examples: Sequence[Any]
) -> Callable[..., Any]:
    """``call``, which is given such numbers in the dtypes that they were captured in."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    dtypes = {
        place: example.dtype
        for place, (node, example) in enumerate(zip(placeholders, examples, strict=True))
        if isinstance(example, Tensor) and getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False)
    }
    if not dtypes:
        return call

    def run(*arguments: Any) -> Any:
        given = [*arguments]
        for place, dtype in dtypes.items():
            given[place] = given[place].to(dtype)
        return call(*given)

    return run
