# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Results that lie in memory of arguments, which the function writes over: each a tensor with storage of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._C._dynamo import guards

# What Inductor's code calls: a tensor of its own on the storage of another of its type, and no view to autograd.
_reinterpret = guards._reinterpret_tensor  # type: ignore[attr-defined]


class Placed(NamedTuple):
    """A result that lies in an argument, by numbers: at an offset in it, and of a size, in bytes. One that is copied
    goes to memory of its own when the function has returned, and keeps nothing of the argument's."""

    result: int
    argument: int
    offset: int
    size: int
    is_copied: bool = False


def read_placed(said: Iterable[str], copied: Iterable[str]) -> tuple[Placed, ...]:
    """The results that lie in arguments, from what a program says of a function: :data:`BWD_PLACED`, and the numbers of
    those that are copied."""
    numbers = frozenset(map(int, copied))
    places = []
    for text in said:
        result, argument, offset, size = map(int, text.split(":"))
        places.append(Placed(result, argument, offset, size, result in numbers))
    return tuple(places)


def place_results(placed: Iterable[Placed], arguments: Sequence[Any], results: list[torch.Tensor]) -> None:
    """Put tensors at their places in ``arguments`` among ``results``, each in sizes, strides and type as what is there.

    Each has storage of its own, of as many bytes as it has, in the argument's memory: what is saved, pickled or deeply
    copied is the tensor alone. That memory is there as long as one of them.
    """
    buffers: dict[int, Any] = {}
    for place in placed:
        buffer = buffers.get(place.argument)
        if buffer is None:
            buffer = buffers[place.argument] = _bytes_of(arguments[place.argument])
        like = results[place.result]
        flat = torch.frombuffer(buffer, dtype=like.dtype, count=like.numel(), offset=place.offset)
        results[place.result] = _reinterpret(flat, tuple(like.shape), like.stride(), 0)


def copy_out(
    placed: Iterable[Placed],
    own: Sequence[torch.Tensor],
    allocators: Sequence[Callable[[], torch.Tensor]],
    results: list[torch.Tensor],
) -> None:
    """Copy those results that are to be copied to ``own`` memory, or to such as is allocated now."""
    for place in placed:
        if place.is_copied:
            number = place.result
            target = allocators[number]() if own[number].is_meta else own[number]
            results[number] = target.copy_(results[number])


def _bytes_of(tensor: torch.Tensor) -> Any:
    """The memory of a tensor of the CPU's that is in one piece, as an array of bytes, which keeps it."""
    first = tensor.storage_offset() * tensor.element_size()
    whole = torch.empty(0, dtype=torch.uint8, device="cpu")
    return whole.set_(tensor.untyped_storage(), first, (tensor.nbytes,), (1,)).numpy()
