# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The public functions: where frontend, pipelines and runtime meet."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Literal

import torch

from retrograd.frontend.capture import CapturedGraph, capture_joint
from retrograd.frontend.fx_partition import CompiledFunction, bind
from retrograd.frontend.importer import import_graph
from retrograd.frontend.verification import verified
from retrograd.pipelines.executable import Executable
from retrograd.pipelines.interface import FunctionInterface
from retrograd.pipelines.staged import STAGE_NAMES, Progress, StagedModule, build_executable, stage_module
from retrograd.pipelines.targets import find_target
from retrograd.runtime.artifact import read_artifact
from retrograd.runtime.bridge import BACKWARD, FORWARD, Bridge, run_function
from retrograd.runtime.cache import Cache, cache_key
from retrograd.runtime.calling import CallingConvention
from retrograd.runtime.compiled import CompiledBackward
from retrograd.runtime.executor import Program
from retrograd.runtime.manifest import FORMAT_VERSION, FunctionSpec, Manifest, TensorSpec
from retrograd.runtime.peak import predict_peak
from retrograd.runtime.state import ModelState

PACKAGES = {"retrograd": "retrograd", "torch": "torch", "torch-mlir": "torch-mlir", "iree-compiler": "iree-base-compiler"}


def compile_backward(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: str = "cpu",
    partition: Literal["default", "min-cut"] = "min-cut",
    verify: bool = False,
    cache: bool = True,
    progress: Callable[[str], None] | None = None,
) -> CompiledBackward:
    """Compile the forward and backward of ``model`` for arguments like these.

    Args:
        model: an ``nn.Module``, a bound method of one, or a function of tensors. Its mode (train or eval) is compiled in.
        args: example positional arguments: tensors, containers of tensors, constants. They are not changed, and nothing runs.
        kwargs: example keyword arguments.
        target: the kind of device to compile for; ``cpu`` is this machine's.
        partition: what to save between forward and backward; ``default`` as eager does, ``min-cut`` the fewest bytes.
        verify: compare every output and gradient of the first call with eager's, on copies.
        cache: keep the executable on disk and take it from there the next time.
        progress: called with the name of each phase as it begins.

    Returns:
        A callable in place of the model, whose outputs backpropagate through compiled code.

    Raises:
        CaptureError: the model cannot be captured; names the line.
        PipelineError, CompileError: it cannot be compiled; names the op, its source line and a command that replays the failure.
        UnknownTarget: no such target.
    """
    device = find_target(target)
    if partition not in ("default", "min-cut"):
        raise ValueError(f"partition '{partition}' is not one of default, min-cut")
    phases = Progress(progress)
    with contextlib.ExitStack() as stack:
        with phases.phase("capture"):
            captured = capture_joint(stack, model, args, kwargs)
        with phases.phase("import"):
            module = import_graph(captured)
        staged = stage_module(module, partition, phases)
        executable, cached = build_executable(staged, device, _versions(), phases, _Store() if cache else None)
        manifest = _manifest(captured, staged, executable, name=_name_of(model), target=target, cached=cached)
        with phases.phase("load"):
            program = Program.load(executable.vmfb, driver=device.driver)
        call = bind(captured, _stage(program, manifest, staged, FORWARD), _stage(program, manifest, staged, BACKWARD))
    manifest.report["compile_seconds"] = {name: round(seconds, 4) for name, seconds in phases.seconds.items()}
    convention = CallingConvention(
        manifest.signature,
        in_spec=captured.signature.in_spec,
        out_spec=captured.signature.out_spec,
        constants=[i.constant for i in captured.signature.inputs],
        out_constants=[o.constant for o in captured.signature.outputs],
    )
    state = ModelState([s.name for s in (*captured.signature.params, *captured.signature.buffers)], captured.module.model)
    if verify:
        call = verified(call, captured)
    return CompiledBackward(call, convention, state, program, executable.vmfb, manifest, _stage_reader(staged))


