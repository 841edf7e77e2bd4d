# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Programs for other Python values, other modes, and more tensors that require grad, than a model was first compiled
with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from retrograd.frontend.hooks.pack_hooks import HookPair
from retrograd.frontend.python.argument_answers import Questions
from retrograd.frontend.python.python_places import PythonValues
from retrograd.frontend.python.source_locations import CaptureError
from retrograd.frontend.python.user_lines import warn_user
from retrograd.frontend.verification.errors import VerificationError
from retrograd.parting import PartsFromEagerError
from retrograd.pipelines.infra.diagnostics import PipelineError
from retrograd.pipelines.infra.errors import CompileError
from retrograd.runtime.arguments.calling import (
    ArgumentError,
    OtherAnswersError,
    OtherProgramError,
    OtherStateError,
    UnaskedGradientError,
)
from retrograd.runtime.steps.compiled import CompiledBackward

if TYPE_CHECKING:
    from retrograd.frontend.doors.capture import CapturedGraph

# As many as PyTorch's compiler makes of one function before it gives up (torch._dynamo.config.recompile_limit).
LIMIT = 8
# Of those, as many as are made because the arguments' contents give other answers.
MOST_ANSWERS = 3
_REMEDY = "pass it as a tensor argument, or compile the model for each value by itself"


Compile = Callable[[Sequence[Any], Mapping[str, Any]], CompiledBackward]


class SpecializationWarning(UserWarning):
    """A model goes by a Python value that is another one at each call, and runs in eager."""


def asking(
    captured: CapturedGraph, call: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
    """``call`` of the model's parameters and buffers and its arguments, behind the model's checks of these, and asked
    before what the model asks of them.

    Raises:
        OtherAnswersError: of the result, an answer is another one.
    """
    module = captured.module
    call = module.checked(call, captured.signature)
    if not module.answers:
        return call
    asked = module.asked(captured.signature)
    questions = Questions(module.answers, len(module.examples or ()))

    def run(primals: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        other = questions.find_other(asked(primals))
        if other is not None:
            raise OtherAnswersError(f"the contents of the arguments decide otherwise: {other}; compile again")
        return call(primals)

    return run


@dataclass
class Specializations:
    """Lists the values that a model was compiled for beside ``values``, those of the first program.

    ``model`` is the model, ``compile`` compiles it for arguments, positional and by name, and ``compile_in_eager`` as
    it runs in eager; ``hooks`` are those for saved tensors that were open, and are so again for others. ``texts`` says
    what each was compiled for. ``parting`` says how what was compiled first differs from the model in eager, once that
    was found: it is not used again.
    """

    model: Callable[..., Any]
    values: PythonValues
    compile: Compile
    compile_in_eager: Compile
    hooks: HookPair | None
    fallback: str
    texts: list[str] = field(default_factory=list)
    parting: str | None = None
    _stays_in_eager: bool = False
    _others: list[tuple[PythonValues, CompiledBackward]] = field(default_factory=list)
    _has_warned: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def is_first(self) -> bool:
        """Whether Python's values are those of the first program, and that does what the model does."""
        return self.parting is None and self.values.are_as_before()

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any], refused: OtherProgramError | None = None) -> Any:
        """Call the program for what Python's values are now, and these arguments; compiled now if there is none.
        ``refused`` says why the first program does not take them.

        Where that would be one more than the limit, the model runs in eager, which a warning says.

        Raises:
            ArgumentError: the arguments are others than compiled for; or there would be one program more than the
                limit, and ``fallback`` is ``error``.
            CaptureError, PipelineError, CompileError: it cannot be compiled.
        """
        while True:
            if isinstance(refused, PartsFromEagerError):
                self._note_parting(refused)
            # Gradients may be off, say, which the model asks.
            if self._stays_in_eager or self.values.are_in_eager():
                return self._call_model(args, kwargs)
            try:
                return self._call_other(args, kwargs, refused)
            except PartsFromEagerError as error:
                refused = error

    def _note_parting(self, refused: PartsFromEagerError) -> None:
        """Leave what was compiled alone: the model is compiled as it runs in eager, or, where that does not help, not
        at all."""
        with self._lock:
            if refused.is_last:
                self._leave_to_eager(refused)
            elif self.parting is None:
                self.parting = refused.parting
                self._others.clear()

    def _leave_to_eager(self, refused: PartsFromEagerError) -> None:
        self.parting = self.parting or refused.parting
        if self.fallback == "error":
            raise VerificationError(str(refused))
        if not self._stays_in_eager:
            self._stays_in_eager = True
            self.texts.append(f"none, runs in eager: {refused.parting}")
            warn_user(f"{refused.parting}. It runs in eager: {refused.remedy}", SpecializationWarning)

    def _call_other(self, args: Sequence[Any], kwargs: Mapping[str, Any], refused: OtherProgramError | None) -> Any:
        for values, program in reversed(self._others):
            if values.are_as_before():
                try:
                    return program(*args, **kwargs)
                except PartsFromEagerError:
                    raise
                except OtherProgramError:
                    # Nothing ran. One for more tensors that require grad may be among the others.
                    continue
        other_answers = isinstance(refused, OtherAnswersError)
        reason = f"{'fewer' if isinstance(refused, UnaskedGradientError) else 'more'} tensors that require grad"
        if isinstance(refused, OtherStateError):
            # Of which program it is what it is not, is for who calls that alone.
            reason = str(refused).partition(";")[0]
        elif other_answers:
            reason = str(refused)
        reason = "; ".join(self.values.find_changed()) or self.parting or reason
        # Contents differ from call to call where they differ at all.
        limit = MOST_ANSWERS if other_answers else LIMIT
        if len(self._others) >= limit:
            return self._run_eager(args, kwargs, reason)
        try:
            program = self._compile(args, kwargs, reason)
        except (CaptureError, CompileError, PipelineError) as error:
            if self.parting is None:
                raise
            raise PartsFromEagerError(
                f"{self.parting}; as it runs in eager it is not compiled: {error}", True
            ) from error
        return program(*args, **kwargs)

    def _run_eager(self, args: Sequence[Any], kwargs: Mapping[str, Any], reason: str) -> Any:
        message = (
            f"compiled {len(self._others) + 1} times, and once more other than what it was compiled with: {reason}"
        )
        if self.fallback == "error":
            raise ArgumentError(f"{message}; {_REMEDY}")
        if not self._has_warned:
            self._has_warned = True
            warn_user(f"{message}; such calls run in eager: {_REMEDY}", SpecializationWarning)
        return self._call_model(args, kwargs)

    def _call_model(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with ExitStack() as stack:
            self._open_hooks(stack)
            return self.model(*args, **kwargs)

    def _open_hooks(self, stack: ExitStack) -> None:
        if self.hooks is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self.hooks.pack, self.hooks.unpack))

    def _compile(self, args: Sequence[Any], kwargs: Mapping[str, Any], reason: str) -> CompiledBackward:
        with self._lock, ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            self._open_hooks(stack)
            program = (self.compile if self.parting is None else self.compile_in_eager)(args, kwargs)
            alone = program.specializations
            if not isinstance(alone, Specializations):
                raise AssertionError("a program that was compiled here knows what for")
            # It is called for these values only.
            program.specializations = None
            self._others.append((alone.values, program))
            self.texts.append(reason if self.parting is None else f"as it runs in eager: {reason}")
            return program
