# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The peak of live bytes of one step, measured; what it is compared with was predicted when the step was compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from retrograd.contract.plan import FinishFetch, FinishOffload, Free, RunStage, StagePlan, StartFetch, StartOffload
from retrograd.contract.roles import INTO, MUTATION, SIZE, is_own_residual
from retrograd.contract.tensors import FunctionSpec, TensorSpec
from retrograd.runtime.programs.devices import Device, open_device
from retrograd.runtime.programs.errors import ExecutionError
from retrograd.runtime.programs.executor import Argument, Program, allocate_results
from retrograd.runtime.programs.tensors import give_up


@dataclass(frozen=True)
class Half:
    """A forward or backward: its function, and where it is cut into stages the plan that runs them and the functions
    that this calls."""

    function: FunctionSpec
    plan: StagePlan | None = None
    stages: Sequence[FunctionSpec] = ()


def measure_peak(program: Program, forward: Half, backward: Half, sizes: Mapping[str, int] | None = None) -> int:
    """Run a step on zeros and count: storage of the tensors held, and what the allocator of scratch memory, torch's for
    launch plans and else IREE's, had out at its highest.

    ``sizes`` are those to run it with, where they differ from call to call.
    """
    given = _Zeros(program, sizes or {})
    results, during_forward = _run(program, forward, [given.make(a) for a in forward.function.arguments], set())
    # Updated buffers are copied to their place and freed before the backward.
    kept = {r.name: t for t, r in zip(results, forward.function.results, strict=True) if r.role != MUTATION}
    del results
    arguments = [kept[a.name] if a.name in kept else given.make(a) for a in backward.function.arguments]
    # A backward in stages frees residuals as it goes.
    names = [a.name if is_own_residual(a.role, a.name) else "" for a in backward.function.arguments]
    moved = _find_moved(forward)
    handed = (set(names) & kept.keys()) - moved if backward.plan is not None else set[str]()
    held = _storage([tensor for name, tensor in kept.items() if name not in handed | moved])
    del kept
    _, during_backward = _run(program, backward, arguments, {i for i, name in enumerate(names) if name in handed})
    return max(during_forward, held + during_backward)


def _storage(tensors: Iterable[torch.Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _find_moved(forward: Half) -> set[str]:
    """The results that a forward leaves on the host, by name."""
    if forward.plan is None:
        return set()
    hosts = {host for step in forward.plan.steps if isinstance(step, StartOffload) for host in step.results}
    named = zip(forward.function.results, forward.plan.results, strict=True)
    return {result.name for result, value in named if value in hosts}


@dataclass(frozen=True)
class _Zeros:
    """Makes arguments for a program."""

    program: Program
    sizes: Mapping[str, int]

    def make(self, spec: TensorSpec) -> Argument:
        """A tensor of zeros, or the number that a size is."""
        if spec.role == SIZE:
            return self.sizes[spec.name]
        return allocate_results([spec.at(self.sizes)], self.program.torch_device)[0].zero_()


def _run(program: Program, half: Half, arguments: list[Argument], handed: set[int]) -> tuple[list[torch.Tensor], int]:
    """The results, residuals among them, in torch's memory (the halves run on devices of their own); and the most bytes
    of results, of arguments at the places ``handed``, and of scratch memory that there were at a time."""
    if half.plan is None:
        return _run_function(program, half.function, arguments)
    functions = {function.name: function for function in half.stages}
    values = dict(zip(half.plan.arguments, arguments, strict=True))
    arguments.clear()
    counted = {name for place, name in enumerate(half.plan.arguments) if place in handed}
    peak = 0
    for step in half.plan.steps:
        if isinstance(step, Free | FinishOffload):
            for name in step.values:
                del values[name]
            continue
        if isinstance(step, StartOffload | StartFetch):
            values.update(_move(program, step, [values[name] for name in step.arguments]))
            counted.update(step.results if isinstance(step, StartFetch) else ())
            continue
        if isinstance(step, FinishFetch):
            continue
        # What is cut to lower the peak has stages alone.
        assert isinstance(step, RunStage)
        taken = [values[name] for name in step.arguments]
        before = _storage([t for name, t in values.items() if name in counted and isinstance(t, torch.Tensor)])
        results, during = _run_function(program, functions[step.function], taken)
        peak = max(peak, before + during)
        values.update(zip(step.results, results, strict=True))
        counted.update(step.results)
    found = (values[name] for name in half.plan.results)
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)], peak


