# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Torch tensors on a device whose memory torch cannot reach: copied there, kept there, copied back.

What the backward takes of what the forward left (parameters, inputs, residuals) is on the device already and is copied
once per step. Residuals never leave it: to torch they are tensors on its `meta` device, which have no values that
anyone could read by mistake.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from iree import runtime as iree_runtime
from torch.multiprocessing.reductions import StorageWeakRef

from retrograd.contract.errors import RetrogradError

ELEMENT_TYPES = {
    torch.bool: iree_runtime.HalElementType.BOOL_8,
    torch.uint8: iree_runtime.HalElementType.INT_8,
    torch.int8: iree_runtime.HalElementType.INT_8,
    torch.int16: iree_runtime.HalElementType.INT_16,
    torch.int32: iree_runtime.HalElementType.INT_32,
    torch.int64: iree_runtime.HalElementType.INT_64,
    torch.bfloat16: iree_runtime.HalElementType.BFLOAT_16,
    torch.float16: iree_runtime.HalElementType.FLOAT_16,
    torch.float32: iree_runtime.HalElementType.FLOAT_32,
    torch.float64: iree_runtime.HalElementType.FLOAT_64,
    torch.float8_e4m3fn: iree_runtime.HalElementType.FLOAT_8_E4M3_FN,
    torch.float8_e4m3fnuz: iree_runtime.HalElementType.FLOAT_8_E4M3_FNUZ,
    torch.float8_e5m2: iree_runtime.HalElementType.FLOAT_8_E5M2,
    torch.float8_e5m2fnuz: iree_runtime.HalElementType.FLOAT_8_E5M2_FNUZ,
    torch.complex64: iree_runtime.HalElementType.COMPLEX_64,
    torch.complex128: iree_runtime.HalElementType.COMPLEX_128,
}

_GRANULE = 256
"""Bytes. Buffers are multiples of this, so that tensors of about one size share them."""

POOL_BYTES = 256 << 20
"""Free buffers are kept for later tensors up to this many bytes."""

_Memory, _Usage = iree_runtime.MemoryType, iree_runtime.BufferUsage
_DEVICE = int(_Memory.DEVICE_LOCAL)
_MAPPED = int(_Memory.DEVICE_LOCAL | _Memory.HOST_VISIBLE)
_HOST = int(_Memory.HOST_LOCAL | _Memory.DEVICE_VISIBLE)
_READABLE = int(_Memory.HOST_VISIBLE) | int(_Memory.HOST_COHERENT) | int(_Memory.HOST_CACHED)


class ResidentError(RetrogradError, RuntimeError):
    """A residual that is no longer on the device."""


@dataclass
class _Resident:
    """A tensor's copy on the device: the buffer, the tensor's version then, and whether it may serve other calls than
    the backward of the same step."""

    storage: StorageWeakRef
    version: int
    buffer: Any
    pinned: bool = False


