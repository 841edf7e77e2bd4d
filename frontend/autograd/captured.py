# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A captured backward from its first run on: recorded eagerly, then compiled, for each set of shapes it meets."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from retrograd.frontend.autograd.background import BackgroundWork
from retrograd.frontend.autograd.compiler import RuntimeCapture
from retrograd.frontend.autograd.differences import Situation, explain_difference, name_tensors
from retrograd.frontend.autograd.guards import StepGuard
from retrograd.frontend.autograd.hook_identity import HookIdentity
from retrograd.frontend.autograd.hook_inlining import find_sites, read_sites
from retrograd.frontend.autograd.python_calls import Frame, accumulate_into
from retrograd.frontend.autograd.recorder import Recorder, make_runnable
from retrograd.frontend.autograd.rehearsal import Rehearsal
from retrograd.frontend.autograd.trace import TracedBackward, trace_backward
from retrograd.frontend.hook_marks import describe_hook
from retrograd.frontend.hook_ops import BACKWARD

# A backward of ever new shapes or numbers: beyond this many variants of one capture, further ones run eagerly.
MOST_VARIANTS = 8

# With how many of the compiled backwards a new one is compared, to say why it is new.
MOST_SITUATIONS = 64
# Steps at which a hook may set up a state of its own before it is compiled; one that always does is called in Python.
MOST_SET_UPS = 2


class Compiled(Protocol):
    """A compiled backward; ``notes`` are to be told with it."""

    @property
    def notes(self) -> Sequence[str]:
        """What of it is not compiled, and why."""

    def run(self, arguments: Sequence[torch.Tensor], python: Any) -> list[torch.Tensor]:
        """Run it on the tensors that its graph takes, with a ``PythonSide`` to call."""


# Compiles a graph; also says whether it was compiled before, for another capture.
Builder = Callable[[TracedBackward], tuple[Compiled, bool]]


@dataclass(frozen=True)
class Recompile:
    """One compilation of a backward, or the decision to run it eagerly.

    ``reasons``: why nothing that was there served, or why it cannot be compiled.
    """

    number: int
    outcome: str
    nodes: tuple[str, ...]
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        named = ", ".join(self.nodes[:3]) + (", ..." if len(self.nodes) > 3 else "")
        where = f" of {len(self.nodes)} nodes ({named})" if self.nodes else ""
        return f"{self.number}: backward{where} {self.outcome}: {'; '.join(self.reasons)}"


@dataclass
class History:
    """All that was compiled or refused, also written to a log."""

    log: logging.Logger
    entries: list[Recompile] = field(default_factory=list)
    # What was compiled, the last of it.
    situations: deque[Situation] = field(default_factory=lambda: deque(maxlen=MOST_SITUATIONS))

    def add(self, outcome: str, nodes: Sequence[str], reasons: Sequence[str]) -> None:
        """Add an entry."""
        self.entries.append(Recompile(len(self.entries), outcome, tuple(nodes), tuple(reasons)))
        self.log.info("%s", self.entries[-1])

    def add_refusal(self, error: Exception) -> None:
        """Add a backward that PyTorch could not capture; the same reason is told once."""
        reasons = (f"PyTorch cannot capture it: {error}",)
        if all(entry.reasons != reasons for entry in self.entries):
            self.add("runs eagerly", (), reasons)


@dataclass
class _Variant:
    """What was compiled for one set of shapes; the ``guard`` holds for most of the steps that it is for."""

    traced: TracedBackward
    compiled: Compiled
    guard: StepGuard | None = None

    def fits(self, *step: Any) -> bool:
        """Whether it is known at a glance to be for a step."""
        return self.guard is not None and self.guard.holds(*step)


@dataclass(frozen=True)
class _Pending:
    """What is being compiled."""

    traced: TracedBackward
    work: BackgroundWork[tuple[Compiled, bool]]


