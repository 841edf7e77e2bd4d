# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A loaded executable, called on torch tensors.

Arguments go to IREE in place when their storage allows it, results are written straight into tensors that torch
allocated: the functions called here were compiled with `iree.abi.output` on their trailing arguments.
"""

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from iree import runtime as iree_runtime
from torch.utils.dlpack import to_dlpack  # ten times faster than Tensor.__dlpack__

from retrograd.runtime.declaration import DeclaredTensor, parse_results
from retrograd.runtime.devices import DEFAULT_DRIVER, Device, abandon_after_fork, get_device, process_lock
from retrograd.runtime.manifest import TensorSpec

ALIGNMENT = 64
"""Bytes. IREE imports storage that begins at a multiple of this, and torch allocates so."""

# dlpack has no code that IREE knows for these: they cross as bytes and are named again on the other side.
_BYTE_DTYPES = {
    torch.float8_e4m3fn: iree_runtime.HalElementType.FLOAT_8_E4M3_FN,
    torch.float8_e4m3fnuz: iree_runtime.HalElementType.FLOAT_8_E4M3_FNUZ,
    torch.float8_e5m2: iree_runtime.HalElementType.FLOAT_8_E5M2,
    torch.float8_e5m2fnuz: iree_runtime.HalElementType.FLOAT_8_E5M2_FNUZ,
}


class ExecutionError(RuntimeError):
    """A function that is not there, tensors that it does not take, or a failure while it ran."""


class Program:
    """A vmfb loaded on a device; `invoke` may be called from any thread, and from forked children.

    Calls of one program run one after another (the device works on each with all its threads); calls of two programs
    may overlap.
    """

    def __init__(self, vmfb: bytes, driver: str) -> None:
        self._vmfb = vmfb
        self._driver = driver
        self._loaded = _Loaded(vmfb, get_device(driver))

    @staticmethod
    def load(vmfb: bytes, *, driver: str = DEFAULT_DRIVER) -> "Program":
        """Load an executable on the process's device for `driver` (a driver's name, or IREE's `driver://path`).

        Raises:
            DeviceError: the driver or device cannot be opened.
            ExecutionError: IREE refuses the executable, or it holds no code for this device.
        """
        return Program(vmfb, driver)

    @property
    def driver(self) -> str:
        """The driver or device URI that the program was loaded for."""
        return self._driver

    @property
    def function_names(self) -> list[str]:
        """The exported functions."""
        return [name for name in self._current().module.function_names if not name.startswith("__")]

    def invoke(self, name: str, arguments: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Call the exported function `name` on `arguments`, then `results`, and wait until it is done.

        The shapes and dtypes of all tensors are those the function was compiled for. Arguments are only read; an
        argument that is not contiguous, not aligned to `ALIGNMENT`, a lazy conjugate or negative, or shares storage
        with a result, is copied first. Results are overwritten, are not seen by autograd, and must be distinct,
        contiguous and aligned, as those of `allocate_results` are.

        Raises:
            ExecutionError: no such function, a tensor it does not take, or a failure while it ran.
        """
        loaded = self._current()
        result_storages = _check_results(name, results, loaded.device)
        inputs = [
            _as_argument(name, index, tensor, loaded.device, result_storages) for index, tensor in enumerate(arguments)
        ]
        for tensor in (*inputs, *results):
            if tensor.is_cuda:
                # IREE has a stream of its own, which knows nothing of what torch has queued.
                torch.cuda.current_stream(tensor.device).synchronize()
                break
        loaded.invoke(name, inputs, results)

    @contextlib.contextmanager
    def on_device(self, device: Device) -> Iterator[None]:
        """Run the program, in all threads, on another device during the block; it is loaded there anew.

        Raises:
            ExecutionError: as for `load`.
        """
        before, self._loaded = self._current(), _Loaded(self._vmfb, device)
        try:
            yield
        finally:
            self._loaded = before

    def _current(self) -> "_Loaded":
        loaded = self._loaded
        if loaded.device.pid != os.getpid():
            with process_lock():
                loaded = self._loaded
                if loaded.device.pid != os.getpid():
                    loaded = self._loaded = _Loaded(self._vmfb, get_device(self._driver))
        return loaded


