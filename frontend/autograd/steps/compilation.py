# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compiles what was recorded of a backward, traced for all sizes that differ so far or else for these alone, and
rehearses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from retrograd.frontend.autograd.engine.background import BackgroundWork
from retrograd.frontend.autograd.engine.python_calls import Frame
from retrograd.frontend.autograd.hooks.hook_inlining import HookSite
from retrograd.frontend.autograd.sizes.open_variants import trace_variant
from retrograd.frontend.autograd.sizes.skeleton import Skeleton
from retrograd.frontend.autograd.sizes.structure import find_fixed, take_sample, translate_sample
from retrograd.frontend.autograd.steps.history import History, Runs
from retrograd.frontend.autograd.steps.known_variants import KnownVariants
from retrograd.frontend.autograd.steps.python_side import Compiled
from retrograd.frontend.autograd.steps.recompile_reasons import Situation, describe_situation, explain_difference
from retrograd.frontend.autograd.steps.recorder import Recorder
from retrograd.frontend.autograd.steps.step_key import StepKey
from retrograd.frontend.autograd.steps.variants import CompiledStructure, Use, Variant, kind_of, rehearse
from retrograd.frontend.autograd.tracing.trace import TracedBackward, trace_backward
from retrograd.frontend.hooks.hook_marks import describe_hook
from retrograd.frontend.python.source_locations import CaptureError

# How many recorded runs with infinite gradients are waited out: a scale of the loss is halved after each. Then some are
# no numbers at any scale, and what else there is has to be compared.
MOST_TOLD_NOTHING = 16
INFINITE = "the gradients of the one that was recorded are infinite, with which nothing can be compared"

# Compiles a graph as these options say; also tells whether it was compiled before, for another capture.
# Takes the options of a scope, of which it knows more than is to be known here.
Builder = Callable[[TracedBackward, Any], tuple[Compiled, bool]]


