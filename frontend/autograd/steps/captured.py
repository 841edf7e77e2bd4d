# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A captured backward from its first run on: recorded eagerly, then compiled; for the sizes that it was met with, and
from the second set of them on for all that differ as these two do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from retrograd.frontend.autograd.engine.late_hooks import LATE, LATE_HOOKS, LateHook
from retrograd.frontend.autograd.engine.python_calls import (
    Frame,
    Unforeseen,
    ZerosForNone,
    find_engine_only,
    find_source,
)
from retrograd.frontend.autograd.engine.trials import Trial, can_be_timed
from retrograd.frontend.autograd.hooks.hook_identity import HookIdentity
from retrograd.frontend.autograd.hooks.hook_inlining import NO_SITES, SiteKey, find_sites, read_sites
from retrograd.frontend.autograd.sizes.skeleton import read_skeleton
from retrograd.frontend.autograd.steps.compilation import Builder, Compilation
from retrograd.frontend.autograd.steps.guards import StepGuard
from retrograd.frontend.autograd.steps.history import CHURN, History
from retrograd.frontend.autograd.steps.known_variants import KnownVariants
from retrograd.frontend.autograd.steps.python_side import FAILURES
from retrograd.frontend.autograd.steps.recorder import Recorder, make_runnable, opaque_kind
from retrograd.frontend.autograd.steps.resumption import GivenGradients, has_firm_calls, resume
from retrograd.frontend.autograd.steps.shared_memory import Shared, find_shared
from retrograd.frontend.autograd.steps.step_key import StepKey, StepOptions
from retrograd.frontend.autograd.steps.unsafe_zeros import find_unsafe_calls
from retrograd.frontend.autograd.steps.variants import Use
from retrograd.frontend.autograd.tracing.compiler import (
    BackwardRun,
    NeedsEngine,
    RunsCompiled,
    RunsEagerly,
    RuntimeCapture,
    TakesTurn,
)

# In how many ways the tensors of a capture may share memory before that is of no interest.
MOST_SHARED = 2
# Steps at which a hook may set up a state of its own before it is compiled; one that always does is called in Python.
MOST_SET_UPS = 2

# Takes the options of a scope, of which it knows more than is to be known here.
Tracing = Callable[[Any], AbstractContextManager[Any]]
# By which a guard tells steps apart: options, hooks that are inlined, inputs, sizes, numbers.
_Step = tuple[StepOptions, SiteKey, Sequence[torch.Tensor], Sequence[int], Sequence[Any]]


def _as_it_is(_options: Any) -> AbstractContextManager[Any]:
    return nullcontext()


