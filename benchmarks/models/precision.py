# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A case of the registry on another device, and in another precision."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from models.case import Case

Precision = Literal["f32", "bf16", "autocast"]
PRECISIONS: tuple[Precision, ...] = ("f32", "bf16", "autocast")


class Autocast(nn.Module):
    """``model`` under ``torch.autocast`` to bfloat16: parameters and arguments stay float32."""

    def __init__(self, model: Any, device: str) -> None:
        super().__init__()
        self.inner = model
        self._device = device

    def forward(self, *args: Any) -> Any:
        with torch.autocast(self._device, torch.bfloat16):
            return self.inner(*args)


def mean_square(outputs: Any) -> Tensor:
    """A loss that depends on every floating output, wherever these are; the cases' own hold targets on the CPU."""
    floats = [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([t.float().pow(2).mean() for t in floats]).sum()


def convert(case: Case, device: str, precision: Precision) -> Case:
    """``case`` with parameters and arguments on ``device``, and the loss of ``mean_square``.

    ``bf16`` is bfloat16 throughout, ``autocast`` is float32 under ``torch.autocast``. A module is changed in place.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        moved = leaf.detach().to(device, dtype if leaf.is_floating_point() else leaf.dtype)
        return moved.requires_grad_(leaf.requires_grad)

    model = case.model.to(device, dtype) if isinstance(case.model, nn.Module) else case.model
    if precision == "autocast":
        model = Autocast(model, device)
    return dataclasses.replace(case, model=model, args=pytree.tree_map(move, case.args), loss=mean_square)
