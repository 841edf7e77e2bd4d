# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""IREE's devices: one per driver and process, opened when first asked for.

A forked child inherits IREE's objects but none of their threads: a call on them, and even their destruction, would wait
for ever. So the child opens devices of its own, and whatever was registered with `abandon_after_fork` is never
destroyed there.
"""

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from iree import runtime as iree_runtime
from iree.runtime import _binding as iree_binding

from retrograd.contract.errors import RetrogradError
from retrograd.runtime.cuda.driver import entered
from retrograd.runtime.programs.errors import first_line

DEFAULT_DRIVER = "local-task"
# The CPU too, in the thread that calls.
CALLER_DRIVER = "local-sync"

_TORCH_DEVICE_TYPES = {"local-task": "cpu", "local-sync": "cpu", "cuda": "cuda", "hip": "cuda"}
# Vulkan's buffers and torch's cannot be one another's: what these devices work on is copied to them and back.
_STAGED_DRIVERS = frozenset({"vulkan"})

# Flags are parsed once per process and say nothing to a driver that exists already.
_FLAGS_VARIABLE = "IREE_PY_RUNTIME_FLAGS"

# Scratch memory that is kept for the next calls: the share of a CUDA device's memory, and the number of buffers.
_KEPT_SHARE = 1 / 16
_KEPT_BUFFERS = 64


class DeviceError(RetrogradError, RuntimeError):
    """A driver or device that IREE cannot open."""


class Device:
    """An open device of IREE's, with the instance and driver that must outlive it.

    `uri` is a driver's name or IREE's `driver://path`; a process that got it in a fork, where it `is_inherited`, may
    not use it. `torch_device` is where the tensors of its callers are: it works on their storage in place, unless
    `is_staged`, when they are copied.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.is_inherited = False
        self.is_staged = is_staged(uri)
        self.torch_device = torch_device_of(uri)
        self.instance = iree_runtime.VmInstance()
        # Not the binding's cached driver: after a fork that one would be the parent's, whose workers are gone.
        self.driver = _create_driver(uri)
        try:
            self.hal = self.driver.create_device_by_uri(uri, allocators=_allocators_of(self.torch_device))
        except (RuntimeError, ValueError) as error:
            raise DeviceError(f"IREE's driver opened but device {uri!r} did not: {first_line(error)}") from error
        abandon_after_fork(self)


@dataclass(frozen=True)
class DeviceInfo:
    """One device that a driver lists, or, with `error` set, a driver that cannot be used here and why."""

    driver: str
    name: str
    path: str
    error: str | None = None


