# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The tensors of a call: what storage a device works on in place, what is copied first, what is refused."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Callable, Iterable, Sequence, Set
from functools import cache, partial
from sys import getrefcount
from typing import Any

import torch
from torch._C._dynamo import guards

from retrograd.contract.tensors import TensorSpec
from retrograd.runtime.programs.devices import Device
from retrograd.runtime.programs.errors import ExecutionError

ALIGNMENT = 64
"""Bytes. IREE imports storage that begins at a multiple of this, and torch allocates so."""


PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
"""Those of tensors that are what their storage holds, unlike subclasses."""


BINDING_ERRORS = (RuntimeError, ValueError, IndexError, BufferError)
"""Errors that IREE's bindings raise."""


_uses_of = torch._C._storage_Use_Count


class CopyDenied(Exception):
    """IREE would copy to a result's storage, which was imported for compute only. On a device that works in the calling
    thread all that comes before the copy has run."""


def allocate_results(specs: Sequence[TensorSpec], device: str | torch.device = "cpu") -> list[torch.Tensor]:
    """Uninitialized tensors for `specs`, in order: contiguous, aligned to `ALIGNMENT` bytes, no storage shared.

    Raises:
        ExecutionError: a spec has a dtype that torch does not know, or a size below zero.
    """
    return [allocate_result(spec, device) for spec in specs]


def allocate_result(spec: TensorSpec, device: str | torch.device) -> torch.Tensor:
    """Allocate one result, as `allocate_results` does all."""
    tensor = make_allocator(spec, device)()
    if not is_importable(tensor):
        raise ExecutionError(
            f"torch's allocator gave storage for result {spec.name!r} that is not aligned to {ALIGNMENT} bytes"
        )
    return tensor


def make_allocator(spec: TensorSpec, device: str | torch.device) -> Callable[[], torch.Tensor]:
    """Makes a function that allocates a result, each time anew, on storage that torch aligns.

    Raises:
        ExecutionError: as for `allocate_results`.
    """
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ExecutionError(f"result {spec.name!r} has dtype {spec.dtype!r}, which torch does not know")
    shape = tuple(size for size in spec.shape if isinstance(size, int) and size >= 0)
    if len(shape) != len(spec.shape):
        raise ExecutionError(f"result {spec.name!r} has shape {list(spec.shape)}; give its sizes before allocating it")
    stride = torch.empty(shape, device="meta").stride()
    if torch.device(device).type == "cpu":
        # What Inductor's code calls, in a third of the time of torch.empty_strided.
        allocate = partial(guards._empty_strided_cpu, shape, stride, dtype)  # type: ignore[attr-defined]
        return _with_huge_pages(allocate) if math.prod(shape) * dtype.itemsize >= LEAST_BYTES else allocate
    if torch.device(device).type == "cuda" and torch.cuda.device_count() == 1:
        # That of CUDA asks for no device: it takes the current one.
        return partial(guards._empty_strided_cuda, shape, stride, dtype)  # type: ignore[attr-defined]
    return partial(torch.empty_strided, shape, stride, dtype=dtype, device=device)


