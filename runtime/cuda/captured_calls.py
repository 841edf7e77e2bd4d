# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A compiled half as one CUDA graph: captured once, then replayed by a single call of the host.

A replay reads and writes the memory it was captured with. Parameters, buffers and residuals of a captured forward are
read where they lie, other arguments are copied in. Results are in memory of the capture: while anybody holds one,
the half runs as it does without a graph, so that nothing that is held is ever overwritten. What the user gets of a
forward is copied out, since a loss is commonly held until the next one is there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from retrograd.contract.roles import BUFFER, OUTPUT, PARAM, SAVED
from retrograd.contract.tensors import FunctionSpec
from retrograd.runtime.cuda.driver import entered
from retrograd.runtime.cuda.host_share import HostShare

Call = Callable[[Sequence[Tensor]], Sequence[Tensor]]

# Calls before a capture: the first ones load code, choose algorithms and are compared with eager.
_WARM_CALLS = 3
# Of arguments that lie elsewhere from some call on, a new capture knows; what moves again and again is not captured.
_MOST_CAPTURES = 8
# Residuals are elsewhere where the forward ran without its graph; those that are so many times in a row are copied in.
_MOST_STRAYS = 4
_LASTING = (PARAM, BUFFER, SAVED)
_holders_of = torch._C._storage_Use_Count
# Results of captures, by address.
_RESULTS: WeakValueDictionary[int, Tensor] = WeakValueDictionary()


@dataclass(frozen=True)
class Recording:
    """Work on a device that was captured: how to do it once more, the results, which lie where they lay, and how many
    bytes of the device stay taken for it."""

    replay: Callable[[], None]
    results: Sequence[Tensor]
    taken_bytes: int = 0


class Recorder(Protocol):
    """Captures what a function queues."""

    def record(self, run: Callable[[], Sequence[Tensor]]) -> Recording:
        """Records what ``run`` queues; it is called once, and nothing need have run after that."""

    def stream(self) -> int:
        """The stream that is current, by a number."""

    def is_recording(self) -> bool:
        """Whether somebody captures already."""

    def free_bytes(self) -> int:
        """Bytes of the device that nobody has."""


class CudaRecorder:
    """Captures CUDA graphs on one device, each with memory of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record(self, run: Callable[[], Sequence[Tensor]]) -> Recording:
        """Record a graph, as :class:`Recorder` declares.

        Raises:
            RuntimeError: something was done that no graph holds, such as waiting for the device.
        """
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.memory_reserved(self._device)
        # Other threads may allocate meanwhile.
        with entered(self._device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = run()
        return Recording(graph.replay, results, torch.cuda.memory_reserved(self._device) - before)

    def stream(self) -> int:
        """As :class:`Recorder`."""
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def is_recording(self) -> bool:
        """As :class:`Recorder`."""
        return bool(torch.cuda.is_current_stream_capturing())

    def free_bytes(self) -> int:
        """As :class:`Recorder`; with what torch keeps to give it out again."""
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0]) + kept


@dataclass
class _Capture:
    """A recording, and what it needs to stay right: where arguments have to lie, which are copied to where, what is
    held for it, and how many hold each result's storage when nobody else does.

    ``fixed`` are the addresses of arguments that are not copied, by their places; ``counted`` are the storages, as
    torch counts who holds them.
    """

    recording: Recording
    stream: int
    addresses: list[int]
    copies: dict[int, Tensor]
    held: list[Tensor]
    fixed: list[tuple[int, int]] = field(init=False)
    storages: list[torch.UntypedStorage] = field(init=False)
    counted: list[int] = field(init=False)
    holders: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.storages = [result.untyped_storage() for result in self.recording.results]
        self.counted = [storage._cdata for storage in self.storages]
        self.holders = [*map(_holders_of, self.counted)]
        self.fixed = [(place, address) for place, address in enumerate(self.addresses) if place not in self.copies]
        _RESULTS.update((result.data_ptr(), result) for result in self.recording.results if result.numel())

    def release(self) -> None:
        """Forget that the results are a capture's."""
        for result in self.recording.results:
            if _RESULTS.get(result.data_ptr()) is result:
                del _RESULTS[result.data_ptr()]

    def is_free(self) -> bool:
        """Whether nobody holds a result."""
        return [*map(_holders_of, self.counted)] == self.holders


