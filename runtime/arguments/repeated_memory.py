# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Writes to arguments whose elements are one in memory, as those of ``x.expand(3, 4)`` are.

Eager fills such a tensor (``fill_``, ``zero_``), and refuses ops whose writes might contradict each other. A compiled
function writes back whole tensors, with ``copy_``, which is refused whatever is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Tensors = Sequence[torch.Tensor]


def filling_repeated(call: Callable[[Tensors], Tensors], mutated: Sequence[int]) -> Callable[[Tensors], Tensors]:
    """``call``, which writes to its arguments of the numbers ``mutated``, on copies of those whose elements are one in
    memory; each of these gets what was written to its copy.

    Raises when called:
        RuntimeError: what was written is not the same for elements that are one in memory.
    """
    if not mutated:
        return call

    def checked(tensors: Tensors) -> Tensors:
        repeated = {i: tensors[i] for i in mutated if repeats(tensors[i])}
        if not repeated:
            return call(tensors)
        given = [t.clone(memory_format=torch.contiguous_format) if i in repeated else t for i, t in enumerate(tensors)]
        outputs = call(given)
        for i, tensor in repeated.items():
            write(tensor, given[i])
        whole = {id(given[i]): tensor for i, tensor in repeated.items()}
        return [whole.get(id(output), output) for output in outputs]

    return checked


def repeats(tensor: torch.Tensor) -> bool:
    """Whether elements of an argument that can be written to are one in memory."""
    # One that requires grad cannot be written to, or is a view that autograd has to know of.
    return not tensor.requires_grad and any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def write(tensor: torch.Tensor, written: torch.Tensor) -> None:
    """``tensor.copy_(written)``, also where elements of ``tensor`` are one in memory, for which it is the same.

    Raises:
        RuntimeError: it is not.
    """
    once = tuple(slice(None) if step else slice(1) for step in tensor.stride())
    if repeats(tensor) and torch.equal(written[once].expand(written.shape), written):
        tensor[once].copy_(written[once])
    else:
        # Else says that elements are one in memory, and what to do.
        tensor.copy_(written)
