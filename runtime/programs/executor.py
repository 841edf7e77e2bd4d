# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A loaded executable, called on torch tensors.

Arguments go to IREE in place when their storage allows it, results are written straight into tensors that torch
allocated: the functions called here were compiled with `iree.abi.output` on their trailing arguments.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence, Set

import torch

from retrograd.contract.roles import INTO, SAVED
from retrograd.contract.tensors import TensorSpec
from retrograd.runtime.cuda.driver import entered
from retrograd.runtime.cuda.queued_call import QueuedCall
from retrograd.runtime.programs.arenas import Arena, take_joined
from retrograd.runtime.programs.call_times import CallTimes
from retrograd.runtime.programs.copied_call import CopiedCall, is_worth_copying
from retrograd.runtime.programs.devices import (
    CALLER_DRIVER,
    DEFAULT_DRIVER,
    Device,
    DeviceError,
    get_device,
    is_staged,
    process_lock,
    torch_device_of,
)
from retrograd.runtime.programs.errors import ExecutionError
from retrograd.runtime.programs.loaded import Argument, Loaded, OutOfDeviceMemory
from retrograd.runtime.programs.openmp import release_threads
from retrograd.runtime.programs.placed import Placed, place_results
from retrograd.runtime.programs.plain_call import PlainCall
from retrograd.runtime.programs.tensors import (
    ALIGNMENT,
    allocate_result,
    allocate_results,
    as_argument,
    check_results,
    give_up,
    is_importable,
    make_allocator,
)

__all__ = [
    "ALIGNMENT",
    "Argument",
    "ExecutionError",
    "OutOfDeviceMemory",
    "Program",
    "allocate_results",
    "is_importable",
]

# Those of tensors that were allocated just now are nobody else's.
_NO_STORAGES: frozenset[int] = frozenset()


