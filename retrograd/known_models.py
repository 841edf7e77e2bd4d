# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Models that another process compiled: known by what they do, and opened without a trace.

What a model does is recorded (``frontend/doors/model_record.py``), which takes a tenth of a trace; with the situation
that it is compiled in (``situation.py``) that is the key. What is found is used where each of its functions passed the
check of its first call before. Whatever is in doubt is traced and compiled as if nothing were known.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from retrograd.contract.manifest import Manifest
from retrograd.contract.partitions import BUDGET
from retrograd.contract.roles import BACKWARD, FORWARD
from retrograd.frontend.doors.flat_module import FlatModule
from retrograd.frontend.doors.kept_binding import rebind
from retrograd.frontend.doors.model_record import record_model
from retrograd.frontend.doors.recorded_graph import Doubt
from retrograd.frontend.hooks.pack_hooks import under_hooks
from retrograd.frontend.layers.recurrent import recurrent_loops
from retrograd.frontend.libraries.ops import library_ops
from retrograd.frontend.python.python_places import PythonValues
from retrograd.frontend.python.user_lines import warn_user
from retrograd.frontend.verification.registered_kernels import describe_kernels
from retrograd.kept_model import KeptModel
from retrograd.options import FIRST, Options, Request, tensors_of
from retrograd.pipelines.stages.kept_code import code_of
from retrograd.runtime.arguments.calling import CallingConvention
from retrograd.runtime.arguments.repeated_memory import filling_repeated
from retrograd.runtime.arguments.state import ModelState
from retrograd.runtime.artifact import ArtifactError
from retrograd.runtime.programs.executor import Program
from retrograd.runtime.reports.peak import Half
from retrograd.runtime.steps.compiled import CompiledBackward, Parts, Portable, Unchecked
from retrograd.runtime.steps.islands import IslandTimes
from retrograd.runtime.steps.step_calls import StepCalls
from retrograd.situation import read_situation
from retrograd.store import Store

_LOG = logging.getLogger(__name__)
# Of one who passed its check.
RIGHT = b"right"


@dataclass(frozen=True)
class KnownChecks:
    """First calls that were checked in another process."""

    names: Sequence[str]

    def describe(self) -> list[str]:
        """Describe the outcome of first calls in words, for each function."""
        return [f"@{name}: verified, by an earlier program from the cache" for name in self.names]

    def find_wrong(self) -> str | None:
        """Find nothing: what is wrong is not used."""
        return None


@dataclass(frozen=True)
class _Recorded:
    """A model that was recorded, and the digest of what it does."""

    digest: str
    flat: FlatModule

    @property
    def python(self) -> PythonValues:
        """The Python values that it went by."""
        return self.flat.python or PythonValues()

    def does_same_as(self, other: _Recorded) -> bool:
        """Whether another record is of the same, by the same Python values."""
        return self.digest == other.digest and self.python.are_those_of(other.python)


