# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Runs launch plans on torch's current stream: work is queued there, and nobody waits.

Scratch memory is torch's, from the pool of that stream: what torch queues next finds all done, and memory that torch
gives out again is written to only after.
"""

from __future__ import annotations

import ctypes
import io
import threading
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from retrograd.contract.launches import MEMBER, Copy, Fill, Kernel, Launches, LaunchPlan, Place, parse_launches
from retrograd.runtime.cuda_code import CudaCode, read_code
from retrograd.runtime.cuda_driver import Driver
from retrograd.runtime.declaration import ELEMENT_DTYPES
from retrograd.runtime.tensors import ExecutionError

_address_of = torch.Tensor.data_ptr


class Launcher:
    """The plans of a vmfb on one device. Safe in several threads."""

    def __init__(self, launches: Launches, codes: dict[str, CudaCode], driver: Driver, device: torch.device) -> None:
        self._launches, self._codes, self._driver, self._device = launches, codes, driver, device
        self._lock = threading.Lock()
        self._modules: dict[tuple[str, int], ctypes.c_void_p] = {}
        self._prepared: dict[str, Prepared] = {}
        # Addresses of buffers that initializers left, and the memory that they are in.
        self._globals: dict[str, int] | None = None
        self._kept: list[torch.Tensor] = []

    @staticmethod
    def open(vmfb: bytes, driver: Driver | None, device: torch.device) -> Launcher | None:
        """The launcher of a vmfb; none where it has no plans, or there is no driver.

        Raises:
            ExecutionError: the plans and the code do not fit each other.
        """
        with zipfile.ZipFile(io.BytesIO(vmfb)) as archive:
            names = archive.namelist()
            if driver is None or MEMBER not in names:
                return None
            try:
                launches = parse_launches(archive.read(MEMBER))
                plans = [*launches.initializers, *launches.functions.values()] if launches else []
                used = {step.executable for plan in plans for step in plan.steps if isinstance(step, Kernel)}
                codes = {name: read_code(archive.read(f"{name}.fb")) for name in used}
            except (ValueError, KeyError) as error:
                raise ExecutionError(f"the executable's launch plans cannot be read: {error}; compile again") from error
        return None if launches is None else Launcher(launches, codes, driver, device)

    def takes(self, name: str) -> bool:
        """Whether there is a plan of the function ``name``, on tensors of types that are known here."""
        plan = self._launches.functions.get(name)
        return plan is not None and all(a.element is None or a.element in ELEMENT_DTYPES for a in plan.arguments)

    def launch(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Queue the function ``name`` on torch's current stream, on its arguments and then storage for its results,
        which lie as IREE takes them.

        Raises:
            ExecutionError: a tensor it does not take, or the driver refused something.
            torch.OutOfMemoryError: there is no scratch memory for it.
        """
        with torch.cuda.device(self._device), self._lock:
            if self._globals is None:
                self._globals, self._kept = self._initialize()
            prepared = self._prepared.get(name)
            if prepared is None:
                prepared = self._prepare(name, self._launches.functions[name], self._globals)
                self._prepared[name] = prepared
            check_tensors(name, prepared.plan, tensors)
            self._run(prepared, tensors)

    def _initialize(self) -> tuple[dict[str, int], list[torch.Tensor]]:
        """Run all initializers; where one fails, the next call runs them anew."""
        addresses: dict[str, int] = {}
        memory: list[torch.Tensor] = []
        for number, plan in enumerate(self._launches.initializers):
            memory.append(self._run(self._prepare(f"initializer {number}", plan, addresses), ()))
            for name, offset in plan.globals.items():
                addresses[name] = memory[-1].data_ptr() + offset
        if memory:
            # Calls on other streams read them too.
            torch.cuda.current_stream(self._device).synchronize()
        return addresses, memory

    def _run(self, prepared: Prepared, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        scratch = torch.empty(prepared.plan.scratch, dtype=torch.uint8, device=self._device)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        prepared.run([*map(_address_of, tensors), scratch.data_ptr()], stream)
        return scratch

    def _prepare(self, name: str, plan: LaunchPlan, globals_: dict[str, int]) -> Prepared:
        return Prepared(name, plan, self._driver, self._function, globals_)

    def _function(self, step: Kernel) -> tuple[ctypes.c_void_p, tuple[int, int, int], int]:
        """A kernel, its block and its shared memory; its module is loaded once."""
        code = self._codes[step.executable]
        entry = code.entries.get(step.entry)
        if entry is None or (entry.bindings, entry.constants) != (len(step.bindings), len(step.constants)):
            raise ExecutionError(f"the executable's launch plans and its kernel {step.entry!r} do not fit each other")
        key = step.executable, entry.module
        if key not in self._modules:
            self._modules[key] = self._driver.load_module(code.modules[entry.module])
        return self._driver.find_function(self._modules[key], step.entry, entry.shared), entry.block, entry.shared


class Prepared:
    """A plan whose calls of the driver are put together: what differs from call to call are addresses and the stream.

    Addresses and constants are 64-bit cells of one array, which kernels' parameters point to; the driver has read them
    when a launch returns. The caller sees to it that one call at a time runs.
    """

    def __init__(
        self,
        name: str,
        plan: LaunchPlan,
        driver: Driver,
        function: Callable[[Kernel], tuple[ctypes.c_void_p, tuple[int, int, int], int]],
        globals_: dict[str, int],
    ) -> None:
        self.plan = plan
        self._name, self._driver = name, driver
        self._globals = globals_
        self._scratch = len(plan.arguments)
        self._fixed = self._scratch + 1
        places = [self._split(place) for step in plan.steps for place in _places(step)]
        constants = [c for step in plan.steps if isinstance(step, Kernel) for c in step.constants]
        self._count = len(places)
        self._cells = np.array([*[0] * len(places), *constants], dtype=np.uint64)
        self._bases = np.array([base for base, _ in places], dtype=np.intp)
        self._offsets = np.array([offset for _, offset in places], dtype=np.uint64)
        self._calls = self._make_calls(function)

    def _split(self, place: Place) -> tuple[int, int]:
        """The number of an address among those of a call, and what to add; the last one is 0."""
        if place.base == "argument":
            return int(place.which), place.offset
        if place.base == "scratch":
            return self._scratch, place.offset
        return self._fixed, self._globals[str(place.which)] + place.offset

    def _make_calls(self, function: Callable[[Kernel], Any]) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []
        cell, constant = 0, self._count
        start = self._cells.ctypes.data
        for step in self.plan.steps:
            if isinstance(step, Kernel):
                handle, block, shared = function(step)
                numbers = [*range(cell, cell + len(step.bindings)), *range(constant, constant + len(step.constants))]
                pointers = (ctypes.c_void_p * len(numbers))(*(start + 8 * number for number in numbers))
                calls.append((step, (handle, *step.grid, *block, shared), pointers, cell))
                constant += len(step.constants)
            else:
                calls.append((step, None, None, cell))
            cell += len(_places(step))
        return calls

    def run(self, addresses: Sequence[int], stream: int) -> None:
        """Queue it on a stream, with addresses of its arguments and then of its scratch memory.

        Raises:
            ExecutionError: the driver refused something; names it.
        """
        bases = np.array([*addresses, 0], dtype=np.uint64)
        self._cells[: self._count] = bases[self._bases] + self._offsets
        launch = self._driver.launch
        for step, fixed, pointers, cell in self._calls:
            if fixed is not None:
                status = launch(*fixed, stream, pointers, None)
            elif isinstance(step, Copy):
                status = self._driver.copy(int(self._cells[cell + 1]), int(self._cells[cell]), step.length, stream)
            else:
                count = step.length // step.width
                status = self._driver.fills[step.width](int(self._cells[cell]), step.pattern, count, stream)
            if status:
                self._driver.check(status, f"queue {_describe(step)} of {self._name}")


def _places(step: Kernel | Fill | Copy) -> tuple[Place, ...]:
    if isinstance(step, Kernel):
        return step.bindings
    return (step.target,) if isinstance(step, Fill) else (step.source, step.target)


def _describe(step: Kernel | Fill | Copy) -> str:
    return f"kernel {step.entry}" if isinstance(step, Kernel) else f"a {type(step).__name__.lower()}"


def check_tensors(name: str, plan: LaunchPlan, tensors: Sequence[torch.Tensor]) -> None:
    """Raise :class:`ExecutionError` where a tensor is not what the plan was made for."""
    if len(tensors) != len(plan.arguments):
        raise ExecutionError(f"{name}: takes {len(plan.arguments)} tensors with its results, not {len(tensors)}")
    for index, (tensor, expected) in enumerate(zip(tensors, plan.arguments, strict=True)):
        known = expected.element is None or tensor.dtype in ELEMENT_DTYPES[expected.element]
        if not known or expected.shape not in (None, tuple(tensor.shape)) or tensor.nbytes < expected.bytes:
            given = f"{tensor.dtype} {list(tensor.shape)}"
            raise ExecutionError(f"{name}: tensor {index} is {given}, but the function takes {expected}")