class Program:
    """A vmfb loaded on a device; `invoke` may be called from any thread, and from forked children. Calls of one program
    run one after another (the device works on each with all its threads); calls of two programs may overlap."""

    def __init__(self, vmfb: bytes, driver: str, *, needs_device: bool = True) -> None:
        self._vmfb = vmfb
        self._driver = driver
        self._loaded: Loaded | None = None
        # By name, the calls of functions that turned out to be short, in the calling thread, or that were queued: a
        # caller who knows that they take as long each time needs nothing more.
        self.short_calls: dict[str, PlainCall | QueuedCall] = {}
        try:
            self._loaded = Loaded(vmfb, get_device(driver))
        except DeviceError:
            if needs_device:
                raise

    @staticmethod
    def load(vmfb: bytes, *, driver: str = DEFAULT_DRIVER, needs_device: bool = True) -> Program:
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
        return [name for name in self._current().function_names if not name.startswith("__")]

    @property
    def torch_device(self) -> torch.device:
        """Where the tensors of a call are."""
        return torch_device_of(self._driver)

    @property
    def is_staged(self) -> bool:
        """Whether residuals stay in memory of the program's own, where no other program finds them."""
        return is_staged(self._driver)

    def allocate(self, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """Uninitialized tensors for a function's results, where the program runs.

        Where torch cannot reach the device's memory, residuals are tensors on torch's `meta` device: they stay there.

        Raises:
            ExecutionError: as for `allocate_results`.
        """
        return [allocate_result(spec, self._place(spec)) for spec in specs]

    def make_allocators(self, specs: Sequence[TensorSpec]) -> list[Callable[[], torch.Tensor]]:
        """Makes functions that allocate a function's results as `allocate` does, for many calls.

        Raises:
            ExecutionError: as for `allocate_results`.
        """
        return [make_allocator(spec, self._place(spec)) for spec in specs]

    def _place(self, spec: TensorSpec) -> torch.device | str:
        device = self._current().device
        return "meta" if device.is_staged and spec.role == SAVED else device.torch_device

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
        function = loaded.function(name)
        function.check_results(results)
        if not function.writes_over:
            return self._invoke(loaded, name, arguments, results, storages, same_step)
        arguments = [*arguments]
        give_up(arguments, function.donated)
        take_joined(arguments, function.arenas)
        self._invoke(loaded, name, arguments, results, storages, same_step)
        found = [*results]
        place_results(function.placed, arguments, found)
        for placed in function.placed:
            results[placed.result].copy_(found[placed.result])
        return None

    def invoke_on_new(
        self, name: str, arguments: Sequence[Argument], results: Sequence[torch.Tensor], *, same_step: bool = False
    ) -> None:
        """Invoke a function on results that were allocated just now, as the function declares them, which are not
        checked; and for arguments that it may write over, where it does (`donated`).

        Raises:
            ExecutionError, OutOfDeviceMemory: as for `invoke`.
        """
        self._invoke(self._current(), name, arguments, results, _NO_STORAGES, same_step)

    def donated(self, name: str) -> tuple[tuple[int, ...], tuple[Placed, ...]]:
        """The arguments, by number, that a function writes over: a call of it works in their memory; and its results
        that lie there, and not in the storage given."""
        function = self._current().function(name)
        return function.donated, function.placed

    def arenas(self, name: str) -> tuple[Arena, ...]:
        """Which arguments a function takes one behind another, in a storage that it writes over, and where."""
        return self._current().function(name).arenas

    def queues(self, names: Sequence[str]) -> bool:
        """Whether calls of all these functions, on storage for their results, queue their work and wait for nothing."""
        launcher = self._current().launcher
        return launcher is not None and all(launcher.takes(name + INTO) for name in names)

    def check_results(self, name: str, results: Sequence[torch.Tensor]) -> None:
        """See that the function `name` can write its results to tensors of these shapes and dtypes.

        Raises:
            ExecutionError: it cannot, or there is no such function.
        """
        self._current().function(name).check_results(results)

    def _invoke(
        self,
        loaded: Loaded,
        name: str,
        arguments: Sequence[Argument],
        results: Sequence[torch.Tensor],
        storages: Set[int],
        same_step: bool,
    ) -> None:
        times = loaded.function(name).times
        if times is not None:
            return self._invoke_timed(loaded, times, name, arguments, results, storages)
        device = loaded.device
        inputs = _as_arguments(name, arguments, device, storages)
        if device.is_staged:
            return loaded.invoke_staged(name, inputs, results, same_step)
        if loaded.launcher is not None and loaded.launcher.takes(name):
            loaded.launch(name, [tensor for tensor in (*inputs, *results) if isinstance(tensor, torch.Tensor)])
            if name not in self.short_calls and (queued := loaded.launcher.queued_call(name)) is not None:
                self.short_calls[name] = queued
            return None
        with _after_torch(device.torch_device):
            return _invoke_beside_torch(loaded, name, inputs, results)

    def _invoke_timed(
        self,
        loaded: Loaded,
        times: CallTimes,
        name: str,
        arguments: Sequence[Argument],
        results: Sequence[torch.Tensor],
        storages: Set[int],
    ) -> None:
        """Call on the workers with the cores to themselves, or in this thread, where that is faster."""
        start = time.perf_counter()
        in_caller = times.prefers_caller
        if in_caller:
            loaded = self._in_caller(loaded)
        # After arguments are copied, which torch does with threads.
        before = release_threads if times.is_long and not in_caller else None
        if storages or not loaded.invoke_plainly(name, arguments, results, before):
            inputs = _as_arguments(name, arguments, loaded.device, storages)
            if before is not None:
                before()
            loaded.invoke(name, inputs, results)
        times.record(in_caller, time.perf_counter() - start)
        if times.is_short and name not in self.short_calls and not (function := loaded.function(name)).copies:
            short = function.plain_call
            if is_worth_copying(arguments, results):
                is_careless = bool(function.writes_over or function.placed)
                short = CopiedCall(short, arguments, results, function.placed, is_careless)
            self.short_calls[name] = short

    def _in_caller(self, loaded: Loaded) -> Loaded:
        """The program on a device that works in the calling thread: the same code, and bit for bit the same results."""
        if loaded.in_caller is None:
            with process_lock():
                loaded.in_caller = loaded.in_caller or Loaded(self._vmfb, get_device(CALLER_DRIVER))
        return loaded.in_caller

    @contextlib.contextmanager
    def on_device(self, device: Device) -> Iterator[None]:
        """Run the program, in all threads, on another device during the block; it is loaded there anew.

        Raises:
            ExecutionError: as for `load`.
        """
        before, self._loaded = self._current(), Loaded(self._vmfb, device)
        # Who asks for a device of his own reads its allocator's counts, and plans take their memory from torch's.
        self._loaded.launcher = None
        short, self.short_calls = self.short_calls, {}
        try:
            yield
        finally:
            self._loaded, self.short_calls = before, short

    def _current(self) -> Loaded:
        loaded = self._loaded
        if loaded is None or loaded.device.is_inherited:
            with process_lock():
                loaded = self._loaded
                if loaded is None or loaded.device.is_inherited:
                    loaded = self._loaded = Loaded(self._vmfb, get_device(self._driver))
        return loaded


def _as_arguments(name: str, arguments: Sequence[Argument], device: Device, storages: Set[int]) -> list[Argument]:
    return [a if isinstance(a, int) else as_argument(name, i, a, device, storages) for i, a in enumerate(arguments)]


@contextlib.contextmanager
def _after_torch(place: torch.device) -> Iterator[None]:
    """Run the block after what torch has queued; it waits for its own end, so that what torch queues next is after it.

    IREE has a stream of its own, which its bindings cannot make wait for an event of torch's, nor the other way round:
    the host waits.
    """
    if place.type != "cuda":
        yield
        return
    with entered(place):
        torch.cuda.current_stream(place).synchronize()
        yield


def _invoke_beside_torch(
    loaded: Loaded, name: str, arguments: Sequence[Argument], results: Sequence[torch.Tensor]
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