def _move(program: Program, step: StartOffload | StartFetch, moved: Sequence[Argument]) -> dict[str, Argument]:
    """Copy at once the tensors that a step moves to the host or back."""
    place = program.torch_device if isinstance(step, StartFetch) else "cpu"
    tensors = (tensor for tensor in moved if isinstance(tensor, torch.Tensor))
    return {name: tensor.to(place, copy=True) for name, tensor in zip(step.results, tensors, strict=True)}


def _run_function(
    program: Program, function: FunctionSpec, arguments: list[Argument]
) -> tuple[list[torch.Tensor], int]:
    results = allocate_results(function.results_at(arguments), program.torch_device)
    donated, placed = program.donated(function.name + INTO)
    is_queued = program.queues([function.name])
    if is_queued:
        # It works in the memory of these: copies of what a caller still has are no part of it.
        arguments = [*arguments]
        give_up(arguments, donated)
        with track_requests(program.torch_device) as scratch:
            program.invoke_on_new(function.name + INTO, arguments, results)
    else:
        with track_peak(program) as scratch:
            program.invoke(function.name + INTO, arguments, results)
    # Those that lie in arguments are copied out here.
    own = _storage(results) - sum(results[place.result].untyped_storage().nbytes() for place in placed)
    return results, own + scratch.peak_bytes - scratch.resident_bytes


# local-task serves scratch memory from a pool that its statistics leave out (all zeros). The same executable asks for
# the same memory in the same order on local-sync, whose allocator counts it.
_COUNTING_DRIVERS = {"local-task": "local-sync"}


@dataclass
class PeakMemory:
    """Bytes that a program allocated and held; tensors of the caller's, arguments and results among them, are not
    counted.

    `peak_bytes` is the most held at one time, `resident_bytes` what the program holds once loaded (constants that were
    copied to the device). Both are zero until the block ends.
    """

    peak_bytes: int = 0
    resident_bytes: int = 0


@contextlib.contextmanager
def track_peak(program: Program) -> Iterator[PeakMemory]:
    """Measure what IREE allocates for `program` during the block.

    A device's own high-water mark never falls, so the program runs in the block on a device opened for it alone. That
    loads it anew, and on CPU runs it on one thread: measure memory in the block, not time.

    Raises:
        DeviceError: no second device can be opened.
        ExecutionError: the driver's allocator keeps no statistics.
    """
    device = open_device(_counting_uri(program.driver))
    if not device.hal.allocator.has_statistics:
        raise ExecutionError(f"IREE's allocator for {device.uri!r} keeps no statistics; use a runtime built with them")
    measured = PeakMemory()
    with program.on_device(device):
        resident = _held_bytes(device)
        yield measured
        measured.resident_bytes = resident
        measured.peak_bytes = _peak_bytes(device)


@contextlib.contextmanager
def track_requests(device: torch.device) -> Iterator[PeakMemory]:
    """Measure the bytes that torch's allocator for a CUDA device is asked for during the block, as if none were given
    back: a launch plan asks once, for all that it works in.

    No counter of torch's is reset: its peaks are the user's.
    """
    measured = PeakMemory()
    before = _requested_bytes(device)
    yield measured
    measured.peak_bytes = _requested_bytes(device) - before


def _requested_bytes(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.allocated"])


def _counting_uri(uri: str) -> str:
    driver = uri.partition("://")[0]
    return _COUNTING_DRIVERS.get(driver, uri)


def _held_bytes(device: Device) -> int:
    counts = device.hal.allocator.statistics
    return int(
        counts["host_bytes_allocated"]
        + counts["device_bytes_allocated"]
        - counts["host_bytes_freed"]
        - counts["device_bytes_freed"]
    )


def _peak_bytes(device: Device) -> int:
    counts = device.hal.allocator.statistics
    return int(counts["host_bytes_peak"] + counts["device_bytes_peak"])
