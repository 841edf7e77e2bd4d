# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Gives zeros to what only the branch of ``torch.cond`` that is not taken reads, as eager does: an optimizer updates a
parameter whose gradient is zero, by its momentum say, and leaves one without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


class _Tied(torch.autograd.Function):
    """Gives its first argument, whose gradient is passed on; the others get zeros."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *others: Tensor) -> Tensor:
        """``value`` as it is."""
        ctx.save_for_backward(*others)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The gradient, and zeros."""
        return gradients[0], *(torch.zeros_like(other) for other in ctx.saved_tensors)


class _Reads(TorchFunctionMode):
    """Collects the tensors that require grad and that code reads, but for those that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[int, Tensor] = {}
        # Alive, so that no other tensor has their ids.
        self._made: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and id(value) not in self._made and value.requires_grad:
                self.read[id(value)] = value
        results = func(*args, **(kwargs or {}))
        self._made |= {id(value): value for value in tree_leaves(results) if isinstance(value, Tensor)}
        return results


def with_zero_gradients(taken: Callable[[], Any], left: Callable[[], Any]) -> Any:
    """Run the branch that is ``taken``; tensors that only the one which is ``left`` reads get gradients of zeros."""
    own, other = _Reads(), _Reads()
    with own:
        results = taken()
    values, spec = tree_flatten(results)
    place = next((i for i, v in enumerate(values) if isinstance(v, Tensor) and v.is_floating_point()), None)
    if place is None or not torch.is_grad_enabled():
        return results
    with other:
        left()
    tensors = [tensor for key, tensor in other.read.items() if key not in own.read]
    if tensors:
        values[place] = _Tied.apply(values[place], *tensors)  # type: ignore[no-untyped-call]
    return tree_unflatten(values, spec)