@dataclass
class ModelInQuestion:
    """A model that may be known: ``options`` are those that follow from ``request`` for its arguments."""

    model: Callable[..., Any]
    request: Request
    options: Options
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    store: Store
    _situation: dict[str, str] = field(default_factory=dict)
    _recorded: _Recorded | None = None

    @classmethod
    def of(
        cls, model: Callable[..., Any], request: Request, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> ModelInQuestion | None:
        """A model, where what is compiled of it could be kept; ``None`` where it could not."""
        is_call = isinstance(args, tuple | list) and isinstance(kwargs, Mapping | None)
        if not request.cache or request.verify is True or not is_call:
            return None
        try:
            options = request.on(tensors_of(model, args, kwargs))
            is_plain = options.target.kinds == ("cpu",) and options.partition != BUDGET and options.tuning is None
            if not is_plain or options.collectives is not None or options.verify not in (FIRST, False):
                return None
            question = cls(model, request, options, tuple(args), dict(kwargs or {}), Store())
            question._situation = read_situation(model, question._named_tensors(), options)
        except Doubt as doubt:
            _LOG.info("not looked for in the cache: %s", doubt)
            return None
        return question

    def find(self) -> tuple[KeptModel, bytes] | None:
        """Record the model; returns what is kept of it, and its code."""
        self._recorded = self._record()
        if self._recorded is None:
            return None
        data = self.store.get(self._place(self._recorded))
        if data is None:
            _LOG.debug("nothing is kept at %s", self._place(self._recorded))
            return None
        try:
            kept = KeptModel.read(data)
        except (pickle.UnpicklingError, AttributeError, ImportError, EOFError, TypeError, ValueError) as error:
            _LOG.warning("what is kept of the model cannot be read: %s", error)
            return None
        is_checked = self.options.verify is False or all(
            self.store.get_by_key(key) == RIGHT for key in kept.checks.values()
        )
        code = self.find_code(kept.code)
        has_same_kernels = kept.kernels == describe_kernels(kept.ops)
        if code is None or not is_checked or not has_same_kernels:
            _LOG.debug(
                "not opened: code %s, checked %s, same kernels %s", code is not None, is_checked, has_same_kernels
            )
            return None
        return (kept, code) if self._does_the_same_again() else None

    def _does_the_same_again(self) -> bool:
        """Whether the model does the same at its next run, where what it writes to may make that another."""
        if self._recorded is None or not self._recorded.flat.may_write:
            return self._recorded is not None
        again = self._record()
        return again is not None and again.digest == self._recorded.digest

    def find_code(self, key: str) -> bytes | None:
        """The machine code that is kept under a key."""
        data = self.store.get_by_key(key)
        return None if data is None else code_of(data)

    def keep(self, kept: KeptModel, python: PythonValues) -> None:
        """Keep what was compiled of the model, unless it does what no record shows. ``python`` are the values that its
        trace went by. What was traced is not what was recorded where the model does something else at each run: it
        must have done the same before, then, and now."""
        before = self._recorded
        if before is None or not before.python.are_those_of(python):
            _LOG.debug("not kept: it went by others when it was traced: %s", self.python.find_other(python))
            return
        now = self._record()
        if now is not None and now.does_same_as(before):
            self.store.put(self._place(before), kept.dump())
            _LOG.debug("kept at %s", self._place(before))
        else:
            _LOG.debug("not kept: it goes by others now: %s", now and before.python.find_other(now.python))

    @property
    def python(self) -> PythonValues:
        """The Python values that the model went by."""
        return PythonValues() if self._recorded is None else self._recorded.python

    def open(
        self, kept: KeptModel, code: bytes, compile_anew: Callable[[Sequence[Any], Mapping[str, Any]], CompiledBackward]
    ) -> CompiledBackward:
        """Loads what is kept, with its code, to be called; ``compile_anew`` compiles the model as if nothing were
        known."""
        if self._recorded is None or self._recorded.flat.out_spec is None:
            raise AssertionError("a model is known by its record")
        flat = self._recorded.flat
        start = time.perf_counter()
        program = Program.load(code, driver=self.options.uri, needs_device=self.options.needs_device)
        times = IslandTimes([island.open() for island in kept.islands])
        calls = StepCalls(program, kept.functions, kept.plans, kept.stages, times)
        run = rebind(kept.binding, calls.call_of(FORWARD), calls.call_of(BACKWARD), program.torch_device, flat.name)
        signature = kept.manifest.signature
        report = {**kept.manifest.report, "cached": True, "compile_seconds": {"load": time.perf_counter() - start}}
        manifest: Manifest = replace(kept.manifest, report=report)
        convention = CallingConvention(
            signature, in_spec=flat.in_spec, out_spec=flat.out_spec, device=program.torch_device
        )
        modules = () if flat.model is None else flat.model.modules()
        modes = [(module, module.training) for module in modules]
        anew = _Anew(compile_anew, *_without_contents(self.args, self.kwargs), self.python, modes)
        for note in kept.notes:
            warn_user(note, UserWarning)
        return CompiledBackward(
            Parts(
                call=under_hooks(filling_repeated(run, signature.mutated), None),
                convention=convention,
                state=ModelState([e.name for e in convention.state], flat.model, signature.training),
                program=program,
                portable=anew.portable,
                manifest=manifest,
                ir=anew.mlir,
                bisect=anew.bisect,
                times=times,
                variants=[],
                verification=Unchecked("not verified: not wanted") if not kept.checks else KnownChecks([*kept.checks]),
                cut={name: Half(kept.functions[name], plan, kept.stages) for name, plan in kept.plans.items()},
            )
        )

    def _named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        owner = getattr(self.model, "__self__", self.model)
        named: list[tuple[str, torch.Tensor]] = []
        if isinstance(owner, torch.nn.Module):
            named += [*owner.named_parameters(remove_duplicate=False), *owner.named_buffers(remove_duplicate=False)]
        leaves, _ = pytree.tree_flatten((self.args, self.kwargs))
        return named + [(f"argument {i}", leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def _place(self, recorded: _Recorded) -> dict[str, str]:
        return {"entry": "a model", **self._situation, "does": recorded.digest}

    def _record(self) -> _Recorded | None:
        """Records what the model does; ``None`` where no record shows it."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        flat = FlatModule(self.model, spec, leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        constants = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        try:
            with recurrent_loops(self.options.loops), library_ops(self.options.libraries):
                return _Recorded(record_model(flat, tensors, constants), flat)
        except Doubt as doubt:
            _LOG.info("not looked for in the cache: %s", doubt)
            return None


@dataclass
class _Anew:
    """The model compiled as if nothing were known, for what is not kept: with arguments like those that it was known
    by, in the modes that it was in then, and as long as the Python values that it reads are those."""

    compile: Callable[[Sequence[Any], Mapping[str, Any]], CompiledBackward]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    python: PythonValues
    modes: Sequence[tuple[torch.nn.Module, bool]]
    _compiled: CompiledBackward | None = None

    def portable(self) -> Portable:
        """The contents of a file."""
        return self._open().portable()

    def mlir(self, stage: str) -> str:
        """The IR at a stage."""
        return self._open().ir(stage)

    def bisect(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The first op at fault."""
        found = self._open().bisect
        if found is None:
            raise AssertionError("what was compiled knows its model")
        return found(args, kwargs)

    def _open(self) -> Parts:
        if self._compiled is None:
            if not self.python.are_as_before():
                changed = "; ".join(self.python.find_changed())
                raise ArtifactError(f"the model is another one than was compiled, compile it again: {changed}")
            given = pytree.tree_map(lambda v: v.make() if isinstance(v, _Like) else v, (self.args, self.kwargs))
            now = [(module, module.training) for module, _ in self.modes]
            try:
                _set_modes(self.modes)
                with torch.enable_grad():
                    self._compiled = self.compile(*given)
            finally:
                _set_modes(now)
        return self._compiled._parts


def _set_modes(modes: Sequence[tuple[torch.nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


def _without_contents(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Arguments like these, in which tensors are descriptions."""

    def like(value: Any) -> Any:
        return _Like.of(value) if isinstance(value, torch.Tensor) else value

    given: tuple[Sequence[Any], Mapping[str, Any]] = pytree.tree_map(like, (tuple(args), dict(kwargs)))
    return given


@dataclass(frozen=True)
class _Like:
    """A tensor but for its contents."""

    extent: tuple[int, ...]
    steps: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_differentiated: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Like:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def make(self) -> torch.Tensor:
        made = torch.empty_strided(self.extent, self.steps, dtype=self.dtype, device=self.device)
        return made.requires_grad_(self.is_differentiated)
