# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Refuse tensors that a model keeps or returns and that have, in eager, a gradient of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from retrograd.frontend.doors.unregistered_objects import take_apart
from retrograd.frontend.python.kept_attributes import KeptAttribute, tensors_in
from retrograd.frontend.python.side_effects import WHERE_KEPT
from retrograd.frontend.python.source_locations import CaptureError


def refuse_own_gradients(
    attribute: KeptAttribute, tensors: Sequence[torch.Tensor], place_of: Callable[[torch.Tensor], str]
) -> None:
    """Refuse what is set to a leaf that requires grad, or to a tensor that retains its gradient: outside of the trace
    it would be neither."""
    for tensor, how in _with_own_gradients(tensors):
        raise CaptureError(
            f"the model keeps a tensor in its attribute {attribute.qualified!r} that is to have a gradient of its "
            f"own, {how}, and gets none of a compiled program{place_of(tensor)}",
            f"use {WHERE_KEPT} keeps it and its gradient; or leave that call out",
        )


def refuse_returned_leaves(result: Any, inputs: Collection[int], place_of: Callable[[torch.Tensor], str]) -> None:
    """Refuse a result of a model that has, in eager, a gradient of its own; ``inputs`` are what the model has been
    given, by identity. Tensors that are none of the trace's, which it had before, are refused elsewhere.

    Raises:
        CaptureError: the model returns a leaf that it made itself, or a tensor that retains its gradient.
    """
    own = (torch.Tensor, torch.nn.Parameter)
    returned = [t for t in tensors_in(take_apart(result)) if id(t) not in inputs and type(t) not in own]
    for tensor, how in _with_own_gradients(returned):
        raise CaptureError(
            f"the model returns a tensor of shape {tuple(tensor.shape)} that is to have a gradient of its own, {how}, "
            f"and gets none of a compiled program{place_of(tensor)}",
            f"use {WHERE_KEPT} gives it one; or leave that call out, or do it to what the model returns",
        )


def _with_own_gradients(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, str]]:
    """Those that are leaves and require grad, or retain their gradients, each with how they came to."""
    for tensor in tensors:
        with torch._C.DisableTorchFunction():
            is_leaf = tensor.requires_grad and tensor.is_leaf
            has_own = is_leaf or tensor.retains_grad
        if has_own:
            yield tensor, "by requires_grad_()" if is_leaf else "by retain_grad()"
