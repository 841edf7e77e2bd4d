# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A loaded executable, called on torch tensors.

Arguments go to IREE in place when their storage allows it, results are written straight into tensors that torch
allocated: the functions called here were compiled with `iree.abi.output` on their trailing arguments.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from iree import runtime as iree_runtime
from torch.utils.dlpack import to_dlpack  # ten times faster than Tensor.__dlpack__

from retrograd.runtime.call_times import CallTimes
from retrograd.runtime.declaration import DeclaredTensor, parse_results
from retrograd.runtime.devices import (
    CALLER_DRIVER,
    DEFAULT_DRIVER,
    Device,
    DeviceError,
    abandon_after_fork,
    get_device,
    process_lock,
    torch_device_of,
)
from retrograd.runtime.manifest import TensorSpec
from retrograd.runtime.openmp import release_threads
from retrograd.runtime.staging import ResidentError, Staging
from retrograd.runtime.tensors import (
    ALIGNMENT,
    ExecutionError,
    allocate_result,
    allocate_results,
    as_argument,
    check_results,
    is_importable,
)

# What a function takes: tensors, and numbers for its sizes.
Argument: TypeAlias = torch.Tensor | int

__all__ = [
    "ALIGNMENT",
    "Argument",
    "ExecutionError",
    "OutOfDeviceMemory",
    "Program",
    "allocate_results",
    "is_importable",
]

# dlpack has no code that IREE knows for these: they cross as bytes and are named again on the other side.
_BYTE_DTYPES = {
    torch.float8_e4m3fn: iree_runtime.HalElementType.FLOAT_8_E4M3_FN,
    torch.float8_e4m3fnuz: iree_runtime.HalElementType.FLOAT_8_E4M3_FNUZ,
    torch.float8_e5m2: iree_runtime.HalElementType.FLOAT_8_E5M2,
    torch.float8_e5m2fnuz: iree_runtime.HalElementType.FLOAT_8_E5M2_FNUZ,
}


class OutOfDeviceMemory(ExecutionError, torch.OutOfMemoryError):
    """The device has no memory left for a call; it and torch's tensors on it are usable still.

    Also torch's own exception for that, which allocating results raises: one clause catches both.
    """


