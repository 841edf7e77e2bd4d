# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Hooks that are part of a graph whose sizes are open: their code runs on stand-ins for the tensors that it knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from retrograd.frontend.python.source_locations import CaptureError

# What a tracer works with.
_TRACED = (FakeTensor, FunctionalTensor)


class HookStays(CaptureError):
    """The hook of a node is to be called in Python; ``reason`` says why."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(f"the hook of {node} cannot be inlined: {reason}", "leave it in Python")
        self.node, self.reason = node, reason


class StandIns(TorchFunctionMode):
    """While it is active, what is done with tensors, and asked of them, is done with others in their place, which are
    given by ``id``."""

    def __init__(self, others: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._others = others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._stand_in, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        other = self._others.get(id(tensor))
        if other is None and not torch._is_functional_tensor(tensor) and not isinstance(tensor, _TRACED):
            raise CaptureError("it reads a tensor that it did not read for other sizes", "leave it in Python")
        return tensor if other is None else other


def has_open_size(values: Any) -> bool:
    """Whether any tensor among these has a size that is a symbol."""
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.shape)
