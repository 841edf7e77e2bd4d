# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Keeps what was compiled of a model for other processes, where all of it is data."""

from __future__ import annotations

from retrograd.built import Build
from retrograd.contract.manifest import Manifest
from retrograd.contract.roles import BACKWARD, TANGENT
from retrograd.contract.signature import CONSTANT
from retrograd.first_calls import Keeper
from retrograd.frontend.doors.capture import CapturedGraph, find_constants
from retrograd.frontend.doors.kept_binding import BindingRecord
from retrograd.frontend.python.python_places import PythonValues
from retrograd.frontend.verification.registered_kernels import find_ops
from retrograd.kept_model import KeptModel, keep_islands
from retrograd.known_models import ModelInQuestion


def keep_model(
    question: ModelInQuestion, captured: CapturedGraph, built: Build, record: BindingRecord, manifest: Manifest
) -> None:
    """Keep it, unless it has what a record of the model does not show, or what no data says."""
    kept = _describe(question, captured, built, record, manifest) if _is_plain(captured, built) else None
    if kept is not None:
        question.keep(kept, captured.module.python or PythonValues())


def _is_plain(captured: CapturedGraph, built: Build) -> bool:
    """Whether nothing has to be asked at a call, compiled later or packed."""
    module, staged = captured.module, built.staged
    # Of several outputs a loss may leave out some: the backward of that, or of all, is compiled when it is needed.
    tangents = [a for a in (staged.whole or staged).function(BACKWARD).arguments if a.role == TANGENT]
    is_whole = len(tangents) == 1 and not built.program.is_staged and not built.captured
    asks = module.checks or module.answers or module.asks_compiling or module.own_hooks.has_noted
    is_open = captured.sizes.sizes or captured.signature.conditions
    outputs_are_tensors = all(output.kind != CONSTANT for output in captured.signature.outputs)
    packs = staged.narrowed or staged.notes or find_constants(captured.graph_module)
    sets = captured.signature.kept or captured.signature.requiring
    return is_whole and outputs_are_tensors and not (asks or is_open or packs or sets)


def _describe(
    question: ModelInQuestion, captured: CapturedGraph, built: Build, record: BindingRecord, manifest: Manifest
) -> KeptModel | None:
    islands, binding = keep_islands(built.times.islands), record.read()
    staged, checks, kernels = built.staged, {}, captured.as_traced.kernels
    code = question.store.key_of(built.work.place_of_code(staged))
    if islands is None or binding is None or kernels is None or question.find_code(code) != built.executable.vmfb:
        return None
    if built.checks is not None:
        cared = [call.care for call in built.checks.calls]
        checks = {care.name: question.store.key_of(care.parts()) for care in cared if isinstance(care, Keeper)}
        if len(checks) != 2:
            return None
    return KeptModel(
        code=code,
        functions={f.name: f for f in staged.functions} | built.specs,
        plans=staged.plans,
        stages=staged.stages,
        islands=islands,
        binding=binding,
        manifest=manifest,
        notes=built.executable.notes,
        checks=checks,
        ops=find_ops(captured.as_traced.module.graph),
        kernels=kernels,
    )
