# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Launch plans through a driver that writes down what it is asked for."""

import contextlib
import ctypes
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from retrograd.contract.launches import Copy, Expected, Fill, Kernel, Launches, LaunchPlan, Place
from retrograd.runtime.cuda_code import read_code
from retrograd.runtime.cuda_driver import Driver
from retrograd.runtime.launcher import Launcher, Prepared, check_tensors
from retrograd.runtime.tensors import ExecutionError


class Function:
    """A function of the library: writes down its calls, and fails where it is told to."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]]) -> None:
        self.name, self.calls, self.status = name, calls, 0
        self.argtypes: Any = None
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> int:
        if self.name == "cuLaunchKernel":
            pointers = arguments[9]
            read = [ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint64))[0] for pointer in pointers]
            arguments = (*arguments[1:9], read)
        self.calls.append((self.name, *arguments))
        return self.status


class Library:
    """Has a function of every name."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.functions: dict[str, Function] = {}

    def __getattr__(self, name: str) -> Function:
        return self.functions.setdefault(name, Function(name, self.calls))


PLAN = LaunchPlan(
    (Expected(), Expected()),
    256,
    (
        Fill(Place("scratch", "", 16), 8, 0xFF, 4),
        Kernel("m", "k", (4, 2, 1), (Place("argument", 1, 8), Place("scratch", "", 16)), (7, 9)),
        Copy(Place("scratch", "", 16), Place("argument", 0, 0), 8),
        Copy(Place("global", "table", 4), Place("argument", 0, 8), 8),
    ),
)


def prepare(library: Library) -> Prepared:
    return Prepared("f", PLAN, Driver(library), lambda step: (ctypes.c_void_p(5), (32, 1, 1), 64), {"table": 9000})


def test_steps_are_queued_in_order_with_the_addresses_of_the_call() -> None:
    library = Library()
    prepared = prepare(library)
    assert library.calls == []
    for first in (1000, 3000):
        library.calls.clear()
        prepared.run([first, 2000, 5000], 42)
        assert library.calls == [
            ("cuMemsetD32Async", 5016, 0xFF, 2, 42),
            ("cuLaunchKernel", 4, 2, 1, 32, 1, 1, 64, 42, [2008, 5016, 7, 9]),
            ("cuMemcpyDtoDAsync_v2", first, 5016, 8, 42),
            ("cuMemcpyDtoDAsync_v2", first + 8, 9004, 8, 42),
        ]


def test_what_the_driver_refuses_is_named() -> None:
    library = Library()
    prepared = prepare(library)
    library.functions["cuLaunchKernel"].status = 1
    with pytest.raises(ExecutionError, match="failed to queue kernel k of f: 1"):
        prepared.run([1000, 2000, 5000], 42)
    assert [name for name, *_ in library.calls] == ["cuMemsetD32Async", "cuLaunchKernel", "cuGetErrorName"]


def test_bytes_are_taken_whatever_their_sign() -> None:
    """IREE's types of integers have no sign: those of ``torch.uint8`` are ``i8``."""
    plan = LaunchPlan((Expected((4,), "i8", 4),), 0, ())
    for dtype in (torch.uint8, torch.int8):
        check_tensors("f", plan, [torch.zeros(4, dtype=dtype)])
    for wrong in (torch.zeros(4, dtype=torch.bool), torch.zeros(5, dtype=torch.uint8)):
        with pytest.raises(ExecutionError, match="but the function takes"):
            check_tensors("f", plan, [wrong])


def test_initializers_that_failed_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call for which memory runs out is made once more when torch has given up what it keeps unused."""
    initializer = LaunchPlan((), 64, (), globals={"table": 16})
    plan = LaunchPlan((), 0, (Fill(Place("global", "table", 4), 4, 0, 4),))
    library = Library()
    launcher = Launcher(Launches((initializer,), {"f": plan}, {}), {}, Driver(library), torch.device("cpu"))
    memory, waits = torch.empty(64, dtype=torch.uint8), list[str]()
    outcomes: list[Any] = [torch.OutOfMemoryError("full"), memory]

    def run(self: Launcher, prepared: Prepared, tensors: Any) -> Any:
        if prepared.plan is plan:
            prepared.run([0], 42)
            return memory
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(Launcher, "_run", run)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Mock(synchronize=lambda: waits.append("wait")))
    with pytest.raises(torch.OutOfMemoryError):
        launcher.launch("f", ())
    for _ in range(2):
        launcher.launch("f", ())
    assert library.calls == [("cuMemsetD32Async", memory.data_ptr() + 20, 0, 1, 42)] * 2
    assert waits == ["wait"] and not outcomes


def test_code_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="not in IREE's format for CUDA"):
        read_code(b"\x7fELF" + bytes(200))
    with pytest.raises(ValueError, match="damaged"):
        read_code(b"CDA1" + bytes(60) + b"\x0c\x00\x00\x00CDA1")
