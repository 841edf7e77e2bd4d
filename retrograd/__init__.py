# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A compiler for PyTorch backward passes. The names below are loaded on first use: `retrograd-opt` works on MLIR text
alone and must not pay for `import torch`."""

import gc
import random
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrograd.api import bisect, compile_backward
    from retrograd.bisection import Bisection
    from retrograd.contract.collectives import Collectives
    from retrograd.contract.errors import RetrogradError
    from retrograd.fallback import EagerIslandWarning
    from retrograd.first_calls import MiscompiledWarning
    from retrograd.frontend.doors.checkpoints import save
    from retrograd.frontend.hooks.hook_marks import communication, inlineable
    from retrograd.frontend.python.source_locations import CaptureError
    from retrograd.frontend.verification.errors import VerificationError
    from retrograd.loading import load
    from retrograd.pipelines.analysis.partition.pareto import InfeasibleBudget
    from retrograd.pipelines.devices.device_targets import UnknownTarget
    from retrograd.pipelines.infra.diagnostics import PipelineError
    from retrograd.pipelines.infra.errors import CompileError
    from retrograd.pipelines.stages.save_policy import (
        SavePolicy,
        must_recompute,
        must_save,
        offload,
        prefer_recompute,
        prefer_save,
        saved_dtype,
    )
    from retrograd.runtime.arguments.calling import ArgumentError
    from retrograd.runtime.artifact import ArtifactError
    from retrograd.runtime.programs.devices import DeviceError
    from retrograd.runtime.programs.errors import ExecutionError
    from retrograd.runtime.programs.loaded import OutOfDeviceMemory
    from retrograd.runtime.programs.placement import PlacementError
    from retrograd.runtime.reports.report import Report
    from retrograd.runtime.steps.compiled import CompiledBackward
    from retrograd.scope import enable, explain_recompiles
    from retrograd.specializations import SpecializationWarning
    from retrograd.variants import ZeroTangentWarning

    __version__: str

# Public name -> the module that defines it. The imports above say the same to type checkers.
_EXPORTS = {
    "ArgumentError": "retrograd.runtime.arguments.calling",
    "ArtifactError": "retrograd.runtime.artifact",
    "Bisection": "retrograd.bisection",
    "CaptureError": "retrograd.frontend.python.source_locations",
    "Collectives": "retrograd.contract.collectives",
    "CompileError": "retrograd.pipelines.infra.errors",
    "EagerIslandWarning": "retrograd.fallback",
    "CompiledBackward": "retrograd.runtime.steps.compiled",
    "DeviceError": "retrograd.runtime.programs.devices",
    "ExecutionError": "retrograd.runtime.programs.errors",
    "InfeasibleBudget": "retrograd.pipelines.analysis.partition.pareto",
    "MiscompiledWarning": "retrograd.first_calls",
    "OutOfDeviceMemory": "retrograd.runtime.programs.loaded",
    "PipelineError": "retrograd.pipelines.infra.diagnostics",
    "PlacementError": "retrograd.runtime.programs.placement",
    "Report": "retrograd.runtime.reports.report",
    "RetrogradError": "retrograd.contract.errors",
    "SavePolicy": "retrograd.pipelines.stages.save_policy",
    "SpecializationWarning": "retrograd.specializations",
    "UnknownTarget": "retrograd.pipelines.devices.device_targets",
    "VerificationError": "retrograd.frontend.verification.errors",
    "ZeroTangentWarning": "retrograd.variants",
    "bisect": "retrograd.api",
    "communication": "retrograd.frontend.hooks.hook_marks",
    "compile_backward": "retrograd.api",
    "enable": "retrograd.scope",
    "explain_recompiles": "retrograd.scope",
    "inlineable": "retrograd.frontend.hooks.hook_marks",
    "load": "retrograd.loading",
    "must_recompute": "retrograd.pipelines.stages.save_policy",
    "must_save": "retrograd.pipelines.stages.save_policy",
    "offload": "retrograd.pipelines.stages.save_policy",
    "prefer_recompute": "retrograd.pipelines.stages.save_policy",
    "prefer_save": "retrograd.pipelines.stages.save_policy",
    "save": "retrograd.frontend.doors.checkpoints",
    "saved_dtype": "retrograd.pipelines.stages.save_policy",
}

__all__ = [
    "ArgumentError",
    "ArtifactError",
    "Bisection",
    "CaptureError",
    "Collectives",
    "CompileError",
    "CompiledBackward",
    "DeviceError",
    "EagerIslandWarning",
    "ExecutionError",
    "InfeasibleBudget",
    "MiscompiledWarning",
    "OutOfDeviceMemory",
    "PipelineError",
    "PlacementError",
    "Report",
    "RetrogradError",
    "SavePolicy",
    "SpecializationWarning",
    "UnknownTarget",
    "VerificationError",
    "ZeroTangentWarning",
    "__version__",
    "bisect",
    "communication",
    "compile_backward",
    "enable",
    "explain_recompiles",
    "inlineable",
    "load",
    "must_recompute",
    "must_save",
    "offload",
    "prefer_recompute",
    "prefer_save",
    "save",
    "saved_dtype",
]


def __getattr__(name: str) -> Any:
    """Load a public name on its first use (PEP 562).

    Raises:
        AttributeError: retrograd has no public name `name`.
    """
    value: Any
    if name == "__version__":
        value = import_module("importlib.metadata").version("retrograd")
    elif name in _EXPORTS:
        value = getattr(_import(_EXPORTS[name]), name)
    else:
        raise AttributeError(f"module 'retrograd' has no attribute {name!r}")
    globals()[name] = value
    return value


def _import(module: str) -> ModuleType:
    # rich draws a number when it is imported: the user's own sequence goes on as if it had not.
    drawn = random.getstate()
    # What modules define stays. To look for garbage among it took a sixth of the time of importing it.
    collects = gc.isenabled()
    gc.disable()
    try:
        return import_module(module)
    finally:
        if collects:
            gc.enable()
        random.setstate(drawn)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
