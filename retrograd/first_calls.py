# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""First calls that check themselves: which functions, what is remembered of them, and what is done where one is
wrong."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from retrograd.frontend.doors.call_plan import Caller
from retrograd.frontend.doors.graph_calls import Check, CompiledFunction
from retrograd.frontend.python.user_lines import warn_user
from retrograd.frontend.verification.as_traced import AsTraced
from retrograd.frontend.verification.errors import VerificationError
from retrograd.frontend.verification.first_call import Fault, FirstCall
from retrograd.frontend.verification.from_inputs import Forwards
from retrograd.frontend.verification.reference_graph import Graph
from retrograd.options import Options
from retrograd.pipelines.stages.staged import ExecutableStore, StagedModule
from retrograd.pipelines.toolchain.executable import Executable
from retrograd.repair import Case, Rebuild, RepairWork, can_repair

_LOG = logging.getLogger(__name__)
# Programs that passed an older check pass it anew.
_VERSION = "3"
# What is kept of a program that passed.
_RIGHT = b"right"
_WRONG = b"wrong"
# Of long texts in warnings.
_SHOWN = 2000


class MiscompiledWarning(UserWarning):
    """Compiled code gives wrong values, and is not used."""


@dataclass
class Checks:
    """The first calls of all that one compilation gave: the two halves of a step, and backwards of losses that leave
    out outputs. ``rebuild`` compiles a graph of one of them by itself."""

    options: Options
    store: ExecutableStore | None
    rebuild: Rebuild
    calls: list[FirstCall] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    forwards: Forwards = field(default_factory=Forwards)

    def check_of(self, name: str, device: torch.device, staged: StagedModule, executable: Executable) -> Check:
        """The check of one function of a staged module, which was compiled to this executable."""

        def check(call: Caller, graph: Graph, bind: Callable[[CompiledFunction], Caller]) -> Caller:
            care = Keeper(self, name, staged, executable, bind, graph.traced)
            self.calls.append(FirstCall(name, device, call, graph, care, self.forwards))
            return self.calls[-1]

        return check

    def describe(self) -> list[str]:
        """How each first call went, and what came of repairs."""
        return [*(f"@{call.name}: {call.state}" for call in self.calls), *self.notes]

    def are_settled(self) -> bool:
        """Whether all functions passed, and nothing is compared from now on."""
        return all(call.is_settled for call in self.calls)

    def say(self, text: str) -> None:
        """Tell the user what came of a repair."""
        self.notes.append(text)
        _LOG.info("%s", text)
        warn_user(text[:_SHOWN], MiscompiledWarning)

    def find_wrong(self) -> str | None:
        """Says what is wrong with a function that was found to be wrong."""
        return next((f"@{call.name}: {call.state}" for call in self.calls if call.is_wrong), None)


@dataclass(frozen=True)
class Keeper:
    """Remembers in the cache that a function is right, and has one repaired that is not."""

    checks: Checks
    name: str
    staged: StagedModule
    executable: Executable
    bind: Callable[[CompiledFunction], Caller]
    traced: AsTraced | None = None

    def is_known(self) -> bool:
        """Whether this executable passed before."""
        store = self._store()
        return store is not None and store.get(self.parts()) == _RIGHT

    def remember(self) -> None:
        """Note that a function passed its check."""
        store = self._store()
        if store is not None:
            store.put(self.parts(), _RIGHT)

    def forget(self) -> None:
        """Forget that a function passed: what it saved led to wrong gradients."""
        store = self._store()
        if store is not None:
            store.put(self.parts(), _WRONG)

    def repair(self, fault: Fault) -> RepairWork | None:
        """Warn, and start a repair beside the training.

        Raises:
            VerificationError: nothing may run in torch, or ``verify`` is True.
        """
        said = f"the compiled @{self.name} gives wrong values, and is not used: {fault.message}"
        self._warn(said, "It runs in torch, until other code has been found that is right; explain() tells")
        if not can_repair(fault):
            return None
        case = Case(self.name, self.staged, self.executable, fault, self.checks.rebuild)
        return RepairWork(case, self.bind, self.checks.say)

    def refuse(self, message: str) -> None:
        """Warn that neither half is used.

        Raises:
            VerificationError: nothing may run in torch, or ``verify`` is True.
        """
        said = f"the compiled forward and @{self.name} together give wrong gradients, and are not used: {message}"
        self._warn(said, "Both run in torch; explain() tells")

    def leave(self, message: str) -> None:
        """Warn that the step runs in eager.

        Raises:
            VerificationError: nothing may, or ``verify`` is True.
        """
        said = f"what was compiled is another graph than the one that was traced, and is not used: {message}"
        self._warn(said, "The step runs in eager; please report it")

    def _store(self) -> ExecutableStore | None:
        """Where it is remembered; nowhere where it is compared with kernels that are not PyTorch's, which no key tells
        apart."""
        return None if self.traced is not None and self.traced.kernels is None else self.checks.store

    def _warn(self, said: str, instead: str) -> None:
        options = self.checks.options
        if options.verify is True or options.fallback == "error":
            raise VerificationError(f"{said}; the model is not compiled correctly, please report it")
        warn_user(f"{said}. {instead}", MiscompiledWarning)

    def parts(self) -> dict[str, str]:
        """The parts of the key that it is remembered by."""
        return {
            "entry": "verified",
            "check": _VERSION,
            "function": self.name,
            "traced": "" if self.traced is None else self.traced.digest,
            "kernels": "" if self.traced is None else str(self.traced.kernels),
            "module": self.staged.texts["scheduled"],
            "executable": hashlib.sha256(self.executable.vmfb).hexdigest(),
            "device": self.checks.options.device.type,
        }
