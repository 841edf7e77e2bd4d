# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A vmfb on one device: torch's storage becomes IREE's buffers, and functions are called on these."""

from __future__ import annotations

import contextlib
import ctypes
import io
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from iree import runtime as iree_runtime
from torch.utils.dlpack import to_dlpack  # ten times faster than Tensor.__dlpack__

from retrograd.contract.archive import part_members
from retrograd.contract.attributes import (
    BWD_COPIED,
    BWD_COPIED_OUT,
    BWD_DONATED,
    BWD_FILLED,
    BWD_JOINED,
    BWD_PLACED,
)
from retrograd.runtime.cuda.driver import open_driver
from retrograd.runtime.cuda.launcher import Launcher
from retrograd.runtime.programs.arenas import Arena, read_arenas
from retrograd.runtime.programs.call_times import CallTimes
from retrograd.runtime.programs.declaration import DeclaredTensor, parse_results
from retrograd.runtime.programs.devices import DEFAULT_DRIVER, Device, abandon_after_fork, has_one_worker, made_current
from retrograd.runtime.programs.errors import ExecutionError, first_line
from retrograd.runtime.programs.placed import Placed, read_placed
from retrograd.runtime.programs.plain_call import PlainCall
from retrograd.runtime.programs.staging import ResidentError, Staging
from retrograd.runtime.programs.tensors import BINDING_ERRORS, CopyDenied

# What a function takes: tensors, and numbers for its sizes.
Argument: TypeAlias = torch.Tensor | int

# dlpack has no code that IREE knows for these: they cross as bytes and are named again on the other side.
_BYTE_DTYPES = {
    torch.float8_e4m3fn: iree_runtime.HalElementType.FLOAT_8_E4M3_FN,
    torch.float8_e4m3fnuz: iree_runtime.HalElementType.FLOAT_8_E4M3_FNUZ,
    torch.float8_e5m2: iree_runtime.HalElementType.FLOAT_8_E5M2,
    torch.float8_e5m2fnuz: iree_runtime.HalElementType.FLOAT_8_E5M2_FNUZ,
}


class OutOfDeviceMemory(ExecutionError, torch.OutOfMemoryError):
    """The device has no memory left for a call; it and torch's tensors on it are usable still. Also torch's own
    exception for that, which allocating results raises: one clause catches both."""


