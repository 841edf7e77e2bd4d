# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Ops that do the same to the real and to the imaginary part: views, copies, sums, what moves or joins elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from retrograd.frontend.complex_numbers.pair import REAL_DTYPES, Pair, parts

aten, prims = torch.ops.aten, torch.ops.prims


def apply_partwise(op: OpOverload, places: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    """``op`` of the real parts and of the imaginary ones: of the arguments at ``places``, where it takes numbers or
    tensors of them. Of a real one among these, the imaginary part is zero. Other arguments say what the result is like,
    and their real parts do."""
    dtype = kwargs.get("dtype")
    if isinstance(dtype, torch.dtype):
        kwargs = {**kwargs, "dtype": REAL_DTYPES.get(dtype, dtype)}
    results = [op(*_part(args, places, which), **_part((kwargs,), (), which)[0]) for which in (0, 1)]
    return pytree.tree_map(Pair, *results)


def _part(args: Sequence[Any], places: Sequence[int], which: int) -> list[Any]:
    def take(value: Any, split: bool) -> Any:
        if isinstance(value, (Pair, Tensor, complex, float, int)) and not isinstance(value, bool) and split:
            return parts(value)[which]
        return value.re if isinstance(value, Pair) else value

    return [
        pytree.tree_map(partial(take, split=i in places), a, is_leaf=lambda x: isinstance(x, Pair))
        for i, a in enumerate(args)
    ]


_FIRST = (
    *(aten.view.default, aten._unsafe_view.default, aten.permute.default, aten.transpose.int, aten.t.default),
    *(aten.expand.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
    *(aten.slice.Tensor, aten.select.int, aten.alias.default, aten.detach.default, aten.clone.default),
    *(aten.lift_fresh_copy.default, aten.neg.default, aten.sum.default, aten.sum.dim_IntList, aten.mean.default),
    *(aten.mean.dim, aten.cumsum.default, aten.flip.default, aten.roll.default, aten.repeat.default),
    *(aten.index.Tensor, aten.index_select.default, aten.gather.default, aten.embedding.default),
    *(aten.unfold.default, aten.diagonal.default, aten.diag_embed.default, aten.tril.default, aten.triu.default),
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.im2col.default, aten.col2im.default),
    *(aten.select_backward.default, aten.slice_backward.default, aten.diagonal_backward.default),
    *(aten.cat.default, aten.stack.default, aten.scalar_tensor.default, aten.trace.default),
    *(prims.squeeze.default, prims.split_dim.default, prims.collapse.default, prims.collapse_view.default),
    *(prims.view_of.default, prims.transpose.default, prims.broadcast_in_dim.default, prims.device_put.default),
)
_MORE: dict[OpOverload, tuple[int, ...]] = {
    aten.constant_pad_nd.default: (0, 2),
    aten.slice_scatter.default: (0, 1),
    aten.select_scatter.default: (0, 1),
    aten.diagonal_scatter.default: (0, 1),
    aten.copy.default: (0, 1),
    aten.where.self: (1, 2),
    aten.index_put.default: (0, 2),
    aten.index_add.default: (0, 3),
    aten.scatter.src: (0, 3),
    aten.scatter.value: (0, 3),
    aten.scatter_add.default: (0, 3),
    aten.masked_fill.Scalar: (0, 2),
    aten.masked_fill.Tensor: (0, 2),
    aten.full.default: (1,),
    aten.full_like.default: (1,),
    aten.new_full.default: (2,),
    aten.fill.Scalar: (1,),
    aten.fill.Tensor: (1,),
    aten.zeros.default: (),
    aten.zeros_like.default: (),
    aten.new_zeros.default: (),
    aten.empty.memory_format: (),
    aten.empty_like.default: (),
    aten.empty_strided.default: (),
    aten.new_empty.default: (),
    aten.new_empty_strided.default: (),
}

RULES: dict[OpOverload, Callable[..., Any]] = {
    op: partial(apply_partwise, op, places) for op, places in (dict.fromkeys(_FIRST, (0,)) | _MORE).items()
}
