# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The first call of a compiled model beside the model in eager, where it asked while traced whether it compiles."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from retrograd.frontend.doors.capture import CapturedGraph
from retrograd.frontend.verification.as_traced import OtherThanTraced
from retrograd.frontend.verification.beside_eager import BesideEager
from retrograd.parting import PartsFromEagerError
from retrograd.runtime.steps.compiled import Call

_LOG = logging.getLogger(__name__)
_NOT_COMPARED = "not compared with the model in eager"


def parting_from_trace(call: Call) -> Call:
    """``call``, where what was compiled turns out to be another graph than the one that was traced.

    Raises:
        PartsFromEagerError: of the result, it did.
    """

    def run(primals: Sequence[Tensor]) -> Sequence[Tensor]:
        try:
            return call(primals)
        except OtherThanTraced as error:
            said = f"what was compiled is another graph than the one that was traced: {error}"
            raise PartsFromEagerError(said, True, "please report it") from error

    return run


def beside_eager(captured: CapturedGraph, call: Call, device: torch.device, note: Callable[[str], None]) -> Call:
    """``call`` of the model's parameters, buffers and tensor arguments, whose first use is compared with the model in
    eager. Where the model did not ask whether it compiles, ``call`` itself: there is nothing that could differ. How the
    comparison went, ``note`` is told.

    Raises:
        PartsFromEagerError: of the result, outputs, gradients or what is written to differ by more than rounding.
    """
    if not captured.module.asks_compiling:
        return call
    beside = BesideEager(captured)
    if beside.has_collectives:
        note(f"{_NOT_COMPARED}: other processes would wait for its collective ops")
        return call
    return _FirstUse(beside, call, device, note)


@dataclass
class _FirstUse:
    beside: BesideEager | None
    call: Call
    device: torch.device
    note: Callable[[str], None]
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __call__(self, primals: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.beside is None or any(isinstance(t, FakeTensor) for t in primals):
            return self.call(primals)
        with self._lock:
            return self.call(primals) if self.beside is None else self._compare(self.beside, primals)

    def _compare(self, beside: BesideEager, primals: Sequence[Tensor]) -> Sequence[Tensor]:
        if (reason := beside.find_shortage(primals, self.device)) is not None:
            _LOG.warning("%s: %s", _NOT_COMPARED, reason)
            self._settle(f"{_NOT_COMPARED}: {reason}")
            return self.call(primals)
        comparison = beside.start(primals)
        outputs = self.call(primals)
        try:
            parting = comparison.find_parting(outputs, primals)
        except Exception as error:  # noqa: BLE001  (of the user's model, on copies; the call itself went well)
            _LOG.warning("%s, which does not run on copies: %s", _NOT_COMPARED, error)
            self._settle(f"{_NOT_COMPARED}, which does not run on copies: {error}")
            return outputs
        if parting is None:
            self._settle("the model in eager gives the same as it does while it is compiled")
            return outputs
        comparison.undo(primals)
        said = f"the model computes something else in eager than while it is compiled: {parting}"
        raise PartsFromEagerError(said, beside.is_random or beside.is_as_in_eager)

    def _settle(self, said: str) -> None:
        self.note(said)
        # With it go the graph, and what it knows of the trace.
        self.beside = None
