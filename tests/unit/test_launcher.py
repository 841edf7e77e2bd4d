# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Launch plans through a driver that writes down what it is asked for."""

import contextlib
import ctypes
import threading
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from retrograd.contract.launches import Copy, Expected, Fill, Kernel, Launches, LaunchPlan, Place, Write
from retrograd.runtime.cuda.code import read_code
from retrograd.runtime.cuda.driver import Driver
from retrograd.runtime.cuda.launcher import Launcher, check_tensors
from retrograd.runtime.cuda.prepared_plan import PreparedPlan
from retrograd.runtime.cuda.queued_call import QueuedCall
from retrograd.runtime.cuda.replayed_plan import ReplayedPlan
from retrograd.runtime.programs.errors import ExecutionError
from retrograd.runtime.programs.tensors import ALIGNMENT


class Function:
    """A function of the library: writes down its calls, and fails where it is told to."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]]) -> None:
        self.name, self.calls, self.status = name, calls, 0
        self.argtypes: Any = None
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> int:
        if self.name == "cuLaunchKernelEx":
            reference, _, pointers, _ = arguments
            config = reference._obj
            read = [ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint64))[0] for pointer in pointers]
            arguments = (*config.grid, *config.block, config.shared, config.stream, read)
        if self.name == "cuStreamGetCaptureInfo_v2":
            *_, before, count = arguments
            # Each step has the next node.
            asked = sum(name == self.name for name, *_ in self.calls)
            before._obj.contents = self.node = ctypes.c_void_p(701 + asked)
            count._obj.value = 1
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


def prepare(library: Library) -> PreparedPlan:
    return PreparedPlan("f", PLAN, Driver(library), lambda step: (ctypes.c_void_p(5), (32, 1, 1), 64), {"table": 9000})


def test_steps_are_queued_in_order_with_the_addresses_of_the_call() -> None:
    library = Library()
    prepared = prepare(library)
    assert library.calls == []
    for first, stream in ((1000, 42), (3000, 42), (3000, 43)):
        library.calls.clear()
        prepared.run([first, 2000, 5000], stream)
        assert library.calls == [
            ("cuMemsetD32Async", 5016, 0xFF, 2, stream),
            ("cuLaunchKernelEx", 4, 2, 1, 32, 1, 1, 64, stream, [2008, 5016, 7, 9]),
            ("cuMemcpyDtoDAsync_v2", first, 5016, 8, stream),
            ("cuMemcpyDtoDAsync_v2", first + 8, 9004, 8, stream),
        ]


def test_constants_are_written_from_the_host() -> None:
    library = Library()
    plan = LaunchPlan((), 64, (Write(Place("scratch", "", 16), b"table"),), {"table": 16})
    PreparedPlan("initializer 0", plan, Driver(library), lambda step: None, {}).run([5000], 42)  # type: ignore[arg-type, return-value]
    assert library.calls == [("cuMemcpyHtoDAsync_v2", 5016, b"table", 5, 42)]


def test_what_the_driver_refuses_is_named() -> None:
    library = Library()
    prepared = prepare(library)
    library.functions["cuLaunchKernelEx"].status = 1
    with pytest.raises(ExecutionError, match="failed to queue kernel k of f: 1"):
        prepared.run([1000, 2000, 5000], 42)
    assert [name for name, *_ in library.calls] == ["cuMemsetD32Async", "cuLaunchKernelEx", "cuGetErrorName"]


def test_bytes_are_taken_whatever_their_sign() -> None:
    """IREE's types of integers have no sign: those of ``torch.uint8`` are ``i8``."""
    plan = LaunchPlan((Expected((4,), "i8", 4),), 0, ())
    for dtype in (torch.uint8, torch.int8):
        check_tensors("f", plan, [torch.zeros(4, dtype=dtype)])
    for wrong in (torch.zeros(4, dtype=torch.bool), torch.zeros(5, dtype=torch.uint8)):
        with pytest.raises(ExecutionError, match="but the function takes"):
            check_tensors("f", plan, [wrong])


def queued(library: Library, **parts: Any) -> QueuedCall:
    """Of a plan that copies its first argument to its result; torch's CPU has number -1."""
    kernel = Kernel("m", "k", (1, 1, 1), tuple(Place("argument", i, 0) for i in range(3)), ())
    plan = LaunchPlan(
        (Expected((4,), "f32", 16), Expected(None, "complex<f32>", 8), Expected((4,), "f32", 16)), 64, (kernel,)
    )
    prepared = PreparedPlan("f", plan, Driver(library), lambda step: (ctypes.c_void_p(5), (1, 1, 1), 0), {})
    given = {
        "current": lambda: -1,
        "enter": lambda device: None,
        "stream": lambda device: 42 - device,
        "allocate": Mock(wraps=torch.empty),
        **parts,
    }
    return QueuedCall(ReplayedPlan(prepared, Driver(library)), -1, threading.Lock(), **given)


