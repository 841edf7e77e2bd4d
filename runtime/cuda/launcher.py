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
from collections.abc import Sequence

import torch

from retrograd.contract.launches import MEMBER, Kernel, Launches, LaunchPlan, parse_launches
from retrograd.runtime.cuda.code import CudaCode, read_code
from retrograd.runtime.cuda.driver import Driver, entered
from retrograd.runtime.cuda.prepared_plan import PreparedPlan
from retrograd.runtime.cuda.queued_call import QueuedCall
from retrograd.runtime.cuda.replayed_plan import ReplayedPlan
from retrograd.runtime.programs.declaration import ELEMENT_DTYPES
from retrograd.runtime.programs.errors import ExecutionError

_address_of = torch.Tensor.data_ptr


class Launcher:
    """The plans of a vmfb on one device. Safe in several threads."""

    def __init__(self, launches: Launches, codes: dict[str, CudaCode], driver: Driver, device: torch.device) -> None:
        self._launches, self._codes, self._driver, self._device = launches, codes, driver, device
        self._lock = threading.Lock()
        self._modules: dict[tuple[str, int], ctypes.c_void_p] = {}
        self._prepared: dict[str, PreparedPlan] = {}
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
        with entered(self._device, self._driver), self._lock:
            if self._globals is None:
                self._globals, self._kept = self._initialize()
            prepared = self._prepared.get(name)
            if prepared is None:
                prepared = self._prepare(name, self._launches.functions[name], self._globals)
                self._prepared[name] = prepared
            check_tensors(name, prepared.plan, tensors)
            self._run(prepared, tensors)

    def queued_call(self, name: str) -> QueuedCall | None:
        """The short way to a function that was launched; none before that, or without a device of CUDA's."""
        prepared, device = self._prepared.get(name), self._device.index
        if prepared is None or device is None:
            return None
        place = torch.device("cuda", device)

        def allocate(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.uint8, device=place)

        current, stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
        plan, enter = ReplayedPlan(prepared, self._driver), self._driver.enter
        return QueuedCall(plan, device, self._lock, current, enter, stream, allocate)

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

    def _run(self, prepared: PreparedPlan, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        scratch = torch.empty(prepared.plan.scratch, dtype=torch.uint8, device=self._device)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        prepared.run([*map(_address_of, tensors), scratch.data_ptr()], stream)
        return scratch

    def _prepare(self, name: str, plan: LaunchPlan, globals_: dict[str, int]) -> PreparedPlan:
        return PreparedPlan(name, plan, self._driver, self._function, globals_)

    def _function(self, step: Kernel) -> tuple[ctypes.c_void_p, tuple[int, int, int], int]:
        """A kernel, its block and its shared memory; its module is loaded once."""
        code = self._codes[step.executable]
        entry = code.entries.get(step.entry)
        if entry is None or (entry.bindings, entry.constants) != (len(step.bindings), len(step.constants)):
            raise ExecutionError(
                f"the executable's launch plans and its kernel {step.entry!r} do not fit each other; compile again"
            )
        key = step.executable, entry.module
        if key not in self._modules:
            self._modules[key] = self._driver.load_module(code.modules[entry.module])
        return self._driver.find_function(self._modules[key], step.entry, entry.shared), entry.block, entry.shared


def check_tensors(name: str, plan: LaunchPlan, tensors: Sequence[torch.Tensor]) -> None:
    """Raise :class:`ExecutionError` where a tensor is not what the plan was made for."""
    if len(tensors) != len(plan.arguments):
        raise ExecutionError(f"{name}: takes {len(plan.arguments)} tensors with its results, not {len(tensors)}")
    for index, (tensor, expected) in enumerate(zip(tensors, plan.arguments, strict=True)):
        known = expected.element is None or tensor.dtype in ELEMENT_DTYPES[expected.element]
        if not known or expected.shape not in (None, tuple(tensor.shape)) or tensor.nbytes < expected.bytes:
            given = f"{tensor.dtype} {list(tensor.shape)}"
            raise ExecutionError(f"{name}: tensor {index} is {given}, but the function takes {expected}")
