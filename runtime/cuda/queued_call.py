# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The short way to a launch plan: tensors as they come, and nothing looked at that can be known before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from retrograd.runtime.cuda.replayed_plan import ReplayedPlan
from retrograd.runtime.programs.declaration import ELEMENT_DTYPES
from retrograd.runtime.programs.tensors import ALIGNMENT, PLAIN_TYPES, as_it_is_read


class QueuedCall:
    """Queues a plan on the current stream for arguments as they come and results that were just allocated, if the
    plan takes all of them, those that it cannot read as they lie as copies. Most calls are such, and this is all that
    is done for them.

    ``device`` is the number of the plan's device, and ``current`` asks for that of the calling thread; ``enter`` makes
    a device's context the thread's, ``stream`` gives the handle of a device's current stream, ``allocate`` scratch
    memory of so many bytes. ``lock`` is held for a call.
    """

    __slots__ = ("_allocate", "_current", "_device", "_enter", "_expected", "_lock", "_scratch", "_stream", "plan")

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
        device, addresses, copies = self._device, list[int](), list[torch.Tensor]()
        try:
            for tensor, (dtypes, shape, size) in zip(arguments, self._expected, strict=False):
                if (
                    type(tensor) not in PLAIN_TYPES
                    or (dtypes is not None and tensor.dtype not in dtypes)
                    or (tensor.shape != shape if shape is not None else tensor.nbytes < size)
                    or tensor.get_device() != device
                ):
                    return False
                address = tensor.data_ptr()
                # Zeros for which torch keeps no memory, or a storage that was freed, are at address 0.
                if not address:
                    return False
                if address % ALIGNMENT or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
                    copies.append(as_it_is_read(tensor))
                    address = copies[-1].data_ptr()
                addresses.append(address)
        except RuntimeError:
            # It has no memory of its own, as inside of a transform of torch.func, or there is none for a copy.
            return False
        addresses += [tensor.data_ptr() for tensor in results]
        with self._lock:
            try:
                scratch = self._allocate(self._scratch)
            except torch.OutOfMemoryError:
                return False
            addresses.append(scratch.data_ptr())
            self._enter(device)
            self.plan.run(addresses, self._stream(device))
        return True
