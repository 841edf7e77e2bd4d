# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tell why a backward runs in eager, and what its arguments ask for."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from retrograd.frontend.autograd.engine.engine_order import name_of


def name_rank(error: Exception) -> None:
    """Say on an error which of several processes it was raised in: all write to one terminal, and those that wait for
    this one fail as well."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
        error.add_note(f"in a backward under retrograd.enable(), in the process of rank {rank} of {count}")


def why_eager(is_nested: bool, create_graph: bool, gradients: Sequence[Any] | None) -> str | None:
    """Why a backward is left to PyTorch's engine; None where it is not."""
    if is_nested:
        return "it runs inside of another backward"
    if create_graph:
        return "it makes a graph of its own, for gradients of gradients (create_graph=True)"
    if torch.is_anomaly_enabled():
        return "anomaly mode is on"
    if torch._C._len_torch_dispatch_stack():
        modes = ", ".join(type(mode).__name__ for mode in _get_current_dispatch_mode_stack())
        return f"{modes} is open, which is to see each op"
    if _is_transformed(gradients):
        return "it is part of a transform, such as vmap or is_grads_batched"
    return None


def _is_transformed(gradients: Sequence[Any] | None) -> bool:
    """Whether a backward is run by one of torch.func's transforms, or on batches of gradients: compiled code has no
    rules for these."""
    transforms = torch._C._functorch
    if transforms.peek_interpreter_stack() is not None:
        return True
    return any(g is not None and transforms.is_legacy_batchedtensor(g) for g in gradients or ())


def keeps_graph(args: Any, kwargs: Any) -> bool:
    """Whether what was saved is to be kept."""
    return bool(args[1] if len(args) > 1 else kwargs.get("keep_graph", False))


def keeping_graph(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The same arguments, but that what was saved is kept."""
    return ((args[0], True, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "keep_graph": True})


def describe_roots(roots: Sequence[Any]) -> Hashable:
    """Describe a backward by its roots, which tell most apart without a look at their graphs."""
    tensors = [root for root in roots if isinstance(root, torch.Tensor)]
    # Nested ones have no shape.
    return tuple([(t.grad_fn and name_of(t.grad_fn), None if t.is_nested else t.shape) for t in tensors])