class Staging:
    """Buffers of one device for the tensors of one program; not for use by two threads at once.

    `uploads` and `downloads` count the tensors that were copied. `mapped` says whether the host writes to the device's
    memory itself, as where both share one memory; otherwise copies go through a buffer of the host's.
    """

    def __init__(self, hal: Any, *, mapped: bool | None = None) -> None:
        self._hal = hal
        self._free: dict[int, list[Any]] = {}
        self._free_bytes = 0
        self._residents: dict[tuple[Any, ...], _Resident] = {}
        self._host: dict[int, Any] = {}
        self.uploads = self.downloads = 0
        if mapped is not None:
            self.mapped = mapped

    @cached_property
    def mapped(self) -> bool:
        """See above; found out when it is first needed."""
        usage = int(_Usage.DEFAULT | _Usage.MAPPING)
        try:
            probe = self._hal.allocator.allocate_buffer(_MAPPED, usage, _GRANULE)
        except (RuntimeError, ValueError):
            # The driver has no such memory.
            return False
        return bool((probe.memory_type() & _READABLE) == _READABLE)

    def upload(self, tensor: torch.Tensor, *, reuse: bool) -> Any:
        """A view of the tensor's values on the device.

        A copy that is there is taken if torch has counted no write to the tensor since, and `reuse` is set or the
        tensor pinned.

        Raises:
            ResidentError: a residual whose copy is gone.
        """
        self._sweep()
        key = _key(tensor)
        resident = self._residents.get(key)
        if tensor.is_meta:
            if resident is None:
                raise ResidentError(
                    "a residual is not the one that the forward saved: saved tensor hooks cannot move residuals of a "
                    "program whose memory is its own; run it without them"
                )
            return self._view(resident.buffer, tensor)
        version = 0 if tensor.is_inference() else tensor._version
        if resident is None:
            resident = _Resident(StorageWeakRef(tensor.untyped_storage()), -1, self._take(tensor.nbytes))
            self._residents[key] = resident
        if resident.version != version or not (reuse or resident.pinned):
            self._write(resident.buffer, tensor)
            resident.version = version
        return self._view(resident.buffer, tensor)

    def pin(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy tensors to the device now; from here on only when torch counts a write to them."""
        for tensor in tensors:
            self.upload(tensor, reuse=False)
            self._residents[_key(tensor)].pinned = True

    def storage(self, tensor: torch.Tensor) -> Any:
        """A view of a buffer for a result of the shape and dtype of `tensor`."""
        return self._view(self._take(tensor.nbytes), tensor)

    def deliver(self, tensor: torch.Tensor, view: Any) -> None:
        """Give a result its values, once they are in `view`; one on the `meta` device stays where it is."""
        buffer = view.get_buffer()
        if tensor.is_meta:
            self._residents[_key(tensor)] = _Resident(StorageWeakRef(tensor.untyped_storage()), 0, buffer)
            return
        self._read(buffer, tensor)
        self._give(buffer)

    def trim(self) -> None:
        """Give memory back that no tensor uses."""
        self._sweep()
        self._free.clear()
        self._host.clear()
        self._free_bytes = 0

    def _view(self, buffer: Any, tensor: torch.Tensor) -> Any:
        return iree_runtime.HalBufferView(buffer, list(tensor.shape), ELEMENT_TYPES[tensor.dtype])

    def _take(self, size: int) -> Any:
        rounded = max(_GRANULE, -(-size // _GRANULE) * _GRANULE)
        free = self._free.get(rounded)
        if free:
            self._free_bytes -= rounded
            return free.pop()
        memory, usage = (_MAPPED, _Usage.DEFAULT | _Usage.MAPPING) if self.mapped else (_DEVICE, _Usage.DEFAULT)
        return self._hal.allocator.allocate_buffer(memory, int(usage), rounded)

    def _give(self, buffer: Any) -> None:
        size = buffer.byte_length()
        if self._free_bytes + size <= POOL_BYTES:
            self._free.setdefault(size, []).append(buffer)
            self._free_bytes += size

    def _sweep(self) -> None:
        """Take back the buffers of tensors that are gone."""
        gone = [key for key, resident in self._residents.items() if resident.storage.expired()]
        for key in gone:
            self._give(self._residents.pop(key).buffer)

    def _write(self, buffer: Any, tensor: torch.Tensor) -> None:
        self.uploads += 1
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if not plain.nbytes:
            return
        through = buffer if self.mapped else self._host_buffer(buffer.byte_length())
        _bytes_of(through, plain.nbytes)[:] = plain.reshape(-1).view(torch.uint8).cpu().numpy()
        if through is not buffer:
            self._copy(through, buffer)

    def _read(self, buffer: Any, tensor: torch.Tensor) -> None:
        self.downloads += 1
        if not tensor.nbytes:
            return
        through = buffer if self.mapped else self._host_buffer(buffer.byte_length())
        if through is not buffer:
            self._copy(buffer, through)
        values = torch.from_numpy(_bytes_of(through, tensor.nbytes))
        tensor.reshape(-1).view(torch.uint8).copy_(values)

    def _host_buffer(self, size: int) -> Any:
        """A buffer of the host's that the device copies from and to; one of each size, since each copy is awaited."""
        if size not in self._host:
            usage = int(_Usage.TRANSFER | _Usage.MAPPING)
            self._host[size] = self._hal.allocator.allocate_buffer(_HOST, usage, size)
        return self._host[size]

    def _copy(self, source: Any, target: Any) -> None:
        semaphore = self._hal.create_semaphore(0)
        before, after = (iree_runtime.HalFence.create_at(semaphore, value) for value in (0, 1))
        self._hal.queue_copy(source, target, before, after)
        after.wait()


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    place = (tensor.untyped_storage()._cdata, tensor.storage_offset())
    return (*place, tensor.dtype, tuple(tensor.shape), tensor.stride())


def _bytes_of(buffer: Any, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    mapped: np.ndarray[Any, np.dtype[np.uint8]] = buffer.map().asarray([size], np.dtype(np.uint8))
    return mapped