def _with_huge_pages(allocate: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    def allocate_huge() -> torch.Tensor:
        tensor = allocate()
        advise_huge_pages(tensor)
        return tensor

    return allocate_huge


def is_importable(tensor: torch.Tensor) -> bool:
    """Whether IREE can use the storage of `tensor` as it lies: there, contiguous, aligned, its values what its bytes
    say."""
    address = tensor.data_ptr()
    if address % ALIGNMENT or not (address or tensor.is_meta or tensor.numel() == 0):
        return False
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def give_up(arguments: list[Any], places: Iterable[int]) -> None:
    """Make those arguments at ``places`` copies that something else than the list refers to: a function writes over
    them. So are those of which others may know the memory, such as NumPy's arrays, and those that IREE cannot use as
    they lie."""
    for place in places:
        # References of the list and of the call of getrefcount.
        if getrefcount(arguments[place]) != 2 or arguments[place]._use_count() != 1 or not _is_own(arguments[place]):
            arguments[place] = as_it_is_read(arguments[place])


def _is_own(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is its alone, by torch's counts, and IREE can use it as it lies."""
    if type(tensor) not in PLAIN_TYPES or not is_importable(tensor):
        return False
    storage = tensor.untyped_storage()
    return is_alone(storage, 1)


def is_alone(storage: torch.UntypedStorage, tensors: int) -> bool:
    """Whether nothing has a storage but so many tensors and a name of who asks, by Python's and torch's counts: no
    other process either."""
    # Of CUDA's memory torch always says that it is shared; what another process shares cannot be resized.
    is_shared = storage.is_shared() and not storage.is_cuda
    if _uses_of(storage._cdata) != tensors + 1 or not storage.resizable() or is_shared:
        return False
    return _count_names(storage) == _ONE_NAME


def _count_names(storage: torch.UntypedStorage) -> int:
    return getrefcount(storage)


def _count_one_name() -> int:
    """Counts the names of a storage with one, as :func:`is_alone` does."""

    def count(storage: torch.UntypedStorage) -> int:
        return _count_names(storage)

    made = torch.empty(1, device="cpu")
    storage = made.untyped_storage()
    return count(storage)


_ONE_NAME = _count_one_name()


def as_argument(name: str, index: int, tensor: torch.Tensor, device: Device, result_storages: Set[int]) -> torch.Tensor:
    """`tensor` without its autograd history, copied where IREE could not read it in place or would write over it. One
    of the CPU's beside those of a GPU, as a number or an index may be in PyTorch, is copied there."""
    if is_beside(tensor, device.torch_device) and not device.is_staged:
        tensor = tensor.detach().to(device.torch_device)
    _check_tensor(name, f"argument {index}", tensor, device)
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor._is_zerotensor():
        # Zeros for which torch keeps no memory.
        tensor = tensor.clone()
    if device.is_staged:
        # What is copied to the device anyway may lie as it likes.
        return tensor
    if not tensor.numel():
        # One without elements counts as contiguous whatever its strides; dlpack's reader takes the usual ones only.
        return tensor.new_empty(tensor.shape)
    if is_importable(tensor) and _storage(tensor) not in result_storages:
        return tensor
    if not tensor.data_ptr():
        raise ExecutionError(f"{name}: the memory of argument {index} was freed; give its storage a size and values")
    return as_it_is_read(tensor)


def as_it_is_read(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor that lies as compiled code reads it, without its autograd history."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()


def is_beside(tensor: torch.Tensor, place: torch.device) -> bool:
    """Whether `tensor` is on the CPU, and `place` is not."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" != place.type


def check_results(name: str, results: Sequence[torch.Tensor], device: Device) -> set[int]:
    """The storages that the call will write to."""
    storages: set[int] = set()
    for index, tensor in enumerate(results):
        _check_tensor(name, f"result {index}", tensor, device)
        if not is_importable(tensor):
            raise ExecutionError(
                f"{name}: result {index} is not contiguous or not aligned to {ALIGNMENT} bytes; "
                "take it from allocate_results"
            )
        if tensor.requires_grad:
            raise ExecutionError(f"{name}: result {index} requires grad, which a write in place would hide; detach it")
        if tensor.numel():
            if _storage(tensor) in storages:
                raise ExecutionError(
                    f"{name}: result {index} shares its storage with an earlier result; take them from allocate_results"
                )
            storages.add(_storage(tensor))
    return storages


def _check_tensor(name: str, what: str, tensor: torch.Tensor, device: Device) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ExecutionError(f"{name}: {what} is {type(tensor).__name__}, not a tensor")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise ExecutionError(f"{name}: {what} is the subclass {type(tensor).__name__}; pass the tensors inside it")
    transforms = torch._C._functorch
    if transforms.is_functorch_wrapped_tensor(tensor) or transforms.is_legacy_batchedtensor(tensor):
        raise ExecutionError(
            f"{name}: {what} belongs to a transform of torch.func, for which compiled code has no rules; "
            "leave out is_grads_batched and vectorize, or transform the model itself"
        )
    if tensor.layout is not torch.strided:
        raise ExecutionError(f"{name}: {what} has layout {tensor.layout}; pass it dense")
    if tensor.device != device.torch_device and not (device.is_staged and tensor.is_meta):
        raise ExecutionError(
            f"{name}: {what} is on {tensor.device}, and the program runs on {device.uri!r}, "
            f"which takes tensors on {device.torch_device}; move it there, or load the program on its device"
        )


def _storage(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    # On torch's meta device all storage is at address zero.
    return storage._cdata if tensor.is_meta else storage.data_ptr()


# Large pages for large results on a CPU.
# From 32 MiB on, glibc's allocator takes each piece of memory anew from the system and gives it back at once, and what
# is smaller too where much was freed together, as gradients are: every page of it is a fault when it is first written
# to. By pages of 4 KiB that takes three times as long as the writing itself; by pages of 2 MiB, which Linux gives
# where it is asked to, about half as long. On memory that the process has, the question costs a microsecond.
LEAST_BYTES = 4 << 20
"""From here on a piece of memory holds a large page for certain, and the question is nothing beside the writing."""
_PAGE = 2 << 20
# Of Linux's `mman.h`; Python has it where it was built with such a header.
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", 14)


def advise_huge_pages(tensor: torch.Tensor) -> bool:
    """Ask for large pages for all of a tensor's storage that whole ones fit in; values stay. Says whether the system
    took the advice: elsewhere than on Linux, and where it is switched off, it does not."""
    storage = tensor.untyped_storage()
    start, end = -(-storage.data_ptr() // _PAGE) * _PAGE, (storage.data_ptr() + storage.nbytes()) // _PAGE * _PAGE
    if end <= start or tensor.device.type != "cpu":
        return False
    advise = _find_advise()
    return advise is not None and advise(start, end - start, _ADVICE) == 0


@cache
def _find_advise() -> ctypes._NamedFuncPointer | None:
    if not sys.platform.startswith("linux"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advise.restype = ctypes.c_int
    return advise