class Compilation:
    """Compiles one capture, each time for what one more step was like; ``known`` gets what comes of it."""

    def __init__(
        self,
        graph: torch.fx.Graph,
        nodes: tuple[str, ...],
        sites: Sequence[HookSite],
        skeleton: Skeleton,
        history: History,
        known: KnownVariants,
        build: Builder,
    ) -> None:
        self._graph, self._nodes, self._sites, self._skeleton = graph, nodes, sites, skeleton
        self._history, self._known, self._build = history, known, build
        # How often what was compiled has run.
        self.runs = Runs()
        # What a rehearsal gave, where that is what the step gives.
        self.rehearsed: list[Any] | None = None

    def _describe(self, frame: Frame, key: StepKey) -> Situation:
        """Describe the capture that is compiled now, in the words of the user's code."""
        hooks = [describe_hook(frame.hooks[site.hook]) for site in self._sites]
        results: Any = self._graph.output_node().args[0]
        returned = sum(result is not None for result in results)
        numbers = [(s.node, s.constant) for s in self._skeleton.slots if s.constant is not None]
        return describe_situation(self._nodes, hooks, returned, numbers, frame.inputs, key)

    def compile(self, recorder: Recorder, frame: Frame, key: StepKey) -> None:
        """Compile what was recorded: for all sizes that differ as they did so far, or else for these alone. What cannot
        be compiled runs eagerly, and the history says why."""
        if not self._known.has_compiled:
            self._history.note_graph(self.runs)
        self._known.note_compiled(key)
        make = partial(self._add, recorder=recorder, frame=frame, key=key)
        notes: list[str] = []
        try:
            for structure in self._learn(recorder, frame, key):
                if structure.is_open and not self._known.has_tried(structure, frame, key):
                    try:
                        if make(self._trace_open(structure, recorder, frame, key)):
                            return
                    except Exception as error:  # noqa: BLE001 (it is compiled for these numbers alone)
                        structure.refuse(f"{type(error).__name__}: {error}")
                notes += structure.notes
            traced = trace_backward(recorder, frame.inputs, key.sizes, frame.scalars, shared=key.shared)
            numbering = self._known.numbering(frame)
            kind, notes = kind_of(key, numbering), [*recorder.notes, *notes]
            make(Use(Variant(kind, traced, self._describe(frame, key), tuple(notes), numbering), numbering))
        except Exception as error:  # noqa: BLE001 (training goes on, whatever it is)
            self._known.refuse(key, f"{type(error).__name__}: {error}")

    def _learn(self, recorder: Recorder, frame: Frame, key: StepKey) -> Iterator[CompiledStructure]:
        """Take the numbers of a step into account. Gives what is known of backwards like it, and then, where floats are
        not left open, of those with the same floats."""
        sample = take_sample(self._skeleton, frame.inputs, key.sizes, recorder.results)
        whole = self._known.whole_structure(frame)
        whole.float_sets.add(self._skeleton.floats)
        kind = (self._nodes, find_fixed(self._skeleton, frame.inputs))
        alike = self._history.exchange_last(kind, sample, self._skeleton)
        if alike is not None and not whole.samples:
            earlier = translate_sample(*alike, self._skeleton, sample)
            whole.samples += [] if earlier is None else [earlier]
            whole.is_borrowed = earlier is not None
        if whole.fixed_floats is None:
            whole.learn(sample)
        yield whole
        if whole.fixed_floats is not None:
            structure = self._known.structure(frame)
            structure.learn(sample)
            yield structure

    def _trace_open(self, structure: CompiledStructure, recorder: Recorder, frame: Frame, key: StepKey) -> Use:
        """Trace for all sizes that differ as they did so far.

        Raises:
            CaptureError: they cannot be left open. Besides, whatever else fails in tracing.
        """
        numbering = self._known.numbering(frame)
        situation = self._describe(frame, key)
        variant = trace_variant(structure, self._skeleton, recorder, frame, key, situation, numbering)
        given = variant.guard.read(*self._known.sizes(frame, key))
        if given is None:
            raise CaptureError("what the trace takes for granted does not hold for these sizes", "report it")
        return Use(variant, numbering, given)

    def _add(self, use: Use, *, recorder: Recorder, frame: Frame, key: StepKey) -> bool:
        """Compile a variant, now or in the background; says whether the key is done with. In the background it is
        rehearsed on another recorded run: to keep the first one would keep its tensors."""
        variant, options = use.variant, key.options
        if options.background:
            variant.work = BackgroundWork(partial(self._build, variant.traced, options))
        else:
            variant.compiled, variant.known = self._build(variant.traced, options)
        if variant.structure is not None:
            variant.structure.variants.append(variant)
        elif options.background:
            self._known.remember(key, use)
        return options.background or self.rehearse(use, recorder, frame, key)

    def rehearse(self, use: Use, recorder: Recorder, frame: Frame, key: StepKey) -> bool:
        """Rehearse a variant on a recorded run; says whether the key is done with: not where it is wrong for open sizes
        and these may be compiled for by themselves."""
        variant = use.variant
        try:
            if variant.compiled is None:
                assert variant.work is not None
                variant.compiled, variant.known = variant.work.result()
            frame.sizes = use.sizes
            recorder = recorder.with_calls(variant.called)
            # Processes that have to agree would wait for one whose gradients alone are infinite.
            waits = variant.told_nothing < MOST_TOLD_NOTHING and not variant.compiled.is_rearranged
            found = rehearse(variant.traced, variant.compiled, recorder, frame, waits=waits)
            if found.tells_nothing:
                self._wait(use, key)
                return True
            problem, self.rehearsed = found.problem, found.results
            problem = None if problem is None else f"compiled, it is wrong: {problem}; report it"
        except Exception as error:  # noqa: BLE001 (training goes on, whatever it is)
            problem = f"{type(error).__name__}: {error}"
        if variant.compiled is not None:
            problem = variant.compiled.find_disagreement(problem)
        if problem is None and not any(variant.right.values()):
            reasons = explain_difference(variant.situation, self._history.situations)
            self._history.situations.append(variant.situation)
            outcome = "runs what was compiled before" if variant.known else "compiled"
            assert variant.compiled is not None
            self._history.add(outcome, self._nodes, (*reasons, *variant.notes, *variant.compiled.notes))
        variant.right[use.ones] = problem is None
        if problem is None:
            self._known.remember(key, use)
        elif variant.structure is None:
            self._known.refuse(key, problem)
        elif not use.ones:
            variant.structure.refuse(problem)
        return problem is None or variant.structure is None

    def _wait(self, use: Use, key: StepKey) -> None:
        """Leave it to another recorded run to tell if a variant is right: this one's gradients are infinite."""
        use.variant.told_nothing += 1
        if use.variant.structure is None:
            self._known.remember(key, use)
        self._history.add_reason("is compared at its next step", INFINITE, self._nodes)