class CapturedBackward:
    """One capture, and what was compiled of it for each (options, shapes, sizes, scalars)."""

    def __init__(self, capture: RuntimeCapture, history: History) -> None:
        self._module = make_runnable(capture.graph_module)
        self._nodes, self._history = capture.nodes, history
        self._sites = tuple(find_sites(self._module.graph).values())
        # None for what runs eagerly.
        self._variants: dict[Hashable, _Variant | _Pending | None] = {}
        # The tensors that the hooks of a variant read of their own.
        self._reads: dict[Hashable, list[weakref.ref[torch.Tensor]]] = {}
        # The one that ran at the last step that found one.
        self._last: _Variant | None = None
        self._is_full = False
        self._set_ups = 0

    def run(
        self,
        options: Hashable,
        build: Builder,
        background: bool,
        inputs: Sequence[torch.Tensor],
        sizes: Sequence[Any],
        scalars: Sequence[Any],
        hooks: Sequence[Any],
        packed: Sequence[Any],
    ) -> list[Any]:
        """The results of the backward, compiled if it was met before; with ``background``, if compiled by now.

        Raises:
            RuntimeError, TypeError: as eager's, for what a hook returned; besides, whatever the user's code raises.
        """
        frame = Frame(list(inputs), hooks, packed)
        numbers = tuple(s.shape[1] if isinstance(s, torch.Tensor) else s for s in sizes)
        identity = HookIdentity() if self._sites else None
        inlined = read_sites(self._sites, frame, identity) if identity is not None else ()
        last = self._last
        if last is not None and last.fits(options, inlined, frame.inputs, sizes, scalars):
            return _run_compiled(last, inputs, frame)
        like = tuple([(t.shape, t.dtype, t.device, t.requires_grad) for t in frame.inputs])
        key = (options, numbers, tuple(scalars), like, inlined)
        with torch.no_grad():
            variant = self._variants.get(key)
            if isinstance(variant, _Variant):
                if variant.guard is None:
                    variant.guard = StepGuard(options, inlined, frame.inputs, sizes, scalars)
                self._last = variant
                return _run_compiled(variant, inputs, frame)
            known = not variant.work.is_done if isinstance(variant, _Pending) else key in self._variants
            if known or not (variant or self._has_room()):
                return list(self._module.forward(frame.inputs, sizes, scalars, hooks, packed))
            identity = identity or HookIdentity()
            recorder = Recorder(self._module, identity)
            results = recorder.record(frame, sizes, scalars)
            if recorder.setting_up and self._set_ups < MOST_SET_UPS:
                # An optimizer's first step: what it does at its second is what it does from then on.
                self._set_ups += 1
                return results
            if identity.tensors:
                self._reads[key] = [weakref.ref(tensor) for tensor in identity.tensors.values()]
            self._variants[key] = self._compile(recorder, build, frame, key, variant, background)
            return results

    def _has_room(self) -> bool:
        """Whether one more variant may be compiled; the first time that it may not, this is told.

        Variants with hooks of tensors that are gone can run no more.
        """
        if len(self._variants) >= MOST_VARIANTS:
            for key in [key for key, tensors in self._reads.items() if any(tensor() is None for tensor in tensors)]:
                del self._variants[key], self._reads[key]
        if len(self._variants) >= MOST_VARIANTS and not self._is_full:
            self._is_full = True
            reason = f"it was compiled for {MOST_VARIANTS} sets of shapes and numbers already"
            self._history.add("runs eagerly", self._nodes, (reason,))
        return not self._is_full

    def _describe(
        self, frame: Frame, sizes: Sequence[int], scalars: Any, options: Hashable, inlined: Hashable
    ) -> Situation:
        """What is compiled now, in the words of the user's code."""
        names = name_tensors(frame.inputs)
        leaves = [t for t in frame.inputs if t.is_leaf and t.requires_grad]
        gradients = {id(t.grad) for t in leaves}
        return Situation(
            self._nodes,
            tuple([describe_hook(frame.hooks[site.hook]) for site in self._sites]),
            inlined,
            tuple([(name, tuple(t.shape), t.dtype) for name, t in zip(names, frame.inputs, strict=True)]),
            sum(id(t) in gradients for t in frame.inputs),
            tuple(sizes),
            tuple(scalars),
            options,
        )

    def _compile(
        self,
        recorder: Recorder,
        build: Builder,
        frame: Frame,
        key: Any,
        pending: _Pending | None,
        background: bool,
    ) -> _Variant | _Pending | None:
        """The variant; None where there can be none, and the history says why. In the background it is compiled first,
        and another recorded run is what it is rehearsed on: to keep the first one would keep its tensors."""
        options, sizes, scalars, _, inlined = key
        situation = self._describe(frame, sizes, scalars, options, inlined)
        try:
            if pending is not None:
                traced = pending.traced
                compiled, known = pending.work.result()
            else:
                traced = trace_backward(recorder, frame.inputs, sizes, scalars)
                if background:
                    return _Pending(traced, BackgroundWork(partial(build, traced)))
                compiled, known = build(traced)
            problem = _rehearse(traced, compiled, recorder, frame)
        except Exception as error:  # noqa: BLE001 (training goes on, whatever it is)
            self._history.add("runs eagerly", self._nodes, (f"{type(error).__name__}: {error}",))
            return None
        if problem is not None:
            self._history.add("runs eagerly", self._nodes, (f"compiled, it is wrong: {problem}; report it",))
            return None
        reasons = (*explain_difference(situation, self._history.situations), *recorder.notes, *compiled.notes)
        self._history.situations.append(situation)
        self._history.add("runs what was compiled before" if known else "compiled", self._nodes, reasons)
        return _Variant(traced, compiled)


def _rehearse(traced: TracedBackward, compiled: Compiled, recorder: Recorder, frame: Frame) -> str | None:
    """What the compiled backward gets wrong on the recorded run; nothing where a hook in Python wrote to what it reads
    since."""
    rehearsal = Rehearsal(traced, recorder)
    arguments = rehearsal.restore(traced.arguments(frame))
    if arguments is None:
        return None
    results = compiled.run(arguments, rehearsal)
    return rehearsal.find_difference(results)


def _run_compiled(variant: _Variant, inputs: Sequence[torch.Tensor], frame: Frame) -> list[Any]:
    # Whoever is the last to hold a saved tensor frees it: not the lists that it came in.
    if isinstance(inputs, list):
        inputs.clear()
    traced = variant.traced
    arguments = traced.arguments(frame)
    traced.release(frame)
    given = variant.compiled.run(arguments, _PythonSide(traced, frame))
    return [None if number is None else given[number] for number in traced.results]


@dataclass(slots=True)
class _PythonSide:
    """The calls of a graph, on this step's frame."""

    traced: TracedBackward
    frame: Frame

    def call_hook(self, kind: str, hook: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self.traced.calls.calls[kind, hook](self.frame, values)

    def call_backward(self, function: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self.traced.calls.calls[BACKWARD, function](self.frame, values)

    def accumulate_grad(self, param: int, gradient: torch.Tensor, owned: bool) -> None:
        parameter = self.frame.inputs[self.traced.params[param]]
        if owned and parameter.grad is None and gradient.stride() == parameter.stride():
            # As AccumulateGrad takes over a gradient that nobody else has; it counts references, and a plan has one.
            parameter.grad = gradient
        else:
            accumulate_into(parameter, None, gradient)

    def final_callbacks(self) -> None:
        """The engine calls them when the backward has returned."""