def load(
    path: str | os.PathLike[str], model: torch.nn.Module | Mapping[str, torch.Tensor] | None = None
) -> CompiledBackward:
    """Load what ``CompiledBackward.save`` wrote.

    Args:
        path: the file. Its hash and versions are checked before anything of it runs.
        model: whose parameters and buffers to run on: a module like the one compiled, or tensors by qualified name. Needed to
            call the result if the model has any; ``bind(model)`` gives it later.

    Raises:
        ArtifactError: no artifact, truncated, altered, or of another version; says which.
        ArgumentError: ``model`` lacks a parameter or buffer, or has one of another shape or dtype.
    """
    artifact = read_artifact(path)
    manifest = artifact.manifest
    program = Program.load(artifact.vmfb, driver=find_target(manifest.targets[0]).driver)
    convention = CallingConvention(manifest.signature)
    state = ModelState([e.name for e in convention.state], model)
    if model is not None:
        convention.check_state(state.tensors())
    return CompiledBackward(Bridge(program, manifest), convention, state, program, artifact.vmfb, manifest, _no_ir)


def _stage(program: Program, manifest: Manifest, staged: StagedModule, name: str) -> CompiledFunction:
    spec, interface = manifest.function(name), staged.function(name)
    return CompiledFunction(
        arguments=tuple(a.value for a in interface.arguments),
        results=tuple(r.value for r in interface.results),
        copied=frozenset(r.value for r in interface.results if r.role == "saved"),
        call=lambda tensors: run_function(program, spec, tensors),
    )


def _manifest(
    captured: CapturedGraph, staged: StagedModule, executable: Executable, *, name: str, target: str, cached: bool
) -> Manifest:
    specs = {
        n: _function_spec(staged.function(n), executable.transients.get(f"{n}_into", 0)) for n in (FORWARD, BACKWARD)
    }
    report = {
        "name": name,
        "target": target,
        "partition": staged.partition["policy"],
        "flags": list(executable.flags),
        "cached": cached,
        "stages": len(specs),
        "saved_values": sum(r.role == "saved" for r in specs[FORWARD].results),
        **{key: value for key, value in staged.partition.items() if key != "policy"},
        "forward_transient_bytes": specs[FORWARD].transient_bytes,
        "backward_transient_bytes": specs[BACKWARD].transient_bytes,
        "peak_bytes_predicted": predict_peak(specs[FORWARD], specs[BACKWARD]),
        "peak_bytes_measured": None,
        "vmfb_bytes": len(executable.vmfb),
        "compile_seconds": {},
    }
    signature = captured.signature.to_dict()
    return Manifest(
        FORMAT_VERSION, tuple(specs.values()), (target,), staged.partition["policy"], _versions(), signature, report
    )


def _function_spec(interface: FunctionInterface, transient_bytes: int) -> FunctionSpec:
    arguments, results = (
        tuple(TensorSpec(p.name, p.role, p.shape, p.dtype) for p in ports)
        for ports in (interface.arguments, interface.results)
    )
    return FunctionSpec(interface.name, arguments, results, transient_bytes)


def _stage_reader(staged: StagedModule) -> Callable[[str], str]:
    def read(stage: str) -> str:
        if stage == "linalg":
            return staged.linalg()
        if stage not in staged.texts:
            raise ValueError(f"no stage '{stage}'; there are {', '.join(STAGE_NAMES)}")
        return staged.texts[stage]

    return read


def _no_ir(stage: str) -> str:
    raise ValueError(f"a loaded artifact holds no IR, so no stage '{stage}': compile the model to see it")


class _Store:
    """The on-disk cache as the pipelines see it."""

    def __init__(self) -> None:
        self._cache = Cache()

    def get(self, parts: dict[str, str]) -> bytes | None:
        return self._cache.get(cache_key(parts))

    def put(self, parts: dict[str, str], data: bytes) -> None:
        self._cache.put(cache_key(parts), data)


def _versions() -> dict[str, str]:
    return {key: version(package) for key, package in PACKAGES.items()}


def _name_of(model: Callable[..., Any]) -> str:
    return type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__qualname__", repr(model))