class Program:
    """A vmfb loaded on a device; `invoke` may be called from any thread, and from forked children.

    Calls of one program run one after another (the device works on each with all its threads); calls of two programs
    may overlap.
    """

    def __init__(self, vmfb: bytes, driver: str, *, needs_device: bool = True) -> None:
        self._vmfb = vmfb
        self._driver = driver
        self._loaded: _Loaded | None = None
        try:
            self._loaded = _Loaded(vmfb, get_device(driver))
        except DeviceError:
            if needs_device:
                raise

    @staticmethod
    def load(vmfb: bytes, *, driver: str = DEFAULT_DRIVER, needs_device: bool = True) -> "Program":
        """Load an executable on the process's device for `driver` (a driver's name, or IREE's `driver://path`).

        Where the device is not needed yet, as to compile for another machine, only a call fails for want of it.

        Raises:
            DeviceError: the driver or device cannot be opened.
            ExecutionError: IREE refuses the executable, or it holds no code for this device.
        """
        return Program(vmfb, driver, needs_device=needs_device)

    @property
    def driver(self) -> str:
        """The driver or device URI that the program was loaded for."""
        return self._driver

    @property
    def function_names(self) -> list[str]:
        """The exported functions."""
        return [name for name in self._current().module.function_names if not name.startswith("__")]

    @property
    def torch_device(self) -> torch.device:
        """Where the tensors of a call are."""
        return torch_device_of(self._driver)

    def allocate(self, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """Uninitialized tensors for a function's results, where the program runs.

        Where torch cannot reach the device's memory, residuals are tensors on torch's `meta` device: they stay there.

        Raises:
            ExecutionError: as for `allocate_results`.
        """
        device = self._current().device
        places = ["meta" if device.is_staged and s.role == "saved" else device.torch_device for s in specs]
        return [allocate_result(spec, place) for spec, place in zip(specs, places, strict=True)]

    def keep_on_device(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy tensors to the device, and from here on only when torch counts a write to them.

        Torch counts no writes through `Tensor.data` or a NumPy array that shares the memory: call this again after
        such. Where the device works on torch's own storage there is nothing to copy.
        """
        self._current().pin(tensors)

    def invoke(
        self, name: str, arguments: Sequence[Argument], results: Sequence[torch.Tensor], *, same_step: bool = False
    ) -> None:
        """Call the exported function `name` on `arguments`, then `results`, and wait until it is done.

        The shapes and dtypes of all tensors are those the function was compiled for; a number, which is a size, goes to
        IREE as a 64-bit integer. Arguments are only read; an argument that is not contiguous, not aligned to
        `ALIGNMENT`, a lazy conjugate or negative, or shares storage with a result, is copied first. Results are
        overwritten, are not seen by autograd, and must be distinct, contiguous and aligned, as those of
        `allocate_results` are. `same_step` says that the call goes on where an earlier one left off: arguments that
        were copied to a device for that one are not copied again, unless torch has counted a write to them since.

        Raises:
            ExecutionError: no such function, a tensor it does not take, or a failure while it ran.
            OutOfDeviceMemory: there is no memory left for it.
        """
        loaded = self._current()
        storages = check_results(name, results, loaded.device)
        inputs = [
            a if isinstance(a, int) else as_argument(name, index, a, loaded.device, storages)
            for index, a in enumerate(arguments)
        ]
        if loaded.device.is_staged:
            loaded.invoke_staged(name, inputs, results, same_step)
        elif loaded.times is not None:
            self._invoke_timed(loaded, loaded.times, name, inputs, results)
        else:
            with _after_torch(loaded.device.torch_device):
                _invoke_beside_torch(loaded, name, inputs, results)

    def _invoke_timed(
        self,
        loaded: "_Loaded",
        times: CallTimes,
        name: str,
        arguments: Sequence[Argument],
        results: Sequence[torch.Tensor],
    ) -> None:
        """Call on the workers with the cores to themselves, or in this thread, where that is faster."""
        start = time.perf_counter()
        in_caller = times.prefers_caller(name)
        if in_caller:
            loaded = self._in_caller(loaded)
        elif times.is_long(name):
            release_threads()
        loaded.invoke(name, arguments, results)
        times.record(name, in_caller, time.perf_counter() - start)

    def _in_caller(self, loaded: "_Loaded") -> "_Loaded":
        """The program on a device that works in the calling thread: the same code, and bit for bit the same results."""
        if loaded.in_caller is None:
            with process_lock():
                loaded.in_caller = loaded.in_caller or _Loaded(self._vmfb, get_device(CALLER_DRIVER))
        return loaded.in_caller

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
        if loaded is None or loaded.device.pid != os.getpid():
            with process_lock():
                loaded = self._loaded
                if loaded is None or loaded.device.pid != os.getpid():
                    loaded = self._loaded = _Loaded(self._vmfb, get_device(self._driver))
        return loaded


@contextlib.contextmanager
def _after_torch(place: torch.device) -> Iterator[None]:
    """Run the block after what torch has queued; it waits for its own end, so that what torch queues next is after it.

    IREE has a stream of its own, which its bindings cannot make wait for an event of torch's, nor the other way round:
    the host waits. Its calls make their device's context the thread's, which the guard undoes.
    """
    if place.type != "cuda":
        yield
        return
    with torch.cuda.device(place):
        torch.cuda.current_stream(place).synchronize()
        yield


def _invoke_beside_torch(
    loaded: "_Loaded", name: str, arguments: Sequence[Argument], results: Sequence[torch.Tensor]
) -> None:
    """Call a function; where the device's memory runs out, once more when torch has given up what it keeps unused."""
    try:
        loaded.invoke(name, arguments, results)
    except OutOfDeviceMemory:
        if loaded.device.torch_device.type != "cuda":
            raise
        # A call can be made twice: it only reads its arguments.
        torch.cuda.empty_cache()
        loaded.invoke(name, arguments, results)


class _CopyDenied(Exception):
    """IREE would copy to a result's storage, which was imported for compute only."""


class _Loaded:
    """A vmfb in a VM context of its own, bound to one device of one process."""

    def __init__(self, vmfb: bytes, device: Device) -> None:
        self.device = device
        self.times = CallTimes() if device.uri.partition("://")[0] == DEFAULT_DRIVER else None
        self.in_caller: _Loaded | None = None
        self._lock = threading.Lock()
        self._staging_lock = threading.RLock()
        self._functions: dict[str, _Function] = {}
        self._copying: set[str] = set()
        self.staging = Staging(device.hal)
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

    def invoke(self, name: str, arguments: Sequence[Argument], results: Sequence[torch.Tensor]) -> None:
        """Call `name` with every tensor as an argument, results' storage last."""
        function = self._function(name)
        function.check_results(results)
        imported = [a if isinstance(a, int) else self._import(name, i, a) for i, a in enumerate(arguments)]
        first = len(imported)
        if name not in self._copying:
            try:
                storages = [self._import(name, first + index, tensor) for index, tensor in enumerate(results)]
                return self._call(function, [*imported, *storages])
            except _CopyDenied:
                # Nothing ran: IREE refuses before it begins.
                self._copying.add(name)
        if self.device.torch_device.type == "cpu":
            self._call(function, [*imported, *(self._import_for_copies(name, i, t) for i, t in enumerate(results))])
        else:
            self._deliver(function, imported, results)

    def invoke_staged(
        self, name: str, arguments: Sequence[Argument], results: Sequence[torch.Tensor], same_step: bool
    ) -> None:
        """Call `name` on copies of the arguments on the device; what is not on torch's `meta` device comes back."""
        function = self._function(name)
        function.check_results(results)
        with self._staged(name):
            views = [a if isinstance(a, int) else self.staging.upload(a, reuse=same_step) for a in arguments]
            self._deliver(function, views, results)

    def pin(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep copies of the tensors on a device that needs copies."""
        if self.device.is_staged:
            with self._staged("to_device"):
                self.staging.pin(tensors)

    def _deliver(self, function: "_Function", arguments: Sequence[Any], results: Sequence[torch.Tensor]) -> None:
        """Call on the device's own buffers for the results, and copy from these."""
        with self._staged(function.name):
            views = [self.staging.storage(tensor) for tensor in results]
            self._call(function, [*arguments, *views])
            for tensor, view in zip(results, views, strict=True):
                self.staging.deliver(tensor, view)

    @contextlib.contextmanager
    def _staged(self, name: str) -> Iterator[None]:
        """Hold the staging's lock; a failure of its allocator's is an error of `name`'s."""
        with self._staging_lock:
            try:
                yield
            except ResidentError as error:
                raise ExecutionError(f"{name}: {error}") from error
            except ExecutionError:
                raise
            except (RuntimeError, ValueError) as error:
                raise self._failure(name, error) from error

    def _failure(self, name: str, error: Exception, declaration: str = "") -> ExecutionError:
        """The error for what IREE reports; where memory ran out, all that is held for later calls is freed."""
        if "RESOURCE_EXHAUSTED" in str(error) or "OUT_OF_MEMORY" in str(error):
            self.staging.trim()
            self.device.hal.allocator.trim()
            return OutOfDeviceMemory(
                f"{name}: {self.device.uri!r} has no memory left: {_first_line(error)}; free tensors "
                "on it, or compile with partition='budget' and a memory_budget"
            )
        declared = f"\nThe function is declared as: {declaration}" if declaration else ""
        return ExecutionError(f"{name}: IREE reports: {error}{declared}")

    def _call(self, function: "_Function", views: Sequence[Any]) -> None:
        packed = iree_runtime.VmVariantList(len(views))
        for view in views:
            if isinstance(view, int):
                packed.push_int(view)
            else:
                packed.push_ref(view.ref)
        # A VM context keeps state in its modules, so that one call may be in it at a time.
        with self._lock:
            try:
                self._context.invoke(function.handle, packed, iree_runtime.VmVariantList(0))
            except (RuntimeError, ValueError, IndexError) as error:
                if "DISCARD_WRITE" in str(error) and function.name not in self._copying:
                    raise _CopyDenied from error
                raise self._failure(function.name, error, function.declaration) from error

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


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
