# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Loads what was saved, with nothing imported that compiles: a process that only runs a file starts in a fraction of
the time."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from retrograd.runtime.arguments.calling import CallingConvention
from retrograd.runtime.arguments.state import ModelState
from retrograd.runtime.artifact import read_artifact
from retrograd.runtime.programs.executor import Program
from retrograd.runtime.programs.placement import choose_device, choose_uri
from retrograd.runtime.steps.bridge import Bridge
from retrograd.runtime.steps.compiled import CompiledBackward, Parts, Portable, Unchecked


def load(
    path: str | os.PathLike[str],
    model: torch.nn.Module | Mapping[str, torch.Tensor] | None = None,
    *,
    device: str | torch.device | None = None,
) -> CompiledBackward:
    """Load what ``CompiledBackward.save`` wrote.

    Args:
        path: the file. Its hash and versions are checked before anything of it runs.
        model: whose parameters and buffers to run on: a module like the one compiled, or tensors by qualified name.
            Needed to call the result if the model has any; ``bind(model)`` gives it later.
        device: where to run: ``cpu``, ``cuda``, ``cuda:1``, ``vulkan``. Without it, where ``model`` is, or else the
            first that the file has code for.

    Raises:
        PlacementError: the file has no code for ``device``; says which it has.
        DeviceError: there is no such device here, or no driver for it.
        ArtifactError: no artifact, truncated, altered, or of another version; says which.
        ArgumentError: ``model`` lacks a parameter or buffer, or has one of another shape or dtype.
    """
    artifact = read_artifact(path)
    manifest = artifact.manifest
    place = device or choose_device(manifest.targets, [t.device for t in find_state(model)])
    program = Program.load(artifact.vmfb, driver=choose_uri(manifest.targets, place))
    convention = CallingConvention(manifest.signature, device=program.torch_device)
    signature = manifest.signature
    state = ModelState([e.name for e in convention.state], model, signature.training, kept=signature.kept)
    if model is not None:
        convention.check_state(state.tensors())
    bridge = Bridge(program, manifest)
    parts = Parts(
        call=bridge,
        convention=convention,
        state=state,
        program=program,
        portable=lambda: Portable(artifact.vmfb),
        manifest=manifest,
        ir=_no_ir,
        verification=Unchecked("not verified: a file has nothing to compare with"),
    )
    return CompiledBackward(parts, modes=())


def find_state(model: torch.nn.Module | Mapping[str, torch.Tensor] | None) -> list[torch.Tensor]:
    """Parameters and buffers of a module, or the tensors given by name."""
    if isinstance(model, torch.nn.Module):
        return [*model.parameters(), *model.buffers()]
    return [*(model or {}).values()]


def _no_ir(stage: str) -> str:
    raise ValueError(f"a loaded artifact holds no IR, so no stage '{stage}': compile the model to see it")