class _CopyDenied(Exception):
    """IREE would copy to a result's storage, which was imported for compute only."""


class _Loaded:
    """A vmfb in a VM context of its own, bound to one device of one process."""

    def __init__(self, vmfb: bytes, device: Device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._functions: dict[str, _Function] = {}
        self._copying: set[str] = set()
        try:
            self.module = iree_runtime.VmModule.copy_buffer(device.instance, vmfb)
            hal = iree_runtime.create_hal_module(device.instance, device.hal)
            self._context = iree_runtime.VmContext(device.instance, modules=[hal, self.module])
        except (RuntimeError, ValueError) as error:
            raise ExecutionError(
                f"IREE cannot load the executable on {device.uri!r}: {error}; "
                "compile it for this device, with the compiler of the installed runtime's release"
            ) from error
        abandon_after_fork(self)

    def invoke(self, name: str, arguments: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Call `name` with every tensor as an argument, results' storage last."""
        function = self._function(name)
        function.check_results(results)
        imported = [self._import(name, index, tensor) for index, tensor in enumerate(arguments)]
        first = len(imported)
        if name not in self._copying:
            try:
                storages = [self._import(name, first + index, tensor) for index, tensor in enumerate(results)]
                return self._call(function, [*imported, *storages])
            except _CopyDenied:
                # Nothing ran: IREE refuses before it begins.
                self._copying.add(name)
        self._call(function, [*imported, *(self._import_for_copies(name, i, t) for i, t in enumerate(results))])

    def _call(self, function: "_Function", views: Sequence[Any]) -> None:
        packed = iree_runtime.VmVariantList(len(views))
        for view in views:
            packed.push_ref(view.ref)
        # A VM context keeps state in its modules, so that one call may be in it at a time.
        with self._lock:
            try:
                self._context.invoke(function.handle, packed, iree_runtime.VmVariantList(0))
            except (RuntimeError, ValueError, IndexError) as error:
                if "DISCARD_WRITE" in str(error) and function.name not in self._copying:
                    raise _CopyDenied from error
                raise ExecutionError(
                    f"{function.name}: IREE reports: {error}\nThe function is declared as: {function.declaration}"
                ) from error

    def _import_for_copies(self, name: str, index: int, tensor: torch.Tensor) -> Any:
        """Storage that IREE may fill and copy to, as where a result is an argument, a constant or put together from
        pieces.

        What comes by dlpack may be written by compute only; importing a host allocation takes 13 us instead of half of
        one.
        """
        view = self._import(name, index, tensor)
        if tensor.numel() == 0:
            return view
        memory = iree_runtime.MemoryType.HOST_LOCAL | iree_runtime.MemoryType.DEVICE_VISIBLE
        usage = iree_runtime.BufferUsage.DEFAULT | iree_runtime.BufferUsage.MAPPING
        data = tensor.reshape(-1).view(torch.uint8).numpy()
        buffer = self.device.hal.allocator.import_host_allocation(data, int(memory), int(usage))
        return iree_runtime.HalBufferView(buffer, list(tensor.shape), view.element_type)

    def _function(self, name: str) -> "_Function":
        function = self._functions.get(name)
        if function is None:
            handle = self.module.lookup_function(name)
            if handle is None:
                raise ExecutionError(f"no function {name!r} in the executable; it has {self.module.function_names}")
            declaration = handle.reflection.get("iree.abi.declaration", "")
            function = self._functions[name] = _Function(name, handle, declaration, parse_results(declaration))
        return function

    def _import(self, name: str, index: int, tensor: torch.Tensor) -> Any:
        hal = self.device.hal
        element_type = _BYTE_DTYPES.get(tensor.dtype)
        try:
            if element_type is None:
                return hal.from_dlpack_capsule(to_dlpack(tensor))
            view = hal.from_dlpack_capsule(to_dlpack(tensor.view(torch.uint8)))
        except (RuntimeError, ValueError, IndexError, BufferError) as error:
            raise ExecutionError(
                f"{name}: IREE cannot take tensor {index}, {tensor.dtype} {list(tensor.shape)} on {tensor.device}: "
                f"{error}"
            ) from error
        return iree_runtime.HalBufferView(view.get_buffer(), list(tensor.shape), element_type)


@dataclass(frozen=True)
class _Function:
    name: str
    handle: Any
    declaration: str
    results: tuple[DeclaredTensor, ...]

    def check_results(self, results: Sequence[torch.Tensor]) -> None:
        """IREE looks at the type of arguments, but of storage for results only at the number of bytes."""
        for index, (tensor, declared) in enumerate(zip(results, self.results, strict=False)):
            if not declared.fits(tensor):
                given = f"{tensor.dtype} {list(tensor.shape)}"
                raise ExecutionError(f"{self.name}: result {index} is {given}, but the function writes {declared}")


def allocate_results(specs: Sequence[TensorSpec], device: str | torch.device = "cpu") -> list[torch.Tensor]:
    """Uninitialized tensors for `specs`, in order: contiguous, aligned to `ALIGNMENT` bytes, no storage shared.

    Raises:
        ExecutionError: a spec has a dtype that torch does not know, or a size below zero.
    """
    return [_allocate(spec, device) for spec in specs]


def _allocate(spec: TensorSpec, device: str | torch.device) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ExecutionError(f"result {spec.name!r} has dtype {spec.dtype!r}, which torch does not know")
    if any(size < 0 for size in spec.shape):
        raise ExecutionError(f"result {spec.name!r} has shape {list(spec.shape)}; give its sizes before allocating it")
    tensor = torch.empty(spec.shape, dtype=dtype, device=device)
    if not is_importable(tensor):
        raise ExecutionError(
            f"torch's allocator gave storage for result {spec.name!r} that is not aligned to {ALIGNMENT} bytes"
        )
    return tensor


def is_importable(tensor: torch.Tensor) -> bool:
    """Whether IREE can use the storage of `tensor` as it lies: contiguous, aligned, its values what its bytes say."""
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0 and not (tensor.is_conj() or tensor.is_neg())


def _as_argument(
    name: str, index: int, tensor: torch.Tensor, device: Device, result_storages: set[int]
) -> torch.Tensor:
    """`tensor` without its autograd history, copied where IREE could not read it in place or would write over it."""
    _check_tensor(name, f"argument {index}", tensor, device)
    if tensor.requires_grad:
        tensor = tensor.detach()
    if is_importable(tensor) and _storage(tensor) not in result_storages:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()


def _check_results(name: str, results: Sequence[torch.Tensor], device: Device) -> set[int]:
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
                raise ExecutionError(f"{name}: result {index} shares its storage with an earlier result")
            storages.add(_storage(tensor))
    return storages


def _check_tensor(name: str, what: str, tensor: torch.Tensor, device: Device) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ExecutionError(f"{name}: {what} is {type(tensor).__name__}, not a tensor")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise ExecutionError(f"{name}: {what} is the subclass {type(tensor).__name__}; pass the tensors inside it")
    if tensor.layout is not torch.strided:
        raise ExecutionError(f"{name}: {what} has layout {tensor.layout}; pass it dense")
    if tensor.device.type != device.torch_device_type:
        raise ExecutionError(
            f"{name}: {what} is on {tensor.device}, and the program runs on {device.uri!r}, "
            f"which takes tensors on {device.torch_device_type or 'no torch device'}"
        )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