def test_tensors_that_lie_as_the_plan_takes_them_are_queued() -> None:
    library = Library()
    call = queued(library)
    x, number, result = torch.nn.Parameter(torch.ones(4)), torch.zeros(3, dtype=torch.complex64), torch.zeros(4)
    assert call([x, number], [result])
    addresses = [t.data_ptr() for t in (x, number, result)]
    assert library.calls == [("cuLaunchKernelEx", 1, 1, 1, 1, 1, 1, 0, 43, addresses)]


def test_tensors_of_the_forms_of_an_earlier_call_are_queued_where_they_lie_now() -> None:
    library = Library()
    call = queued(library)
    for step in range(3):
        # The first one lies otherwise than the plan reads it: it is a copy at each call.
        x, number, result = torch.arange(8.0)[::2] + step, torch.zeros(1, dtype=torch.complex64), torch.zeros(4)
        strided = torch.stack([x, x], 1)[:, 0]
        assert call([strided, number], [result])
        copied, *others = library.calls[-1][-1]
        assert others == [number.data_ptr(), result.data_ptr()]
        assert copied not in (0, strided.data_ptr())
    # One of the same forms that is not aligned, and one whose memory was freed.
    assert call([x, torch.zeros(4, dtype=torch.complex64)[1:2]], [result])
    assert library.calls[-1][-1][1] % ALIGNMENT == 0
    number.untyped_storage().resize_(0)
    assert not call([strided, number], [result])


NUMBER = torch.zeros(1, dtype=torch.complex64)


@pytest.mark.parametrize(
    "arguments",
    [
        [torch.ones(4)],
        [torch.ones(4), 3],
        [torch.ones(5), NUMBER],
        [torch.ones(4, dtype=torch.float64), NUMBER],
        [torch.ones(4), torch.zeros(0, dtype=torch.complex64)],
        [torch.ones(4, device="meta"), NUMBER],
        [torch._efficientzerotensor((4,)), NUMBER],
        [torch.ones(4).to_sparse(), NUMBER],
    ],
)
def test_other_tensors_go_the_long_way(arguments: list[Any]) -> None:
    library = Library()
    assert not queued(library)(arguments, [torch.zeros(4)])
    assert library.calls == []


@pytest.mark.parametrize(
    "argument",
    [torch.arange(8.0)[::2], torch.arange(8.0)[1:5], torch._neg_view(torch.arange(4.0))],
    ids=["strided", "not aligned", "negative"],
)
def test_tensors_that_lie_otherwise_are_copied(argument: torch.Tensor) -> None:
    library = Library()
    call = queued(library)
    read: list[torch.Tensor] = []
    launch = library.functions["cuLaunchKernelEx"]

    def look(*arguments: Any) -> int:
        address = ctypes.cast(arguments[2][0], ctypes.POINTER(ctypes.c_uint64))[0]
        assert address % ALIGNMENT == 0
        read.append(torch.tensor((ctypes.c_float * 4).from_address(address)))
        return 0

    call.plan._prepared._driver.launch = look
    assert call([argument, NUMBER], [torch.zeros(4)])
    assert torch.equal(read[0], argument)
    assert launch.calls == []


def test_tensors_of_a_transform_go_the_long_way() -> None:
    library, seen = Library(), list[bool]()
    call = queued(library)

    def transformed(x: torch.Tensor) -> torch.Tensor:
        seen.append(call([x, NUMBER], [torch.zeros(4)]))
        return x

    torch.vmap(transformed)(torch.ones(2, 4))
    assert seen == [False]
    assert library.calls == []


def test_other_devices_and_full_memory_go_the_long_way() -> None:
    library = Library()
    assert not queued(library, current=lambda: 0)([torch.ones(4), NUMBER], [torch.zeros(4)])
    full = Mock(side_effect=torch.OutOfMemoryError("full"))
    assert not queued(library, allocate=full)([torch.ones(4), NUMBER], [torch.zeros(4)])
    assert full.called
    assert library.calls == []


def test_initializers_that_failed_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call for which memory runs out is made once more when torch has given up what it keeps unused."""
    initializer = LaunchPlan((), 64, (), globals={"table": 16})
    plan = LaunchPlan((), 0, (Fill(Place("global", "table", 4), 4, 0, 4),))
    library = Library()
    launcher = Launcher(Launches((initializer,), {"f": plan}, {}), {}, Driver(library), torch.device("cuda", 0))
    memory, waits = torch.empty(64, dtype=torch.uint8), list[str]()
    outcomes: list[Any] = [torch.OutOfMemoryError("full"), memory]

    def run(self: Launcher, prepared: PreparedPlan, tensors: Any) -> Any:
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
    queued = [call for call in library.calls if call[0].startswith("cuMem")]
    assert queued == [("cuMemsetD32Async", memory.data_ptr() + 20, 0, 1, 42)] * 2
    assert waits == ["wait"] and not outcomes


def test_code_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="not in IREE's format for CUDA"):
        read_code(b"\x7fELF" + bytes(200))
    with pytest.raises(ValueError, match="damaged"):
        read_code(b"CDA1" + bytes(60) + b"\x0c\x00\x00\x00CDA1")
