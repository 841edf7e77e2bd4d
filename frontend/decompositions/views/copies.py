# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Views that are copied at once: the view, and a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from retrograd.frontend.decompositions.entry import Decomposition

aten = torch.ops.aten


def copied(view: OpOverload) -> Callable[..., Any]:
    """``view`` with each tensor that it gives copied."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map_only(
            Tensor, lambda t: t.clone(memory_format=torch.contiguous_format), view(*args, **kwargs)
        )

    return function


_MISSING = "torch-mlir has no lowering for the op that copies"

ENTRIES = tuple(
    Decomposition(copy, copied(view), _MISSING)
    for copy, view in (
        (aten.alias_copy.default, aten.alias.default),
        (aten.as_strided_copy.default, aten.as_strided.default),
        (aten.detach_copy.default, aten.detach.default),
        (aten.diagonal_copy.default, aten.diagonal.default),
        (aten.expand_copy.default, aten.expand.default),
        (aten.permute_copy.default, aten.permute.default),
        (aten.select_copy.int, aten.select.int),
        (aten.slice_copy.Tensor, aten.slice.Tensor),
        (aten.split_copy.Tensor, aten.split.Tensor),
        (aten.split_with_sizes_copy.default, aten.split_with_sizes.default),
        (aten.squeeze_copy.default, aten.squeeze.default),
        (aten.squeeze_copy.dim, aten.squeeze.dim),
        (aten.squeeze_copy.dims, aten.squeeze.dims),
        (aten.t_copy.default, aten.t.default),
        (aten.transpose_copy.int, aten.transpose.int),
        (aten.unbind_copy.int, aten.unbind.int),
        (aten.unfold_copy.default, aten.unfold.default),
        (aten.unsqueeze_copy.default, aten.unsqueeze.default),
        (aten.view_copy.default, aten.view.default),
    )
)