class Loaded:
    """A vmfb in a VM context of its own, bound to one device of one process."""

    def __init__(self, vmfb: bytes, device: Device) -> None:
        self.device = device
        self.is_timed = device.uri.partition("://")[0] == DEFAULT_DRIVER
        self.in_caller: Loaded | None = None
        self._lock = threading.Lock()
        self._staging_lock = threading.RLock()
        self._functions: dict[str, Function] = {}
        self.staging = Staging(device.hal)
        self._from_dlpack = device.hal.from_dlpack_capsule
        try:
            with made_current(device.torch_device):
                self._modules = [iree_runtime.VmModule.copy_buffer(device.instance, p) for p in _read_parts(vmfb)]
                hal = iree_runtime.create_hal_module(device.instance, device.hal)
                self._context = iree_runtime.VmContext(device.instance, modules=[hal, *self._modules])
            self._invoke = self._context.invoke
        except BINDING_ERRORS as error:
            raise ExecutionError(
                f"IREE cannot load the executable on {device.uri!r}: {error}; "
                "compile it for this device, with the compiler of the installed runtime's release"
            ) from error
        self.launcher = self._open_launcher(vmfb)
        abandon_after_fork(self)

    @property
    def function_names(self) -> list[str]:
        """The exported functions."""
        return [name for module in self._modules for name in module.function_names]

    def _open_launcher(self, vmfb: bytes) -> Launcher | None:
        place = self.device.torch_device
        return Launcher.open(vmfb, open_driver(), place) if self.device.uri.startswith("cuda") else None

    def launch(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Queue `name` on torch's current stream; `launcher` has to have a plan of it."""
        assert self.launcher is not None
        try:
            self.launcher.launch(name, tensors)
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(
                f"{name}: {self.device.uri!r} has no memory left: {first_line(error)}; free tensors "
                "on it, or compile with partition='budget' and a memory_budget"
            ) from error

    def invoke(self, name: str, arguments: Sequence[Argument], results: Sequence[torch.Tensor]) -> None:
        """Call `name` with every tensor as an argument, results' storage last."""
        function = self.function(name)
        filled = function.filled
        imported = [
            a
            if isinstance(a, int)
            else self._import_for_copies(name, i, a)
            if i in filled
            else self._import(name, i, a)
            for i, a in enumerate(arguments)
        ]
        if not function.copies:
            storages = [
                self._import_for_copies(name, len(imported) + i, tensor)
                if i in function.copied
                else self._import(name, len(imported) + i, tensor)
                for i, tensor in enumerate(results)
            ]
            with contextlib.suppress(CopyDenied), function.kept(arguments):
                self._call(function, [*imported, *storages])
                function.is_tried = True
                return None
        if self.device.torch_device.type == "cpu":
            self._call(function, [*imported, *(self._import_for_copies(name, i, t) for i, t in enumerate(results))])
        else:
            self._deliver(function, imported, results)

    def invoke_plainly(
        self,
        name: str,
        arguments: Sequence[Argument],
        results: Sequence[torch.Tensor],
        before: Callable[[], object] | None = None,
    ) -> bool:
        """Invoke a function on arguments as they come and results that were just allocated, if IREE takes the storage
        of all of them as it lies; `before` is called once those that it does not are copied. Says whether it does; if
        not, nothing has run that a second call would not do again."""
        function = self.function(name)
        if function.copies or (function.writes_over and not function.is_tried):
            return False
        return function.plain_call.run(arguments, results, before)

    def invoke_staged(
        self, name: str, arguments: Sequence[Argument], results: Sequence[torch.Tensor], same_step: bool
    ) -> None:
        """Call `name` on copies of the arguments on the device; what is not on torch's `meta` device comes back."""
        function = self.function(name)
        with self._staged(name):
            views = [a if isinstance(a, int) else self.staging.upload(a, reuse=same_step) for a in arguments]
            self._deliver(function, views, results)

    def pin(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep copies of the tensors on a device that needs copies."""
        if self.device.is_staged:
            with self._staged("to_device"):
                self.staging.pin(tensors)

    def _deliver(self, function: Function, arguments: Sequence[Any], results: Sequence[torch.Tensor]) -> None:
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
                f"{name}: {self.device.uri!r} has no memory left: {first_line(error)}; free tensors "
                "on it, or compile with partition='budget' and a memory_budget"
            )
        declared = f"\nThe function is declared as: {declaration}" if declaration else ""
        return ExecutionError(f"{name}: IREE reports: {error}{declared}")

    def _call(self, function: Function, views: Sequence[Any]) -> None:
        packed = iree_runtime.VmVariantList(len(views))
        for view in views:
            if isinstance(view, int):
                packed.push_int(view)
            else:
                packed.push_ref(view.ref)
        # Functions return the storage of their results, which a list that lived on would keep.
        returned = iree_runtime.VmVariantList(0)
        # A VM context keeps state in its modules, so that one call may be in it at a time.
        with self._lock:
            try:
                self._invoke(function.handle, packed, returned)
            except BINDING_ERRORS as error:
                raise self._explain(function, error) from error

    def _explain(self, function: Function, error: Exception) -> Exception:
        """The exception for what IREE reports of a call."""
        if "DISCARD_WRITE" in str(error) and not function.copies:
            function.copies = True
            return CopyDenied()
        return self._failure(function.name, error, function.declaration)

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
        # Memory of a tensor that was NumPy's once is no longer known to be torch's alone.
        data = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
        buffer = self.device.hal.allocator.import_host_allocation(data, int(memory), int(usage))
        return iree_runtime.HalBufferView(buffer, list(tensor.shape), view.element_type)

    def function(self, name: str) -> Function:
        """An exported function.

        Raises:
            ExecutionError: there is none of this name.
        """
        function = self._functions.get(name)
        if function is None:
            found = (module.lookup_function(name) for module in self._modules)
            handle = next((handle for handle in found if handle is not None), None)
            if handle is None:
                raise ExecutionError(f"no function {name!r} in the executable; it has {self.function_names}")
            declaration = handle.reflection.get("iree.abi.declaration", "")
            function = Function(name, handle, declaration, parse_results(declaration))
            function.donated = tuple(map(int, _said(handle, BWD_DONATED)))
            function.arenas = read_arenas(_said(handle, BWD_JOINED))
            function.placed = read_placed(_said(handle, BWD_PLACED), _said(handle, BWD_COPIED_OUT))
            copied = frozenset(map(int, _said(handle, BWD_COPIED)))
            function.filled = frozenset(map(int, _said(handle, BWD_FILLED)))
            if self.device.torch_device.type == "cpu":
                function.copied = copied
            else:
                # Memory of a device's own cannot be imported for copies.
                function.copies = bool(copied)
            explain, take_copied = partial(self._explain, function), partial(self._import_for_copies, name, 0)
            function.plain_call = PlainCall(
                self.device,
                handle,
                self._invoke,
                self._from_dlpack,
                self._lock,
                explain,
                "complex<" in declaration,
                dict.fromkeys(function.copied, take_copied),
                dict.fromkeys(function.filled, take_copied),
            )
            if self.is_timed:
                function.times = CallTimes(is_alone=has_one_worker())
            self._functions[name] = function
        return function

    def _import(self, name: str, index: int, tensor: torch.Tensor) -> Any:
        take = self._from_dlpack
        element_type = _BYTE_DTYPES.get(tensor.dtype)
        try:
            if element_type is None:
                return take(to_dlpack(tensor))
            view = take(to_dlpack(tensor.view(torch.uint8)))
        except (RuntimeError, ValueError, IndexError, BufferError) as error:
            raise ExecutionError(
                f"{name}: IREE cannot take tensor {index}, {tensor.dtype} {list(tensor.shape)} on {tensor.device}: "
                f"{error}"
            ) from error
        return iree_runtime.HalBufferView(view.get_buffer(), list(tensor.shape), element_type)


@dataclass
class Function:
    """An exported function; ``times`` are those of its calls, where they decide which threads it has. ``copied`` are
    the results that IREE copies to, ``filled`` the arguments, and ``copies`` says that there are other results, which
    nobody knew, or that such cannot be handed over; ``is_tried`` that it is known whether there are. It writes over the
    arguments of the numbers ``donated``, and over ``arenas`` of others, where its results ``placed`` then are."""

    name: str
    handle: Any
    declaration: str
    results: tuple[DeclaredTensor, ...]
    plain_call: PlainCall = field(init=False)
    times: CallTimes | None = None
    copies: bool = False
    is_tried: bool = False
    copied: frozenset[int] = frozenset()
    filled: frozenset[int] = frozenset()
    donated: tuple[int, ...] = ()
    arenas: tuple[Arena, ...] = ()
    placed: tuple[Placed, ...] = ()

    @property
    def writes_over(self) -> tuple[int, ...]:
        """The arguments that it writes over; the first of an arena is all of it."""
        return (*self.donated, *(arena.first for arena in self.arenas))

    @contextlib.contextmanager
    def kept(self, arguments: Sequence[Argument]) -> Iterator[None]:
        """A call that may be the first; where it finds that IREE copies, what it wrote over is as before. A device that
        works in the calling thread has then run all that comes before the copy."""
        given = [a for n in self.writes_over if isinstance(a := arguments[n], torch.Tensor)]
        before = [] if self.is_tried else [tensor.clone() for tensor in given]
        try:
            yield
        except CopyDenied:
            for tensor, values in zip(given, before, strict=True):
                tensor.copy_(values)
            raise

    def check_results(self, results: Sequence[torch.Tensor]) -> None:
        """IREE looks at the type of arguments, but of storage for results only at the number of bytes."""
        for index, (tensor, declared) in enumerate(zip(results, self.results, strict=False)):
            if not declared.fits(tensor):
                given = f"{tensor.dtype} {list(tensor.shape)}"
                raise ExecutionError(f"{self.name}: result {index} is {given}, but the function writes {declared}")


def _read_parts(vmfb: bytes) -> list[bytes]:
    """The parts of a program: the vmfb, and those in it."""
    if not zipfile.is_zipfile(io.BytesIO(vmfb)):
        return [vmfb]
    with zipfile.ZipFile(io.BytesIO(vmfb)) as archive:
        return [vmfb, *(archive.read(name) for name in part_members(archive.namelist()))]


def _said(handle: Any, key: str) -> list[str]:
    """Reads what the program says of a function under a key, a list with commas between."""
    return list(filter(None, handle.reflection.get(key, "").split(",")))
