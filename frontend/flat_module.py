# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The user's model as a function of flat tensors: what is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from retrograd.frontend.pack_hooks import HookTracker
from retrograd.frontend.selections import Selection, refusal
from retrograd.frontend.side_effects import contained
from retrograd.frontend.source import SourceTracker

TENSOR = object()
"""Stands for a tensor in :attr:`FlatModule.out_leaves`."""


class FlatModule(torch.nn.Module):
    """The user's model as a function of its tensor leaves: constants are closed over, outputs flattened to tensors."""

    model: torch.nn.Module | None
    _call: Callable[..., Any]

    def __init__(self, model: Callable[..., Any], in_spec: pytree.TreeSpec, leaves: Sequence[Any]) -> None:
        super().__init__()
        owner = getattr(model, "__self__", None)
        # A bound method (`model.loss`) differentiates the module it is bound to.
        self.model = (
            model if isinstance(model, torch.nn.Module) else owner if isinstance(owner, torch.nn.Module) else None
        )
        # Around Module.__setattr__, which would register the model a second time under this name.
        self.__dict__["_call"] = model
        self._in_spec = in_spec
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        self.tracing = False
        self.out_spec: pytree.TreeSpec | None = None
        self.out_leaves: list[Any] = []

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        remaining = iter(tensors)
        leaves = [
            next(remaining) if is_tensor else leaf
            for leaf, is_tensor in zip(self._leaves, self._is_tensor, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self._in_spec)
        if self.tracing:
            with HookTracker(), SourceTracker(), contained(self.model):
                result = self._call(*args, **kwargs)
        else:
            result = self._call(*args, **kwargs)
        out_leaves, self.out_spec = pytree.tree_flatten(result)
        if any(isinstance(leaf, Selection) for leaf in out_leaves):
            raise refusal("a result")
        # Kept for the constants among them only: a tensor of the trace must not outlive it.
        self.out_leaves = [TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in out_leaves]
        return tuple(leaf for leaf in out_leaves if isinstance(leaf, torch.Tensor))

    # The tracer swaps tensors in by name and puts the old ones back in the same order: of two names for one place (a
    # submodule that is used twice) the second would bring the tracer's tensor back for good. One name for each place.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Each parameter once for every module that holds it, whatever ``remove_duplicate`` says."""
        for path, module in self.named_modules(prefix=prefix):
            yield from ((f"{path}.{name}", p) for name, p in module._parameters.items() if p is not None)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Each buffer once for every module that holds it, whatever ``remove_duplicate`` says."""
        for path, module in self.named_modules(prefix=prefix):
            yield from ((f"{path}.{name}", b) for name, b in module._buffers.items() if b is not None)


def state_name(qualified: str) -> str:
    """The name the user knows a parameter by: the flat module adds one level, which this takes off."""
    return qualified.removeprefix("model.")
