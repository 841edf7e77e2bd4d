# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compiles a model ahead of time: from a request to what the user calls."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from retrograd.beside_eager import beside_eager, parting_from_trace
from retrograd.bisection import Bisection, find_fault, saved_executable
from retrograd.build import build, tell_notes
from retrograd.built import Build
from retrograd.contract.partitions import BUDGET, MIN_CUT
from retrograd.contract.roles import BACKWARD, FORWARD
from retrograd.description import describe
from retrograd.frontend.autograd.engine.family_lock import COMPILING
from retrograd.frontend.doors.capture import CapturedGraph, capture_joint, find_constants
from retrograd.frontend.doors.eager_peak import eager_peak_of_model
from retrograd.frontend.doors.function_changes import CAN_CHANGE
from retrograd.frontend.doors.graph_calls import CompiledFunction
from retrograd.frontend.doors.kept_binding import BindingRecord
from retrograd.frontend.hooks.pack_hooks import find_open_pair, under_hooks
from retrograd.frontend.islands.eager_values import find_primals, record_values
from retrograd.frontend.islands.island_choice import draws_numbers
from retrograd.frontend.layers.random_ops import find_seed
from retrograd.frontend.layers.recurrent import recurrent_loops
from retrograd.frontend.libraries.ops import library_ops
from retrograd.frontend.preparation.fx_partition import bind, bind_traced
from retrograd.frontend.python.drawn_arrays import DRAWN, Drawing, DrawnError, GivenArrays
from retrograd.frontend.python.python_places import PythonValues
from retrograd.frontend.python.source_locations import CaptureError
from retrograd.frontend.sizes.size_one import admit_ones
from retrograd.frontend.verification.first_comparison import verified
from retrograd.keeping import keep_model
from retrograd.known_models import ModelInQuestion
from retrograd.options import Options, Request, tensors_of
from retrograd.pipelines.infra.errors import CompileError
from retrograd.pipelines.stages.staged import STAGE_NAMES, Progress, StagedModule
from retrograd.runtime.arguments.calling import CallingConvention, OtherProgramError
from retrograd.runtime.arguments.repeated_memory import filling_repeated
from retrograd.runtime.arguments.state import ModelState
from retrograd.runtime.programs.executor import Program
from retrograd.runtime.steps.compiled import Call, CompiledBackward, Parts, Unchecked
from retrograd.specializations import Specializations, asking
from retrograd.stagers import AheadOfTime, Work
from retrograd.variants import BackwardVariants, variants_of

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class DrawnArguments:
    """The arrays that each call of a model draws, as tensors of these shapes and dtypes on a device, by name."""

    drawing: Drawing
    device: torch.device
    kinds: Sequence[tuple[torch.Size, torch.dtype]]

    def draw(self) -> dict[str, Any]:
        """Draw the arrays of a call.

        Raises:
            OtherProgramError: they are of other shapes or dtypes than compiled for.
        """
        drawn = self.drawing.draw(self.device)
        if [(t.shape, t.dtype) for t in drawn] != self.kinds:
            raise OtherProgramError("an array that the model draws is of another shape or dtype at each call")
        return {DRAWN: drawn}

    def save(self) -> Callable[[], None]:
        """Give what puts Python's generators back to what they are now."""
        return self.drawing.save()


