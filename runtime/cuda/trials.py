# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Runs kernels by themselves on a CUDA device: what they give, and how long they take."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from retrograd.contract.launches import Expected, Kernel, LaunchPlan, Place
from retrograd.contract.trials import Buffer, Work
from retrograd.runtime.cuda.driver import Driver, entered, open_driver
from retrograd.runtime.cuda.prepared_plan import PreparedPlan
from retrograd.runtime.programs.errors import ExecutionError

_TYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f64": torch.float64,
    "i64": torch.int64,
    "i32": torch.int32,
    "i8": torch.int8,
    "i1": torch.bool,
}
# What is written between two timed runs: twice the cache, and never less than takes the host longer to queue a run.
_LEAST_FLUSHED = 1 << 26


@dataclass
class Prepared:
    """Work whose kernels are loaded, on buffers of its own."""

    work: Work
    tensors: list[Tensor]
    _queue: Callable[[], None]

    def run(self) -> None:
        """Queue it on torch's current stream."""
        self._queue()
        if self.work.ending is not None:
            # In place of the kernel that IREE makes of the sum.
            self.tensors[-1].sum(0)

    def results(self) -> list[Tensor]:
        """The results, computed anew: in memory that held no numbers."""
        for number in range(len(self.work.inputs), len(self.tensors)):
            tensor = self.tensors[number]
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        self._queue()
        ending = self.work.ending
        if ending is None:
            return [self.tensors[number].clone() for number in self.work.results]
        total = self.tensors[-1].sum(0)
        if ending.bias is not None:
            total += self.tensors[ending.bias].float()
        return [total.to(_TYPES[ending.element])]


class Bench:
    """A CUDA device to run kernels on, one after the other, with nobody else's work beside them."""

    def __init__(self, device: torch.device) -> None:
        driver = open_driver()
        if driver is None or not torch.cuda.is_available():
            raise ExecutionError("there is no CUDA device")
        self._driver: Driver = driver
        self._device = device
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._flushed = torch.empty(max(_LEAST_FLUSHED, 2 * cache), dtype=torch.int8, device=device)

    @property
    def name(self) -> str:
        """The device's name."""
        return torch.cuda.get_device_name(self._device)

    def make_inputs(self, inputs: Sequence[Buffer], *, positive: bool = False) -> list[Tensor]:
        """Random numbers for buffers, the same at each call: normal ones, or those from a half to one and a half."""
        generator = torch.Generator(self._device).manual_seed(0)
        made = [self._random(buffer, generator) for buffer in inputs]
        return [t.uniform_(0.5, 1.5, generator=generator) if positive and t.is_floating_point() else t for t in made]

    def _random(self, buffer: Buffer, generator: torch.Generator) -> Tensor:
        dtype = _TYPES[buffer.element]
        if dtype.is_floating_point:
            return torch.randn(buffer.shape, generator=generator, device=self._device).to(dtype)
        return torch.randint(0, buffer.below, buffer.shape, generator=generator, device=self._device).to(dtype)

    @contextlib.contextmanager
    def prepare(self, work: Work, inputs: Sequence[Tensor]) -> Iterator[Prepared]:
        """Load kernels, for as long as the context is open.

        Raises:
            ExecutionError: the device does not take one of them; or what runs fails.
        """
        with entered(self._device, self._driver):
            given = [torch.empty(b.shape, dtype=_TYPES[b.element], device=self._device) for b in work.given]
            own = [t.clone() if number == work.updated else t for number, t in enumerate(inputs)]
            tensors = [*own, *given]
            modules: list[ctypes.c_void_p] = []
            try:
                yield Prepared(work, tensors, self._load(work, tensors, modules))
            finally:
                torch.cuda.synchronize(self._device)
                for module in modules:
                    self._driver.unload_module(module)

    def _load(self, work: Work, tensors: Sequence[Tensor], modules: list[ctypes.c_void_p]) -> Callable[[], None]:
        handles: dict[str, tuple[ctypes.c_void_p, tuple[int, int, int], int]] = {}
        steps: list[Kernel] = []
        held = list(tensors)
        for number, call in enumerate(work.calls):
            module = self._driver.load_module(call.code.ptx.encode() + b"\0")
            modules.append(module)
            name = f"{call.entry} {number}"
            handles[name] = (
                self._driver.find_function(module, call.entry, call.code.shared),
                (call.code.threads, 1, 1),
                call.code.shared,
            )
            buffers = [*call.buffers]
            if call.code.scratch:
                x, y, z = call.grid
                buffers.append(len(held))
                held.append(torch.empty(x * y * z * call.code.scratch, dtype=torch.int8, device=self._device))
            bindings = tuple(Place("argument", buffer, 0) for buffer in buffers)
            steps.append(Kernel(name, call.entry, call.grid, bindings, call.numbers))
        plan = LaunchPlan(tuple(Expected() for _ in held), 0, tuple(steps))
        prepared = PreparedPlan("trial", plan, self._driver, lambda kernel: handles[kernel.executable], {})
        addresses = [tensor.data_ptr() for tensor in held] + [0]

        def queue() -> None:
            prepared.run(addresses, torch.cuda.current_stream(self._device).cuda_stream)
            # Their memory is not freed before this is.
            assert held

        return queue

    def time(self, works: Sequence[Prepared], rounds: int) -> list[list[float]]:
        """Microseconds of each work in so many rounds, in each of which every work runs once, with the cache emptied
        before."""
        events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in works]
        with entered(self._device, self._driver):
            for work in works:
                work.run()
            for turn in range(rounds):
                for place in range(len(works)):
                    # Each comes first in turn.
                    number = (place + turn) % len(works)
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    self._flushed.zero_()
                    start.record()
                    works[number].run()
                    end.record()
                    events[number].append((start, end))
            torch.cuda.synchronize(self._device)
        return [[1e3 * start.elapsed_time(end) for start, end in pairs] for pairs in events]


def find_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference of results, relative to the norm of what is expected; infinite where one has a number
    that the other has not."""
    most = 0.0
    for mine, other in zip(found, expected, strict=True):
        if mine.dtype != other.dtype or mine.shape != other.shape:
            return float("inf")
        left, right = mine.double(), other.double()
        if not torch.equal(left.isfinite(), right.isfinite()):
            return float("inf")
        apart = (left - right).nan_to_num(0.0, 0.0, 0.0).norm() / right.nan_to_num(0.0, 0.0, 0.0).norm().clamp_min(
            1e-30
        )
        most = max(most, float(apart))
    return most
