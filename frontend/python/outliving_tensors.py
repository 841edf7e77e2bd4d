# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Finds tensors of a trace that a model has put where they outlive it: into a dict that a hook closes over, a global
list, an attribute of an object that is no module.

A compiled program puts nothing there: what the user reads afterwards would be a tensor of the trace, or nothing. What
is put into attributes of modules :mod:`side_effects` sees and takes back; all else shows in that it is still alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from retrograd.frontend.python.holders import find_holdings
from retrograd.frontend.python.side_effects import KEPT_REMEDY
from retrograd.frontend.python.source_locations import CaptureError


class MadeTensors:
    """The tensors that a model is given and makes while it is traced, for as long as they are alive, each with the
    line."""

    def __init__(self) -> None:
        self._made: list[tuple[weakref.ref[torch.Tensor], str]] = []
        # What the tensors of a trace are; a forward that is only recorded has none of these.
        self.kind: type[torch.Tensor] = FunctionalTensor

    def note(self, result: Any, line: str | None) -> None:
        """Note what a function returned that a line of the model's code called."""
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, self.kind)]
        if tensors:
            place = "" if line is None else f", computed at {line}"
            self._made += [(weakref.ref(tensor), place) for tensor in tensors]

    def place_of(self, tensor: torch.Tensor) -> str:
        """``, computed at`` the line that computed a tensor; empty where that is not known."""
        return next((place for reference, place in reversed(self._made) if reference() is tensor), "")

    def take_out_kept(self, model: Sequence[Any]) -> CaptureError | None:
        """Once the trace is over or has failed, take those that the user's program still holds out of what holds them;
        returns the error that names the line that computed one, and what it was in. ``model`` has the modules and
        functions that were traced."""
        alive = [tensor for reference, _ in self._made if (tensor := reference()) is not None]
        found = find_holdings(alive, model) if alive else []
        if not found:
            self._made.clear()
            return None
        tensor, holder = found[0].chain[0], found[0].describe()
        for holding in found:
            holding.take_out()
        return CaptureError(
            f"the model keeps a tensor {holder}, of shape {tuple(tensor.shape)}, where a compiled program puts none"
            f"{self.place_of(tensor)}",
            KEPT_REMEDY,
        )