class _ProcessState:
    """Holds what belongs to one process: it is replaced, lock and all, in a forked child."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        # Those that are staged close with the last program on them: two of IREE's threads wait for a Vulkan device for
        # as long as it is open, and on lavapipe they wait by looking again and again, a whole core's time.
        self.open: weakref.WeakValueDictionary[str, Device] = weakref.WeakValueDictionary()
        self.kept: list[Device] = []
        self.is_configured = False
        self.has_one_worker = False


_state = _ProcessState()
_abandoned_after_fork: "weakref.WeakSet[Any]" = weakref.WeakSet()


def is_staged(uri: str) -> bool:
    """Whether what a device of this URI works on is copied to it and back."""
    return uri.partition("://")[0] in _STAGED_DRIVERS


def torch_device_of(uri: str) -> torch.device:
    """Where the tensors are that the device at `uri` takes; it need not be there."""
    driver, _, path = uri.partition("://")
    if _TORCH_DEVICE_TYPES.get(driver) == "cuda":
        return torch.device("cuda", int(path or 0))
    return torch.device("cpu")


def get_device(uri: str = DEFAULT_DRIVER) -> Device:
    """This process's device for `uri`, opened on the first call; one that `is_staged` is the caller's to hold.

    The number of local-task's workers is at most `torch.get_num_threads()` at the time the first device is opened.

    Raises:
        DeviceError: IREE has no such driver, or the driver finds no device.
    """
    state = _state
    device = state.open.get(uri)
    if device is None:
        with state.lock:
            device = state.open.get(uri)
            if device is None:
                device = state.open[uri] = open_device(uri)
                if not device.is_staged:
                    state.kept.append(device)
    return device


def open_device(uri: str) -> Device:
    """A device that is shared with nobody: its allocator counts its opener's bytes alone.

    Raises:
        DeviceError: as for `get_device`.
    """
    _configure()
    with made_current(torch_device_of(uri)):
        return Device(uri)


@contextlib.contextmanager
def made_current(place: torch.device) -> Iterator[None]:
    """Make a CUDA device the thread's current one during the block.

    IREE loads and runs code on the current device, whichever it was made for, and leaves its own current.

    Raises:
        DeviceError: PyTorch finds no such device, though it finds others.
    """
    if place.type != "cuda" or not torch.cuda.is_available():
        yield
        return
    if (place.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"{place}: PyTorch finds {torch.cuda.device_count()} CUDA devices, counted from 0, here")
    with entered(place):
        yield


def list_devices() -> list[DeviceInfo]:
    """Every device of every driver in this build of IREE; a driver that cannot be used is one entry with its error."""
    _configure()
    found = []
    for driver in sorted(iree_runtime.query_available_drivers()):
        try:
            listed = iree_binding.create_hal_driver(driver).query_available_devices()
        except (RuntimeError, ValueError) as error:
            found.append(DeviceInfo(driver, "", "", first_line(error)))
            continue
        if not listed:
            found.append(DeviceInfo(driver, "", "", "the driver lists no device"))
        found.extend(DeviceInfo(driver, str(device["name"]), str(device["path"])) for device in listed)
    return found


def has_one_worker() -> bool:
    """Whether local-task works with one thread, as torch did when the first device was opened."""
    return _state.has_one_worker


def process_lock() -> threading.RLock:
    """The lock under which this process opens devices and loads programs; a forked child has a new one."""
    return _state.lock


def abandon_after_fork(owner: object) -> None:
    """Let `owner`, and all it refers to, never be destroyed in a forked child."""
    _abandoned_after_fork.add(owner)


def _configure() -> None:
    with _state.lock:
        if _state.is_configured:
            return
        # IREE reports Python's own references at exit as leaks.
        iree_binding.disable_leak_checker()
        given = os.environ.get(_FLAGS_VARIABLE, "")
        if "task_topology" not in given:
            iree_binding.parse_flags(f"--task_topology_max_group_count={torch.get_num_threads()}")
            _state.has_one_worker = torch.get_num_threads() == 1
        # CUDA's own pool gives all that is free back to the driver whenever somebody waits for the device, which every
        # call does: to map its scratch memory anew took a call about a millisecond.
        if "cuda_async_allocations" not in given and "cuda" in iree_runtime.query_available_drivers():
            iree_binding.parse_flags("--cuda_async_allocations=false")
        _state.is_configured = True


def _allocators_of(place: torch.device) -> list[str] | None:
    """Lists what IREE shall put before a device's allocator, innermost first: on CUDA a cache of scratch memory, of
    bounded size. A call of which the sizes are as before takes from there what the last one gave back."""
    if place.type != "cuda" or not torch.cuda.is_available():
        return None
    kept = int(torch.cuda.get_device_properties(place).total_memory * _KEPT_SHARE)
    return [f"caching:device_local=*;{kept};{_KEPT_BUFFERS}"]


def _create_driver(uri: str) -> Any:
    try:
        return iree_binding.create_hal_driver(uri)
    except (RuntimeError, ValueError) as error:
        known = ", ".join(sorted(iree_runtime.query_available_drivers()))
        raise DeviceError(
            f"IREE cannot open driver {uri!r}: {first_line(error)}; "
            f"this build has {known} (`retrograd doctor` tells which of them work here)"
        ) from error


def _after_fork_in_child() -> None:
    global _state
    for owner in list(_abandoned_after_fork):
        # A reference that nobody gives back: the destructors behind it would join threads that the fork left behind.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
        if isinstance(owner, Device):
            owner.is_inherited = True
    _abandoned_after_fork.clear()
    _state = _ProcessState()


os.register_at_fork(after_in_child=_after_fork_in_child)
