# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Backwards of losses that leave out some of the outputs, compiled when the first such loss comes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from retrograd.build import build
from retrograd.built import Build
from retrograd.contract.partitions import DEFAULT
from retrograd.contract.roles import BACKWARD, TANGENT, name_without_role
from retrograd.fallback import EagerIslandWarning
from retrograd.frontend.doors.call_plan import Caller
from retrograd.frontend.doors.captured_graph import Captured
from retrograd.frontend.doors.graph_calls import CompiledFunction
from retrograd.frontend.doors.port_roles import describe_graph
from retrograd.frontend.python.source_locations import CaptureError
from retrograd.frontend.python.user_lines import warn_user
from retrograd.frontend.verification.reference_graph import Graph
from retrograd.pipelines.infra.diagnostics import PipelineError
from retrograd.pipelines.infra.errors import CompileError
from retrograd.pipelines.stages.backward_variants import find_tangents
from retrograd.pipelines.stages.staged import Progress, StagedModule
from retrograd.stagers import OverBudget, WithoutTangents, Work


class ZeroTangentWarning(UserWarning):
    """A backward without the outputs that a loss leaves out cannot be compiled, and counts them with zeros instead."""


@dataclass
class BackwardVariants:
    """The backwards of a build by the outputs that are left out; ``texts`` says which there are.

    A build for a loss has the backward that leaves out all other outputs; that of all outputs is then compiled when it
    is first used. Calls may come from several threads, in the middle of a backward: nothing is traced, and the first to
    ask for a variant compiles it while others wait.
    """

    built: Build
    work: Work
    texts: list[str] = field(default_factory=list)
    _at_once: CompiledFunction = field(init=False)
    _kept: dict[frozenset[str], CompiledFunction | None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._at_once = self.built.function(BACKWARD)

    @property
    def whole(self) -> StagedModule:
        """The module with the backward of all outputs."""
        return self.built.staged.whole or self.built.staged

    def all_outputs(self) -> CompiledFunction:
        """The backward of all outputs, which calls others where some are left out."""
        if not self._left_out():
            return replace(self._at_once, without=self)
        interface = self.whole.function(BACKWARD)
        return replace(
            self._at_once,
            arguments=tuple(a.value for a in interface.arguments),
            results=tuple(r.value for r in interface.results),
            call=_compiled_when_checked,
            moves=None if self._at_once.moves is None else self._at_once.moves.without_call(),
            merged=self.whole.merged,
            narrowed=self.built.packers(self.whole),
            without=self,
            check=self._check_all,
        )

    def _check_all(self, call: Caller, graph: Graph, bind: Callable[[CompiledFunction], Caller]) -> Caller:
        """Compiles the backward of all outputs at its first call, and checks that as any other."""
        opened: list[Caller] = []

        def run(tensors: list[Any]) -> list[Any]:
            with self._lock:
                if not opened:
                    opened.append(self._open_all(graph, bind))
            return opened[0](tensors)

        return run

    def _open_all(self, graph: Graph, bind: Callable[[CompiledFunction], Caller]) -> Caller:
        """The backward of all outputs, compiled; where it does not compile beside the step's forward, as one by itself.

        Raises:
            PipelineError, CompileError: it does not, and ``fallback`` is ``error``.
        """
        try:
            stager = self._stager(())
            function = self._finish(stager, stager.stage())
        except (PipelineError, CompileError) as error:
            if self.work.options.fallback == "error":
                raise
            found = self._build_alone(graph, error)
            if found is None:
                return graph.run
            function = found
        return bind(function) if function.check is None else function.check(bind(function), graph, bind)

    def _build_alone(self, graph: Graph, error: Exception) -> CompiledFunction | None:
        """The backward of all outputs, compiled from its graph alone, with what does not compile in torch: what that is
        was settled of the loss's backward only. ``None`` where that does not help, which a warning says."""
        options = replace(self.work.options, partition=DEFAULT, needs_device=True)
        try:
            return build(Captured(describe_graph(graph.module), BACKWARD), options).function(BACKWARD)
        except (CaptureError, PipelineError, CompileError, ValueError) as second:
            reasons = dict.fromkeys(str(e).strip().partition("\n")[0] for e in (error, second))
            warn_user(
                f"the backward of all outputs is not compiled, and runs in torch: {'; '.join(reasons)}; that of the "
                "loss alone is",
                EagerIslandWarning,
            )
            return None

    def _left_out(self) -> frozenset[str]:
        """The tangents that the backward does without that was compiled at once."""
        return frozenset(find_tangents(self.whole)).difference(find_tangents(self.built.staged))

    def __call__(self, absent: frozenset[str]) -> CompiledFunction | None:
        """The backward without these tangents, by the names of the captured values; ``None`` where zeros are to be
        given for them, which a warning says.

        Raises:
            PipelineError, CompileError: it cannot be compiled, and ``fallback`` is ``error``.
        """
        with self._lock:
            if absent not in self._kept:
                self._kept[absent] = self._compile(absent)
            return self._kept[absent]

    def _compile(self, absent: frozenset[str]) -> CompiledFunction | None:
        names = self._output_names(absent)
        try:
            function = self._built_at_once() if absent == self._left_out() else self._build(absent)
        except OverBudget:
            reason = "it takes more than the memory budget"
        except (PipelineError, CompileError) as error:
            if self.work.options.fallback == "error":
                raise
            reason = str(error).strip().partition("\n")[0]
        else:
            self.texts.append(f"without {names}")
            return function
        self.texts.append(f"zeros for {names}: {reason}")
        warn_user(
            f"the backward without {names} is not compiled, and zeros are taken for their gradients: {reason}; detach "
            "these outputs, or leave them out of the model",
            ZeroTangentWarning,
        )
        return None

    def _built_at_once(self) -> CompiledFunction:
        """The backward of the loss."""
        return replace(self._at_once, dropped=self._dropped(self._at_once.results))

    def _dropped(self, given: Collection[str]) -> frozenset[str]:
        """The gradients that are not among those given."""
        return frozenset(r.value for r in self.whole.function(BACKWARD).results).difference(given)

    def _build(self, absent: Collection[str]) -> CompiledFunction:
        """The variant.

        Raises:
            OverBudget: none stays within the memory budget.
            PipelineError, CompileError: it cannot be compiled.
        """
        stager = self._stager(absent)
        staged = stager.stage()
        given = tuple(r.value for r in staged.function(BACKWARD).results)
        dropped = self._dropped(given)
        if not given:
            # Whatever the loss uses has no gradient that depends on it.
            nothing = replace(self._at_once, arguments=(), results=(), call=lambda _tensors: [])
            return replace(nothing, dropped=dropped, check=None)
        return replace(self._finish(stager, staged), dropped=dropped)

    def _stager(self, absent: Collection[str]) -> WithoutTangents:
        return WithoutTangents(self.work, self.built.staged, self.built.executable, absent)

    def _finish(self, stager: WithoutTangents, staged: StagedModule) -> CompiledFunction:
        return self.built.with_part(stager.finish(staged)).function(BACKWARD)

    def _output_names(self, absent: Collection[str]) -> str:
        """The outputs that the loss leaves out, as the user knows them."""
        arguments = self.whole.function(BACKWARD).arguments
        return ", ".join(name_without_role(TANGENT, a.name) for a in arguments if a.value in absent)


def _compiled_when_checked(_tensors: Any) -> Any:
    raise AssertionError("the backward of all outputs is compiled by its check")


def variants_of(built: Build) -> BackwardVariants | None:
    """The variants of a build; ``None`` where there can be none: on devices where a program finds only its own
    residuals (Vulkan)."""
    if not find_tangents(built.staged) or built.program.is_staged:
        return None
    # Of what is compiled in the middle of a backward, the report of the build says nothing; no file holds it.
    options = replace(built.work.options, cut_gain=built.work.cut_gain)
    work = replace(built.work, options=options, phases=Progress(built.work.phases.listener), portable=False)
    return BackwardVariants(built, work)
