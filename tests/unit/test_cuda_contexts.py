# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Threads that call CUDA's driver, which stands in here: it has a current context for each thread, as CUDA's has."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from retrograd.contract.launches import Expected, Fill, Kernel, Launches, LaunchPlan, Place
from retrograd.runtime.cuda import driver
from retrograd.runtime.cuda.code import CudaCode, Entry
from retrograd.runtime.cuda.driver import Driver, entered
from retrograd.runtime.cuda.launcher import Launcher
from retrograd.runtime.programs.errors import ExecutionError

INVALID_CONTEXT = 201
# What needs no context.
FREE = ("cuGetErrorName", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuCtxGetCurrent")
# Contexts of device 0 and 1, and one of device 0 that is not its primary one.
CONTEXTS = {100: 0, 101: 1}
GREEN = {900: 0}


class Function:
    """A function of the driver, which counts its calls in a context."""

    def __init__(self, library: ThreadedLibrary, name: str) -> None:
        self.library, self.name = library, name
        self.argtypes: Any = None
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> int:
        current = self.library.current
        if self.name in FREE or self.name == "cuCtxGetDevice":
            return self.library.answer(self.name, *arguments)
        if current is None:
            return INVALID_CONTEXT
        self.library.calls.append((self.name, current))
        return 0


class ThreadedLibrary:
    """A driver of two devices: what was called in which context, where each thread has its own."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.retained: list[int] = []
        self.functions: dict[str, Function] = {}
        self._local = threading.local()

    def __getattr__(self, name: str) -> Function:
        return self.functions.setdefault(name, Function(self, name))

    @property
    def current(self) -> int | None:
        return getattr(self._local, "context", None)

    @current.setter
    def current(self, context: int | None) -> None:
        self._local.context = context

    def answer(self, name: str, *arguments: Any) -> int:
        if name == "cuDeviceGet":
            arguments[0]._obj.value = arguments[1]
            return 0 if arguments[1] in CONTEXTS.values() else INVALID_CONTEXT
        if name == "cuDevicePrimaryCtxRetain":
            self.retained.append(arguments[1].value)
            arguments[0]._obj.value = 100 + arguments[1].value
        if name == "cuCtxSetCurrent":
            self.current = arguments[0].value
        if name == "cuCtxGetCurrent":
            arguments[0]._obj.value = self.current
        if name == "cuCtxGetDevice":
            if self.current is None:
                return INVALID_CONTEXT
            arguments[0]._obj.value = (CONTEXTS | GREEN)[self.current]
        return 0


class TorchDevices(threading.local):
    """torch's current device, of each thread: its guards set it, and change no context of the driver's."""

    number = 0

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Any:
        before, self.number = self.number, self.number if device.index is None else device.index
        try:
            yield
        finally:
            self.number = before


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> TorchDevices:
    """Stands for torch's devices, where torch has none."""
    devices = TorchDevices()
    monkeypatch.setattr(torch.cuda, "device", devices.device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices.number)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: devices.number, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda number: 40 + number, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=40 + device.index))
    monkeypatch.setattr(torch, "empty", lambda size, **_: torch.zeros(size, dtype=torch.uint8))
    return devices


def in_a_new_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


PLAN = LaunchPlan(
    (Expected((4,), "f32", 16),),
    16,
    (Fill(Place("scratch", "", 0), 16, 0, 4), Kernel("m", "k", (1, 1, 1), (Place("argument", 0, 0),), ())),
)


def launcher_on(number: int, library: ThreadedLibrary) -> Launcher:
    code = CudaCode((b"\0",), {"k": Entry(0, (1, 1, 1), 0, 1, 0)})
    return Launcher(Launches((), {"f": PLAN}, {}), {"m": code}, Driver(library), torch.device("cuda", number))


def test_the_driver_refuses_a_thread_without_a_context() -> None:
    driver = Driver(ThreadedLibrary())
    with pytest.raises(ExecutionError, match="failed to load its kernels: 201"):
        driver.load_module(b"\0")


@pytest.mark.parametrize("number", [0, 1])
def test_a_plan_runs_in_its_devices_context_in_any_thread(number: int, devices: TorchDevices) -> None:
    library = ThreadedLibrary()
    launcher, tensor = launcher_on(number, library), torch.zeros(4)
    for _ in range(2):
        in_a_new_thread(lambda: launcher.launch("f", [tensor]))
    assert [name for name, _ in library.calls] == [
        "cuModuleLoadData",
        "cuModuleGetFunction",
        *["cuMemsetD32Async", "cuLaunchKernelEx"] * 2,
    ]
    assert {context for _, context in library.calls} == {100 + number}
    assert library.retained == [number]


def test_a_plan_of_one_device_in_a_thread_of_anothers(devices: TorchDevices) -> None:
    library = ThreadedLibrary()
    launcher, tensor = launcher_on(1, library), torch.zeros(4)
    # As IREE leaves it, or a plan of the other device.
    library.current = 100
    launcher.launch("f", [tensor])
    assert {context for _, context in library.calls} == {101}


def test_a_context_of_the_same_device_is_left(devices: TorchDevices) -> None:
    library = ThreadedLibrary()
    launcher = launcher_on(0, library)
    library.current = 900
    launcher.launch("f", [torch.zeros(4)])
    assert {context for _, context in library.calls} == {900} and library.current == 900


def test_the_short_way_enters_too(devices: TorchDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward that was launched in one thread is queued in another, in which nothing ran yet."""
    library = ThreadedLibrary()
    launcher, tensor = launcher_on(1, library), torch.zeros(4)
    launcher.launch("f", [tensor])
    queued = launcher.queued_call("f")
    assert queued is not None
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 1)
    library.calls.clear()

    def call() -> bool:
        devices.number = 1
        return queued([tensor], [])

    assert in_a_new_thread(call)
    assert library.calls == [("cuMemsetD32Async", 101), ("cuLaunchKernelEx", 101)]


def test_a_block_on_a_device(devices: TorchDevices) -> None:
    library = ThreadedLibrary()
    driver = Driver(library)
    with entered(torch.device("cuda", 1), driver):
        assert library.current == 101
        # Without a number it is the current device.
        with entered(torch.device("cuda"), driver):
            driver.load_module(b"\0")
        with entered(torch.device("cuda", 0), driver):
            driver.load_module(b"\0")
    assert [context for _, context in library.calls] == [101, 100]


def test_a_device_that_is_not_there(devices: TorchDevices) -> None:
    with (
        pytest.raises(ExecutionError, match="failed to find device 2: 201"),
        entered(torch.device("cuda", 2), Driver(ThreadedLibrary())),
    ):
        pytest.fail("the block ran")


def test_a_machine_without_a_driver(devices: TorchDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "open_driver", lambda: None)
    with entered(torch.device("cuda", 0)):
        assert devices.number == 0