class CapturedCall:
    """A function of fixed sizes on a device, replayed where that is safe. Safe in several threads: one replays, and
    others call it as it is.

    With ``host_share`` only where the host holds the device back, and where the device has as much memory left as the
    capture took.
    """

    def __init__(
        self, call: Call, function: FunctionSpec, recorder: Recorder, host_share: HostShare | None = None
    ) -> None:
        self._call, self._recorder, self._host_share = call, recorder, host_share
        self._lock = threading.Lock()
        self._capture: _Capture | None = None
        self._roles = [argument.role for argument in function.arguments]
        self._moving = {index for index, role in enumerate(self._roles) if role not in _LASTING}
        self._strays = 0
        self._calls = 0
        self._captures = 0
        self.replays = 0
        self.reason: str | None = None
        self._copied = [index for index, result in enumerate(function.results) if result.role == OUTPUT]

    def __call__(self, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        """The results for arguments of the shapes it was compiled for."""
        if self.reason is not None or not self._lock.acquire(blocking=False):
            return self._call(arguments)
        try:
            return self._run(arguments)
        finally:
            self._lock.release()

    def describe(self) -> str:
        """How it runs, in words."""
        if self.reason is not None:
            return f"not captured: {self.reason}"
        return f"captured {self._captures} times, replayed {self.replays} times"

    def _run(self, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        self._calls += 1
        if self._calls <= _WARM_CALLS or self._recorder.is_recording():
            return self._call(arguments)
        if self._host_share is not None and not self._host_share.is_bound:
            return self._timed(self._host_share, arguments)
        capture = self._capture
        if capture is None or (moved := self._find_moved(capture, arguments)):
            if capture is not None and self._has_strayed(moved, arguments):
                return self._call(arguments)
            capture = self._record(arguments)
        self._strays = 0
        if capture is None or capture.stream != self._recorder.stream() or not capture.is_free():
            return self._call(arguments)
        for index, static in capture.copies.items():
            static.copy_(arguments[index])
        if isinstance(arguments, list):
            arguments.clear()
        capture.recording.replay()
        self.replays += 1
        results = [result.detach() for result in capture.recording.results]
        for index in self._copied:
            results[index] = results[index].clone()
        return results

    def _timed(self, host_share: HostShare, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        """The results of a call without a graph; some are timed, and where the device is busy none is captured."""
        if host_share.is_bound is False:
            self.reason = f"the device is busy: to queue a call takes {host_share.share:.0%} of its time there"
        return host_share.run(lambda: self._call(arguments))

    def _find_moved(self, capture: _Capture, arguments: Sequence[Tensor]) -> list[int]:
        """The arguments that do not lie where the capture reads them."""
        return [place for place, address in capture.fixed if arguments[place].data_ptr() != address]

    def _has_strayed(self, moved: Sequence[int], arguments: Sequence[Tensor]) -> bool:
        """Whether to leave the capture as it is, for a residual that is no capture's this time. One that never is, such
        as an argument that the forward keeps, is copied in after some calls."""
        strays = [i for i in moved if self._roles[i] == SAVED and arguments[i].data_ptr() not in _RESULTS]
        if not strays:
            return False
        self._strays += 1
        if self._strays < _MOST_STRAYS:
            return True
        self._moving.update(strays)
        return False

    def _record(self, arguments: Sequence[Tensor]) -> _Capture | None:
        """A capture of a call on these arguments; none where there have been too many, or it fails."""
        if self._capture is not None:
            self._capture.release()
            self._capture = None
        if self._captures == _MOST_CAPTURES:
            self.reason = "its arguments lie elsewhere at each call"
            return None
        self._captures += 1
        copies = {i: torch.empty_like(arguments[i]) for i in sorted(self._moving)}
        # Of another capture's result the tensor that it has itself: it asks whether others hold the storage.
        given = [copies.get(i, _RESULTS.get(t.data_ptr(), t)) for i, t in enumerate(arguments)]
        if any(
            a.shape != b.shape or a.stride() != b.stride() or a.dtype != b.dtype
            for a, b in zip(arguments, given, strict=True)
        ):
            self.reason = "it takes a part of what another half gives"
            return None
        for index, static in copies.items():
            static.copy_(arguments[index])
        try:
            recording = self._recorder.record(lambda: self._call([*given]))
        except RuntimeError as error:
            self.reason = str(error).partition("\n")[0]
            return None
        taken = {t.untyped_storage().data_ptr() for t in given}
        if any(result.untyped_storage().data_ptr() in taken for result in recording.results):
            self.reason = "it gives an argument as it is"
            return None
        if self._host_share is not None and (free := self._recorder.free_bytes()) < recording.taken_bytes:
            sizes = f"{recording.taken_bytes / 2**20:.0f} MiB, and {free / 2**20:.0f} are left"
            self.reason = f"it would keep {sizes}"
            return None
        addresses = [t.data_ptr() for t in given]
        self._capture = _Capture(recording, self._recorder.stream(), addresses, copies, given)
        return self._capture
