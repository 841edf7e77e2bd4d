# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Calls of forwards and backwards between which residuals are on the host.

What a forward gives in place of such a residual is a tensor of the host, which autograd keeps as any other: it counts
writes to it, frees it with the graph, and gives it to each of the backwards of a retained one. A backward that finds
one has it brought back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._subclasses.fake_tensor import FakeTensor

from retrograd.contract.moves import Mover
from retrograd.frontend.doors.call_plan import Caller, Tensors


@dataclass(frozen=True)
class Moves:
    """How a function is called that gives residuals on the host, or takes them from there.

    ``values`` are those of a backward, by name. ``call`` moves them while it runs, where ``may_move`` says that nobody
    else is to look at them; it is ``None`` for a function that is compiled later.
    """

    values: frozenset[str]
    mover: Mover[Tensor]
    may_move: Callable[[], bool]
    call: Callable[[Tensors], Tensors] | None

    def without_call(self) -> Moves:
        """The same for a function that is not compiled yet."""
        return replace(self, call=None)


def moving_forward(plain: Caller, moving: Caller, moves: Moves) -> Caller:
    """A forward that is called by ``moving``, which leaves residuals on the host. It is by ``plain`` where they are to
    be looked at, by hooks of saved tensors that are open, by a check, and by whoever traces or records the call; and
    where gradients are off, so that nobody keeps them."""

    def call(tensors: list[Any]) -> list[Any]:
        stays = find_reader() or not moves.mover.is_free() or not moves.may_move() or _are_fake(tensors)
        return plain(tensors) if stays or not _is_recorded(tensors) else moving(tensors)

    return call


def moving_backward(plain: Caller, moving: Caller | None, moves: Moves, places: Sequence[int]) -> Caller:
    """A backward that is called by ``moving`` where it finds residuals on the host at ``places``; by ``plain`` where
    there are none, and, once they are back, where it is still to be checked."""

    def call(tensors: list[Any]) -> list[Any]:
        mover = moves.mover
        found = [place for place in places if isinstance(tensors[place], Tensor) and mover.is_host(tensors[place])]
        if not found or _are_fake(tensors):
            return plain(tensors)
        if moving is not None and moves.may_move():
            return moving(tensors)
        fetched, transfer = mover.fetch([tensors[place] for place in found])
        transfer.finish()
        for place, tensor in zip(found, fetched, strict=True):
            tensors[place] = tensor
        return plain(tensors)

    return call


def find_reader() -> bool:
    """Whether somebody reads in Python what a forward saves: hooks of saved tensors, or compiled autograd."""
    hooks: object = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None or compiled_autograd.compiled_autograd_enabled


def _is_recorded(tensors: Sequence[Any]) -> bool:
    """Whether autograd records the call of these arguments: they are detached where it does not."""
    return any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)


def _are_fake(tensors: Sequence[Any]) -> bool:
    return any(isinstance(tensor, FakeTensor) for tensor in tensors)
