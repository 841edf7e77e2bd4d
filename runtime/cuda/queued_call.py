# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The short way to a launch plan: tensors as they come, and nothing looked at that can be known before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch

from retrograd.runtime.cuda.replayed_plan import ReplayedPlan
from retrograd.runtime.programs.declaration import ELEMENT_DTYPES
from retrograd.runtime.programs.known_forms import KnownForms
from retrograd.runtime.programs.tensors import ALIGNMENT, PLAIN_TYPES, as_it_is_read


class QueuedCall:
    """Queues a plan on the current stream for arguments as they come and results that were just allocated, if the
    plan takes all of them, those that it cannot read as they lie as copies. Most calls are such, and this is all that
    is done for them.

    ``device`` is the number of the plan's device, and ``current`` asks for that of the calling thread; ``enter`` makes
    a device's context the thread's, ``stream`` gives the handle of a device's current stream, ``allocate`` scratch
    memory of so many bytes. ``lock`` is held for a call.
    """

    __slots__ = (
        *("_allocate", "_current", "_device", "_enter", "_expected", "_known", "_lock", "_scratch", "_stream"),
        "plan",
    )

    def __init__(
        self,
        plan: ReplayedPlan,
        device: int,
        lock: threading.Lock,
        current: Callable[[], int],
        enter: Callable[[int], object],
        stream: Callable[[int], int],
        allocate: Callable[[int], torch.Tensor],
    ) -> None:
        self.plan, self._device, self._lock = plan, device, lock
        self._current, self._enter, self._stream, self._allocate = current, enter, stream, allocate
        self._scratch = plan.plan.scratch
        self._known = KnownForms()
        self._expected = [
            (None if a.element is None else ELEMENT_DTYPES[a.element], a.shape, a.bytes) for a in plan.plan.arguments
        ]

    def __call__(self, arguments: Sequence[Any], results: Sequence[torch.Tensor]) -> bool:
        """Queue it. Says whether it could; if not, nothing was queued, and the long way says why.

        Raises:
            ExecutionError: the driver refused something.
        """
        if self._current() != self._device or len(arguments) + len(results) != len(self._expected):
            return False
        # Copies live until all is queued.
        copies: dict[int, torch.Tensor] = {}
        try:
            known = self._known.find(arguments)
            addresses = None if known is None else _read_known(arguments, known, copies)
            addresses = self._read(arguments, copies) if addresses is None else addresses
        except RuntimeError:
            # One has no memory of its own, as inside of a transform of torch.func, or there is none for a copy.
            return False
        return addresses is not None and self._queue([*addresses, *[tensor.data_ptr() for tensor in results]])

    def _read(self, arguments: Sequence[Any], copies: dict[int, torch.Tensor]) -> list[int] | None:
        """Where the arguments lie, or the ``copies`` that are made of some, by their places; None where the plan does
        not take one."""
        device, addresses = self._device, list[int]()
        expected = zip(arguments, self._expected, strict=False)
        for place, (tensor, (dtypes, shape, size)) in enumerate(expected):
            if (
                type(tensor) not in PLAIN_TYPES
                or (dtypes is not None and tensor.dtype not in dtypes)
                or (tensor.shape != shape if shape is not None else tensor.nbytes < size)
                or tensor.get_device() != device
            ):
                return None
            address = tensor.data_ptr()
            # Zeros for which torch keeps no memory, or a storage that was freed, are at address 0.
            if not address:
                return None
            if address % ALIGNMENT or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
                copies[place] = as_it_is_read(tensor)
                address = copies[place].data_ptr()
            addresses.append(address)
        self._known.learn(arguments, tuple(copies))
        return addresses

    def _queue(self, addresses: list[int]) -> bool:
        """Queue it on arguments and results that lie there; says whether there is scratch memory for it."""
        with self._lock:
            try:
                scratch = self._allocate(self._scratch)
            except torch.OutOfMemoryError:
                return False
            addresses.append(scratch.data_ptr())
            self._enter(self._device)
            self.plan.run(addresses, self._stream(self._device))
        return True


def _read_known(
    arguments: Sequence[torch.Tensor], copied: Sequence[int], copies: dict[int, torch.Tensor]
) -> list[int] | None:
    """Read arguments that the plan takes as ``QueuedCall._read`` does, those in the places ``copied`` as copies; None
    where one lies otherwise than before."""
    addresses = [tensor.data_ptr() for tensor in arguments]
    if not all(addresses):
        return None
    for place in copied:
        copies[place] = as_it_is_read(arguments[place])
        addresses[place] = copies[place].data_ptr()
    return None if reduce(or_, addresses, 0) % ALIGNMENT else addresses