@dataclass(frozen=True)
class Compilation:
    """A model, and how the user asked to have it compiled. It is compiled once more for other Python values than it
    reads at first.

    ``dynamic_shapes`` and ``progress`` are as for :func:`retrograd.compile_backward`; by ``as_in_eager`` the trace does
    not say of itself that it compiles.
    """

    model: Callable[..., Any]
    request: Request
    dynamic_shapes: Any = None
    progress: Callable[[str], None] | None = None
    as_in_eager: bool = False

    def compile(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        portable: bool = False,
        question: ModelInQuestion | None = None,
    ) -> CompiledBackward:
        """Compile for arguments like these; returns and raises what :func:`retrograd.compile_backward` does. By
        ``question`` other processes may know what was compiled."""
        try:
            return self._compile(args, kwargs, portable=portable, question=question)
        except DrawnError as error:
            if error.drawing is None or self.dynamic_shapes is not None:
                raise
            try:
                return self._compile_given_arrays(args, kwargs, error.drawing, portable=portable)
            except CaptureError as other:
                # It uses them otherwise than tensors can be used.
                raise error from other

    def _compile_given_arrays(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        drawing: Drawing,
        *,
        portable: bool,
    ) -> CompiledBackward:
        """Compile the model with what it draws as an argument, which each call of it draws."""
        tensors = tensors_of(self.model, args, kwargs)
        device = tensors[0].device if tensors else torch.device("cpu")
        undo = drawing.save()
        try:
            drawn = drawing.draw(device)
        finally:
            undo()
        with_arrays = replace(self, model=GivenArrays(self.model, drawing))
        given = {**(kwargs or {}), DRAWN: drawn}
        compiled = with_arrays._compile(args, given, portable=portable, question=None)
        alone = compiled.specializations
        if not isinstance(alone, Specializations):
            raise AssertionError("what was compiled here knows what for")
        in_eager = replace(self, as_in_eager=True)
        compiled.specializations = Specializations(
            self.model, alone.values, self.compile, in_eager.compile, alone.hooks, self.request.fallback
        )
        compiled.draws = DrawnArguments(drawing, device, [(t.shape, t.dtype) for t in drawn])
        return compiled

    def _compile(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        *,
        portable: bool,
        question: ModelInQuestion | None,
    ) -> CompiledBackward:
        options, phases, hooks = self._options(args, kwargs), Progress(self.progress), find_open_pair()
        with COMPILING, contextlib.ExitStack() as stack, recurrent_loops(options.loops):
            with phases.phase("capture"), library_ops(options.libraries.compiled() if portable else options.libraries):
                captured = capture_joint(
                    stack, self.model, args, kwargs, self.dynamic_shapes, as_in_eager=self.as_in_eager
                )
                python = captured.module.python or PythonValues()
            if captured.sizes.sizes and options.target.kinds == ("cuda",):
                _LOG.warning(
                    "sizes are open, for which code on CUDA is slow (docs/dynamic-shapes.md): compile for each size, "
                    'or use torch.compile(model, backend="retrograd"), which does for sizes that come again'
                )
            # A PyTorch that cannot tell which tangents are absent calls the backward of all outputs, as does the
            # comparison of a whole step.
            for_loss = CAN_CHANGE and self.request.verify is not True
            graph = captured.for_build()
            if options.partition == BUDGET:
                with phases.phase("measure eager"):
                    graph = replace(graph, eager_peak=eager_peak_of_model(captured.module))
            built = build(graph, options, phases, portable=portable, for_loss=for_loss)
            tell_notes(built)
            variants = variants_of(built)
            backward = built.function(BACKWARD) if variants is None else variants.all_outputs()
            record = None if question is None else BindingRecord()
            bound = parting_from_trace(bind(captured, built.function(FORWARD), backward, record))
            call = filling_repeated(bound, captured.signature.mutated)
            if self.request.verify is True:
                call = self._verified(call, captured, built, backward, args, kwargs)
            elif self.request.verify:
                notes = [] if built.checks is None else built.checks.notes
                call = beside_eager(captured, call, built.work.options.device, notes.append)
            call = asking(captured, under_hooks(call, hooks))
        if captured.sizes.sizes:
            # Outside of the trace, in which every tensor would be a fake one.
            with COMPILING, recurrent_loops(options.loops), phases.phase("check sizes of 1"):
                captured = admit_ones(captured, self.model, args, kwargs)
        compiled = CompiledBackward(self._parts(captured, built, variants, call))
        if question is not None and record is not None:
            with COMPILING:
                keep_model(question, captured, built, record, compiled.manifest)
        in_eager = replace(self, as_in_eager=True)
        compiled.specializations = Specializations(
            self.model, python, self.compile, in_eager.compile, hooks, self.request.fallback
        )
        return compiled

    def _options(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Options:
        options = self.request.on(tensors_of(self.model, args, kwargs))
        # By ``True`` the whole step is compared.
        return replace(options, verify=False) if self.request.verify is True else options

    def _verified(
        self,
        call: Call,
        captured: CapturedGraph,
        built: Build,
        backward: CompiledFunction,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
    ) -> Call:
        """``call`` whose first step is compared with eager."""
        drawn = find_seed(captured.graph_module.graph) is not None or draws_numbers(captured.graph_module)
        traced = bool(backward.narrowed) or drawn
        reference = bind_traced(self.model, args, kwargs, backward, self.dynamic_shapes) if traced else None
        # Slices for bisection are of fixed sizes.
        unlocated = backward.narrowed or captured.sizes.sizes
        locate = None if unlocated else partial(_locate, captured, built)
        return verified(call, captured, reference, locate)

    def _parts(self, captured: CapturedGraph, built: Build, variants: BackwardVariants | None, call: Call) -> Parts:
        manifest = describe(captured, built, _name_of(self.model))
        if asked := [*captured.module.checks, *captured.module.answers]:
            manifest.report["checks"] = list(dict.fromkeys(map(str, asked)))
        if left := captured.module.kept.plain.left:
            manifest.report["left_attributes"] = list(left)
        if self.request.offloads and self.request.cuda_graphs:
            manifest.report["cuda_graphs"] = ["not captured: a graph keeps the memory of residuals that are offloaded"]
        convention = _convention(captured, built.program)
        names, training = [e.name for e in convention.state], captured.signature.training
        constants, own_hooks = find_constants(captured.graph_module), captured.module.own_hooks
        python = captured.module.python or PythonValues()
        found = [(p.table, p.name, t, p.path) for p in python.tensors if (t := p.value()) is not None]
        said = "by the first step, or that raises" if self.request.verify is True else "not verified: not wanted"
        return Parts(
            call=call,
            convention=convention,
            state=ModelState(
                names, captured.module.model, training, constants, own_hooks.find, found, captured.signature.kept
            ),
            program=built.program,
            portable=built.compile_portable,
            manifest=manifest,
            ir=_stage_reader(built.staged),
            bisect=self._bisection().bisect,
            times=built.times,
            variants=None if variants is None else variants.texts,
            verification=built.checks or Unchecked(said),
            cut=built.cut_halves(),
            captured=built.captured,
            mover=built.mover(),
            answers=[str(answer) for answer in captured.module.answers],
        )

    def _bisection(self) -> Compilation:
        """The same for a bisection: it goes by where it runs and what is saved, and else by the defaults."""
        asked = self.request
        request = Request(
            target=asked.target,
            partition=asked.partition,
            memory_budget=asked.memory_budget,
            save_policy=asked.save_policy,
            fallback=asked.fallback,
        )
        return Compilation(self.model, request)

    def bisect(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        artifact: str | os.PathLike[str] | None = None,
    ) -> Bisection:
        """Find the first op at fault for these arguments, as :func:`retrograd.bisect`."""
        options = self.request.on(tensors_of(self.model, args, kwargs))
        with COMPILING, contextlib.ExitStack() as stack, recurrent_loops(options.loops):
            captured = capture_joint(stack, self.model, args, kwargs)
            graph, executable = captured.for_build(), None
            try:
                built = build(graph, options)
                staged, executable = built.staged, built.executable
            except CompileError:
                plain = replace(options, partition=MIN_CUT if options.partition == BUDGET else options.partition)
                staged = AheadOfTime(Work(graph, plain, Progress(), None)).stage(())
        # After the trace is closed, in which every tensor would be a fake one.
        values = record_values(captured.graph_module, find_primals(captured, args, kwargs or {}))
        if artifact is not None:
            executable = saved_executable(artifact, staged)
        return find_fault(staged, options.target, values, executable)


def _locate(captured: CapturedGraph, built: Build, primals: Sequence[torch.Tensor]) -> str:
    values, target = record_values(captured.graph_module, primals), built.work.options.target
    return str(find_fault(built.staged, target, values, built.executable))


def _convention(captured: CapturedGraph, program: Program) -> CallingConvention:
    module = captured.module
    return CallingConvention(
        captured.signature,
        in_spec=module.in_spec,
        out_spec=module.out_spec,
        device=program.torch_device,
        has_hooks=module.hook_calls.has_any(),
    )


def _stage_reader(staged: StagedModule) -> Callable[[str], str]:
    def read(stage: str) -> str:
        if stage == "linalg":
            return staged.linalg()
        if stage not in staged.texts:
            raise ValueError(f"no stage '{stage}'; there are {', '.join(STAGE_NAMES)}")
        return staged.texts[stage]

    return read


def _name_of(model: Callable[..., Any]) -> str:
    return type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__qualname__", repr(model))