class CapturedBackward:
    """One capture, and what was compiled of it for each (options, shapes, sizes, scalars).

    ``options`` gives those of the scope that a backward is in, which ``build`` compiles for; where they say
    ``background``, a backward runs compiled only if it is by then. ``tracing`` is entered where a backward may be
    traced, which costs more than it takes to see that a step is like the one before.
    """

    def __init__(
        self,
        capture: RuntimeCapture,
        history: History,
        options: Callable[[], StepOptions],
        build: Builder,
        tracing: Tracing = _as_it_is,
    ) -> None:
        self._options, self._tracing = options, tracing
        self._module = make_runnable(capture.graph_module)
        self._nodes, self._history = capture.nodes, history
        self._sites = tuple(find_sites(self._module.graph).values())
        self._skeleton = read_skeleton(self._module.graph)
        self._computes_with_scalars = any(
            opaque_kind(user) is None
            for node in self._module.graph.nodes
            if find_source(node)[0] == "scalars"
            for user in node.users
        )
        self._known = KnownVariants(self._skeleton, self._nodes, history)
        graph = self._module.graph
        self._compilation = Compilation(graph, self._nodes, self._sites, self._skeleton, history, self._known, build)
        # What ran at the last step that found something.
        self._last: Use | None = None
        # The ways in which tensors shared memory.
        self._shared: set[Shared] = set()
        # Why PyTorch's engine has to run it, each time.
        self._engine_reason: str | None = None
        self._set_ups = 0
        self._given = GivenGradients()
        # Whether it came before.
        self._was_met = False

    def run(
        self,
        inputs: list[torch.Tensor],
        sizes: Sequence[int],
        scalars: Sequence[Any],
        hooks: Sequence[Any],
        packed: Sequence[Any],
        run: BackwardRun,
    ) -> list[Any]:
        """The results of the backward, compiled if it was met before. The list of inputs is emptied.

        Raises:
            RunsEagerly: it is to run eagerly, which PyTorch's engine can.
            RunsCompiled: it is compiled, and PyTorch's graph need not keep what it saved.
            RuntimeError, TypeError: as eager's, for what a hook returned; besides, whatever the user's code raises.
        """
        if run.repeats:
            return list(self._module.forward(inputs, sizes, scalars, hooks, packed))
        options, last = self._options(), self._last
        # C++ functions are given theirs as they are; nothing else takes any.
        numbers = scalars if self._computes_with_scalars else ()
        if last is not None and last.direct is not None:
            is_like_it = self._is_like(last, (options, NO_SITES, inputs, sizes, numbers), run, lying=True)
            if is_like_it and (given := last.direct.run(inputs)) is not None:
                self._compilation.runs.count += 1
                return given
        frame = Frame(inputs, hooks, packed, scalars, lambda number: self._skeleton.slots[number].read(sizes))
        scalars = numbers
        identity = HookIdentity() if self._sites else None
        inlined = NO_SITES if identity is None else read_sites(self._sites, frame, identity)
        if last is not None and self._is_like(last, (options, inlined, inputs, sizes, scalars), run):
            if identity is None:
                last.look_for_direct(inputs)
            return self._use(last, frame, sizes)
        like = tuple([(t.shape, t.dtype, t.device, t.requires_grad) for t in frame.inputs])
        key = StepKey(options, tuple(sizes), tuple(scalars), like, inlined, self._find_shared(inputs))
        with self._tracing(options), torch.no_grad():
            use = self._known.look_up(key) or self._known.find(key, frame)
            if use is not None and use.is_right:
                use.guard = use.guard or StepGuard(options, inlined, inputs, sizes, scalars, use.guard_merged(inputs))
                self._last = use
                use.trial = use.trial or (Trial() if can_be_timed(inputs) else None)
                if run.is_held:
                    raise RunsCompiled
                return self._use(use, frame, sizes)
            if use is None and key not in self._known:
                self._engine_reason = self._engine_reason or find_engine_only(self._module.graph, frame)
                if self._engine_reason is not None:
                    self._known.refuse(key, self._engine_reason)
            waits = key in self._known if use is None else not use.is_done
            if waits or self._is_left(use) or not (use or self._known.has_room(frame)):
                if run.can_restart:
                    raise RunsEagerly if self._engine_reason is None else NeedsEngine
                run.was_eager = True
                return list(self._module.forward(frame.inputs, sizes, frame.scalars, hooks, packed))
            identity = identity or HookIdentity()
            recorder = Recorder(self._module, identity, run.call.find_node if run.can_restart else None)
            results = self._record(recorder, frame, sizes, key)
            if not self._is_worth_compiling(recorder, key):
                return results
            run.was_recorded = True
            self._given.unsafe |= find_unsafe_calls(recorder, frame, sizes)
            recorder.unsafe = self._given.unsafe
            if recorder.inlined and has_firm_calls(recorder):
                why = "a custom function, or a hook, gave no gradient"
                recorder = recorder.with_calls(dict.fromkeys(recorder.inlined, why))
            if identity.tensors:
                self._known.note_reads(key, identity.tensors.values())
            if use is None or not self._compilation.rehearse(use, recorder, frame, key):
                self._compilation.compile(recorder, frame, key)
            given, self._compilation.rehearsed = self._compilation.rehearsed, None
            run.was_recorded = given is None
            return results if given is None else given

    def _is_left(self, use: Use | None) -> bool:
        """Whether nothing is to be compiled of a capture that is met for the first time; this is told once a line."""
        is_first, self._was_met = not self._was_met, True
        if use is not None or not is_first or not self._history.is_churning():
            return False
        self._history.add_reason("runs eagerly", CHURN)
        return True

    def _is_like(self, use: Use, step: _Step, run: BackwardRun, lying: bool = False) -> bool:
        """Whether a step is as the one before, as its guard tells, and is to run so; with ``lying``, also whether its
        tensors lie as they did.

        Raises:
            TakesTurn: it is to run in PyTorch's engine, to be timed.
            RunsCompiled: PyTorch's graph need not keep what it saved.
        """
        if use.guard is None or use.variant.is_gone or not use.guard.holds(*step, lying=lying):
            return False
        if run.takes_turn and use.trial is not None and use.trial.is_waiting:
            raise TakesTurn(use.trial)
        if run.is_held:
            raise RunsCompiled
        run.trial = use.trial
        return True

    def _record(self, recorder: Recorder, frame: Frame, sizes: Sequence[int], key: StepKey) -> list[Any]:
        """The results of a step that is recorded; refuses the key where hooks were put on or taken off meanwhile."""
        try:
            return recorder.record(frame, sizes, frame.scalars)
        finally:
            if LATE.is_changed:
                self._engine_reason = LATE_HOOKS
                self._known.refuse(key, LATE_HOOKS)

    def _find_shared(self, inputs: Sequence[torch.Tensor]) -> Shared:
        """Find which tensors share memory; none, where that is not as it was too often."""
        shared = find_shared(inputs, self._skeleton.inputs)
        if shared not in self._shared and len(self._shared) >= MOST_SHARED:
            return ()
        self._shared.add(shared)
        return shared

    def _use(self, use: Use, frame: Frame, sizes: Sequence[int]) -> list[Any]:
        """The results of a step that is compiled; it ends in eager where a custom function, or a hook on a node,
        gives gradients that what is compiled has no place for."""
        self._compilation.runs.count += 1
        scalars, hooks, packed = frame.scalars, frame.hooks, frame.packed
        try:
            results = use.run(frame)
        except Unforeseen as found:
            unforeseen = found.with_traceback(None)
        except ZerosForNone:
            assert frame.absent is not None
            self._given.unsafe |= {self._own_call(use, name) for name in frame.absent.lost()}
            self._history.drop(use.variant)
            raise
        except LateHook:
            self._engine_reason = LATE_HOOKS
            self._history.drop(use.variant)
            raise
        except FAILURES:
            self._note_failure(use, frame)
            raise
        else:
            self._note_failure(use, frame)
            if frame.absent is not None:
                reason = (
                    "a hook or a custom function gave None for a gradient that it gave before, which is zeros to it"
                )
                self._history.add_reason("runs compiled", reason, self._nodes)
            return results
        call = self._own_call(use, unforeseen.call.node)
        if self._given.learn(call, unforeseen):
            self._history.drop(use.variant)
        self._history.add_reason("ended in eager", unforeseen.describe(frame), self._nodes)
        with torch.no_grad():
            return resume(self._module, call, unforeseen, (use.kept_inputs(frame), sizes, scalars, hooks, packed))

    def _own_call(self, use: Use, call: str) -> str:
        """Find, in this capture, a call of the one that was compiled."""
        return self._skeleton.calls[use.variant.numbering.calls.index(call)]

    def _note_failure(self, use: Use, frame: Frame) -> None:
        """After a failure, have the next step recorded again, and what is compiled rehearsed before it is used."""
        if frame.failure is not None:
            self._history.drop(use.variant)
            self._history.add_reason("failed, compiled, and is recorded again", frame.failure, self._nodes)

    def _is_worth_compiling(self, recorder: Recorder, key: StepKey) -> bool:
        """Whether a step that was recorded is like the next ones will be; refuses the key where there is no telling."""
        if self._engine_reason is not None:
            return False
        if recorder.failure is not None:
            self._known.refuse(key, recorder.failure)
            return False
        if recorder.setting_up and self._set_ups < MOST_SET_UPS:
            # An optimizer's first step: what it does at its second is what it does from then on.
            self._set_ups += 1
            return False
        if (lacking := self._given.find_lacking(recorder.results)) is None:
            return True
        if not self._given.wait():
            what = "a custom function or a hook"
            self._known.refuse(key, f"{lacking}, of {what}, gives a gradient at some steps, and None at others")
        return False
