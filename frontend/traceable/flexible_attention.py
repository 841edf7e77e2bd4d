# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``flex_attention``, traced as PyTorch computes it outside of ``torch.compile``: all scores, changed and masked by the
functions that the user gives, and their softmax. Its memory is quadratic in the sequence, as it is in eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention, math_attention
from torch.fx.experimental.proxy_tensor import get_proxy_mode


def is_flexible(func: Callable[..., Any]) -> bool:
    """Whether a trace comes to ``flex_attention`` as an op, which has no lowering but Inductor's."""
    return func is flex_attention and get_proxy_mode() is not None


def attend_flexibly(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The op's results by ops that are traced: the output, which lies in memory as the query does, the log-sum-exp of
    each row and its largest score."""
    query: Tensor = args[0]
    output, sums, largest = math_attention(*args, **kwargs)
    # The axes of the query, from the one whose elements lie furthest apart.
    strides = query.stride()
    order = sorted(range(query.dim()), key=lambda axis: -strides[axis])
    if order[-1] != query.dim() - 1:
        order = [*(axis for axis in order if axis != query.dim() - 1), query.dim() - 1]
    inverse = [order.index(axis) for axis in range(query.dim())]
    return output.permute(order).contiguous().permute(inverse), sums, largest
