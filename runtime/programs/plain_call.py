# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The short way to a function: tensors as they come, and nothing looked at that can be known before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from iree.runtime import VmVariantList
from torch.utils.dlpack import to_dlpack  # ten times faster than Tensor.__dlpack__

from retrograd.runtime.programs.devices import Device
from retrograd.runtime.programs.tensors import ALIGNMENT, BINDING_ERRORS, PLAIN_TYPES, CopyDenied, as_it_is_read


class PlainCall:
    """Calls a function of a loaded program on arguments as they come and results that were just allocated, if IREE
    takes the storage of all of them, those that it cannot read as they lie as copies. Most calls are such, and this is
    all that is done for them.

    ``invoke`` and ``take`` are IREE's: they call ``handle`` and import what comes by dlpack. ``lock`` is held for a
    call; ``explain`` makes the exception for an error of IREE's; ``is_complex`` says of the function that it takes
    complex numbers, which may be conjugates. ``copied`` has what imports results that IREE copies to, by number, and
    ``filled`` arguments: what comes by dlpack is for kernels alone. Nothing is called from a process that only
    inherited the device in a fork.
    """

    __slots__ = (
        "_copied",
        "_device",
        "_explain",
        "_filled",
        "_handle",
        "_invoke",
        "_is_complex",
        "_lock",
        "_take",
    )

    def __init__(
        self,
        device: Device,
        handle: Any,
        invoke: Callable[..., None],
        take: Callable[[Any], Any],
        lock: threading.Lock,
        explain: Callable[[Exception], Exception],
        is_complex: bool,
        copied: Mapping[int, Callable[[torch.Tensor], Any]] | None = None,
        filled: Mapping[int, Callable[[torch.Tensor], Any]] | None = None,
    ) -> None:
        self._device, self._handle, self._invoke, self._take = device, handle, invoke, take
        self._lock, self._explain, self._is_complex = lock, explain, is_complex
        self._copied, self._filled = copied or {}, filled or {}

    @property
    def parts(self) -> tuple[Any, ...]:
        """Returns the parts that another way to call the same function is made of."""
        known = self._device, self._handle, self._invoke, self._take, self._lock, self._explain, self._is_complex
        return *known, self._copied, self._filled

    def __call__(self, arguments: Sequence[torch.Tensor | int], results: Sequence[torch.Tensor]) -> bool:
        """Call it. Says whether it could; if not, nothing has run.

        Raises:
            ExecutionError: as ``explain`` says.
        """
        return self.run(arguments, results, None)

    def run(
        self,
        arguments: Sequence[torch.Tensor | int],
        results: Sequence[torch.Tensor],
        before: Callable[[], object] | None,
    ) -> bool:
        """Call it, and ``before`` that once all is there that it takes.

        IREE itself refuses to copy to results; that signs are flipped when a tensor is read it cannot know.

        Raises:
            ExecutionError: as ``explain`` says.
        """
        if self._device.is_inherited:
            return False
        packed = VmVariantList(len(arguments) + len(results))
        push, take = packed.push_ref, self._take
        try:
            for number, value in enumerate(arguments):
                if isinstance(value, int):
                    packed.push_int(value)
                    continue
                if type(value) not in PLAIN_TYPES:
                    return False
                address = value.data_ptr()
                if not address:
                    # Zeros for which torch keeps no memory, or a storage that was freed: IREE would read address 0.
                    return False
                is_lazy = value.is_neg() or (self._is_complex and value.is_conj())
                if is_lazy or address % ALIGNMENT or not value.is_contiguous():
                    value = as_it_is_read(value)
                push(self._filled[number](value) if number in self._filled else take(to_dlpack(value)))
            for number, tensor in enumerate(results):
                push(self._copied[number](tensor) if number in self._copied else take(to_dlpack(tensor)))
        except BINDING_ERRORS:
            return False
        # Functions return the storage of their results, which a list that lived on would keep.
        returned = VmVariantList(0)
        if before is not None:
            before()
        with self._lock:
            try:
                self._invoke(self._handle, packed, returned)
            except BINDING_ERRORS as error:
                return self._after(error)
        return True

    def _after(self, error: Exception) -> bool:
        """False where the call failed since a copy was denied, for which there is another way; else raises why."""
        failure = self._explain(error)
        if isinstance(failure, CopyDenied):
            return False
        raise failure from error
