# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The public functions: where frontend, pipelines and runtime meet."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch

from retrograd.bisection import Bisection, find_fault, saved_executable
from retrograd.frontend.autograd.trace import TracedBackward
from retrograd.frontend.capture import CapturedGraph, capture_joint, find_constants
from retrograd.frontend.dynamo import compile_with_dynamo
from retrograd.frontend.eager_values import find_primals, record_values
from retrograd.frontend.fx_partition import CompiledFunction, bind, bind_traced
from retrograd.frontend.importer import import_graph
from retrograd.frontend.random_ops import find_seed
from retrograd.frontend.signature import Signature
from retrograd.frontend.verification import verified
from retrograd.options import BackwardOptions, Options, tensors_of
from retrograd.pipelines.analysis.memory_size import parse_memory_size
from retrograd.pipelines.budgeted import BudgetBuilder, step_peak
from retrograd.pipelines.errors import CompileError
from retrograd.pipelines.executable import Executable
from retrograd.pipelines.interface import FunctionInterface
from retrograd.pipelines.save_policy import SavePolicy
from retrograd.pipelines.staged import (
    STAGE_NAMES,
    Progress,
    StagedModule,
    build_executable,
    mark_module,
    stage_backward,
    stage_module,
)
from retrograd.pipelines.targets import Target, find_target
from retrograd.pipelines.transforms.bwd_partition import JOINT, find_function
from retrograd.runtime.artifact import read_artifact
from retrograd.runtime.bridge import BACKWARD, FORWARD, INTO, Bridge, run_function
from retrograd.runtime.cache import Cache, cache_key
from retrograd.runtime.calling import CallingConvention
from retrograd.runtime.compiled import CompiledBackward
from retrograd.runtime.executor import Program
from retrograd.runtime.manifest import FORMAT_VERSION, FunctionSpec, Manifest, TensorSpec
from retrograd.runtime.placement import choose_device, choose_uri
from retrograd.runtime.stage_executor import StageExecutor
from retrograd.runtime.state import ModelState

# PyTorch's tracer keeps its state in globals: two threads that trace at once break it for the whole process.
COMPILING = threading.RLock()
PACKAGES = {
    "retrograd": "retrograd",
    "torch": "torch",
    "torch-mlir": "torch-mlir",
    "iree-compiler": "iree-base-compiler",
}


def compile_backward(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: str | Sequence[str] | None = None,
    partition: Literal["default", "min-cut", "budget"] = "min-cut",
    memory_budget: int | float | str | None = None,
    save_policy: SavePolicy | None = None,
    verify: bool = False,
    cache: bool = True,
    progress: Callable[[str], None] | None = None,
) -> CompiledBackward:
    """Compile the forward and backward of ``model`` for arguments like these.

    Args:
        model: an ``nn.Module``, a bound method of one, or a function of tensors. Its mode (train or eval) is compiled
            in, and so are the numbers, strings and other Python values that it reads from its attributes.
        args: example positional arguments: tensors, containers of tensors, constants. They are not changed, and nothing
            runs.
        kwargs: example keyword arguments.
        target: the device to compile for, or several for one file: ``cpu`` (this machine's), ``cpu:x86-64-v3``,
            ``cuda``, ``cuda:sm_90``, ``vulkan``, ``vulkan:rdna3``, ``hip:gfx942``. Without it, what ``args`` are on.
            Calls run on the one of them that ``args`` are on, else on the first.
        partition: what to save between forward and backward; ``default`` as eager does, ``min-cut`` the fewest bytes,
            ``budget`` what keeps the peak of live bytes within ``memory_budget`` with the least recomputation.
        memory_budget: for ``partition="budget"``: bytes (67108864, ``"64MiB"``), or a fraction (0.5) of the peak of
            ``partition="default"``. Counted are outputs, residuals, gradients and scratch memory of one step.
        save_policy: what must or should be saved or recomputed whatever the partition, and what is saved in a narrower
            type, such as ``retrograd.must_save(op="mm") | retrograd.saved_dtype("bf16")``.
        verify: compare every output and gradient of the first call with eager's, on copies.
        cache: keep the executable on disk and take it from there the next time.
        progress: called with the name of each phase as it begins.

    Returns:
        A callable in place of the model, whose outputs backpropagate through compiled code.

    Raises:
        CaptureError: the model cannot be captured; names the line.
        PipelineError, CompileError: it cannot be compiled; names the op, its source line and a command that replays the
        failure.
        UnknownTarget: no such target.
        InfeasibleBudget: no plan stays within ``memory_budget``; says the least number of bytes that one does.
        ValueError: no such partition, or a memory budget that is unreadable, not above zero, or of no use to it.
    """
    options = Options(target, partition, cache, memory_budget, save_policy).on(tensors_of(model, args, kwargs))
    phases = Progress(progress)
    with COMPILING, contextlib.ExitStack() as stack:
        with phases.phase("capture"):
            captured = capture_joint(stack, model, args, kwargs)
        with phases.phase("import"):
            module = import_graph(captured.graph_module, captured.signature)
        mark_module(module, options.policy)
        built = _build(module, options, phases)
        backward = built.function(BACKWARD)
        call = bind(captured, built.function(FORWARD), backward)
        if verify:
            traced = bool(backward.narrowed) or find_seed(captured.graph_module.graph) is not None
            reference = bind_traced(model, args, kwargs, backward) if traced else None
            locate = None if backward.narrowed else partial(_locate, captured, built, options.find_target())
            call = verified(call, captured, reference, locate)
    manifest = _manifest(captured, built, options, _name_of(model), phases)
    convention = _convention(captured.signature, manifest, built.program)
    names, training = [e.name for e in convention.state], captured.signature.training
    state = ModelState(names, captured.module.model, training, find_constants(captured.graph_module))
    how = partial(bisect, target=target, partition=partition, memory_budget=memory_budget, save_policy=save_policy)
    again = partial(how, model)
    stages = _stage_reader(built.staged)
    return CompiledBackward(call, convention, state, built.program, built.executable.vmfb, manifest, stages, again)


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
    place = device or choose_device(manifest.targets, [t.device for t in tensors_of(model, (), None)])
    program = Program.load(artifact.vmfb, driver=choose_uri(manifest.targets, place))
    convention = CallingConvention(manifest.signature, device=program.torch_device)
    state = ModelState([e.name for e in convention.state], model, manifest.signature.get("training", {}))
    if model is not None:
        convention.check_state(state.tensors())
    return CompiledBackward(Bridge(program, manifest), convention, state, program, artifact.vmfb, manifest, _no_ir)


def bisect(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: str | Sequence[str] | None = None,
    partition: Literal["default", "min-cut", "budget"] = "min-cut",
    memory_budget: int | float | str | None = None,
    save_policy: SavePolicy | None = None,
    artifact: str | os.PathLike[str] | None = None,
) -> Bisection:
    """The first op of ``model(*args, **kwargs)`` or its backward whose compiled value parts from eager's, or that does
    not compile.

    Arguments are those of :func:`compile_backward`, and are run on. ``artifact`` is a file that was saved from this
    model, whose code to test in place of newly compiled code; ``partition`` is then the one it was compiled with.

    Raises:
        CaptureError, PipelineError, UnknownTarget, ValueError: as for :func:`compile_backward`; also for values that
        are saved in narrower types, which are not eager's.
        ArtifactError: ``artifact`` cannot be read, or was compiled from another model.
    """
    options = Options(target, partition, True, memory_budget, save_policy).on(tensors_of(model, args, kwargs))
    with COMPILING, contextlib.ExitStack() as stack:
        captured = capture_joint(stack, model, args, kwargs)

        def imported() -> Any:
            module = import_graph(captured.graph_module, captured.signature)
            mark_module(module, options.policy)
            return module

        executable: Executable | None = None
        try:
            built = _build(imported(), options, Progress())
            staged, executable = built.staged, built.executable
        except CompileError:
            staged = stage_module(imported(), "min-cut" if partition == "budget" else partition, Progress())
    # After the trace is closed, in which every tensor would be a fake one.
    values = record_values(captured.graph_module, find_primals(captured, args, kwargs or {}))
    if artifact is not None:
        executable = saved_executable(artifact, staged)
    return find_fault(staged, options.find_target(), values, executable)


def _locate(captured: CapturedGraph, built: _Built, target: Target, primals: Sequence[torch.Tensor]) -> str:
    return str(find_fault(built.staged, target, record_values(captured.graph_module, primals), built.executable))


def dynamo_backend(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend of ``torch.compile(model, backend="retrograd")``; ``options`` are those of compile_backward.

    Raises:
        CaptureError: the graph has sizes that depend on data, or random ops that are not supported.
        PipelineError, CompileError, UnknownTarget, ValueError: as for :func:`compile_backward`.
    """
    chosen = Options(**(options or {})).on([t for t in example_inputs if isinstance(t, torch.Tensor)])

    def build(traced: torch.fx.GraphModule, function: str) -> Mapping[str, CompiledFunction]:
        module = import_graph(traced, function=function)
        # Of several graphs that a model breaks into, a rule may be about one.
        mark_module(module, chosen.policy, unmatched="ignore")
        built = _build(module, chosen, Progress())
        return {f.name: built.function(f.name) for f in built.staged.functions}

    return compile_with_dynamo(graph_module, example_inputs, build, mode)


# By options and the text of the module: a backward is captured anew for reasons that do not change its graph.
_EXECUTORS: WeakValueDictionary[tuple[BackwardOptions, str], StageExecutor] = WeakValueDictionary()


def compile_captured(traced: TracedBackward, options: BackwardOptions) -> tuple[StageExecutor, bool]:
    """Compile a backward that was captured as it ran; also says whether its graph was compiled before.

    Raises:
        CaptureError, PipelineError, CompileError: it cannot be compiled; names the op.
    """
    module = import_graph(traced.graph_module, function=BACKWARD)
    phases, target = Progress(), find_target(options.target)
    key = (options, str(module))
    if (known := _EXECUTORS.get(key)) is not None:
        return known, True
    staged = stage_backward(module, options.hook_schedule, phases, traced.communication)
    store = _Store() if options.cache else None
    executable, _ = build_executable(staged.module, target, _versions(), phases, store)
    program = Program.load(executable.vmfb, driver=target.driver)
    specs = [_function_spec(f, executable.transients.get(f.name + INTO, 0)) for f in staged.module.functions]
    executor = _EXECUTORS[key] = StageExecutor(staged.plan.to_dict(), program, specs)
    return executor, False


@dataclass(frozen=True)
class _Built:
    """A module that went all the way: its stages, executable and loaded program."""

    staged: StagedModule
    executable: Executable
    program: Program
    specs: dict[str, FunctionSpec]
    cached: bool

    def function(self, name: str) -> CompiledFunction:
        """One function of it, on the names that the frontend knows values by."""
        spec, interface = self.specs[name], self.staged.function(name)
        return CompiledFunction(
            arguments=tuple(a.value for a in interface.arguments),
            results=tuple(r.value for r in interface.results),
            copied=frozenset(r.value for r in interface.results if r.role == "saved"),
            call=partial(run_function, self.program, spec, same_step=name == BACKWARD),
            merged=self.staged.merged,
            narrowed=self.staged.narrowed,
        )


def _build(module: Any, options: Options, phases: Progress) -> _Built:
    target = options.find_target()
    store = _Store() if options.cache else None
    if options.partition == "budget" and find_function(module.operation, JOINT) is not None:
        source = module.operation.get_asm(enable_debug_info=True)
        builder = BudgetBuilder(source, module.context, target, _versions(), phases, store)
        staged, executable, cached = builder.build(parse_memory_size(options.memory_budget))
    else:
        # A forward alone has nothing to partition, whatever the policy.
        staged = stage_module(module, options.partition, phases)
        executable, cached = build_executable(staged, target, _versions(), phases, store)
    with phases.phase("load"):
        # Compiled for a device that is not here, it can be saved.
        program = Program.load(executable.vmfb, driver=options.uri(), needs_device=False)
    for note in executable.notes:
        warnings.warn(note, stacklevel=3)
    specs = {f.name: _function_spec(f, executable.transients.get(f.name + INTO, 0)) for f in staged.functions}
    return _Built(staged, executable, program, specs, cached)


def _manifest(captured: CapturedGraph, built: _Built, options: Options, name: str, phases: Progress) -> Manifest:
    forward, backward = built.specs[FORWARD], built.specs[BACKWARD]
    report = {
        "name": name,
        "target": options.find_target().name,
        "notes": list(built.executable.notes),
        "flags": list(built.executable.flags),
        "cached": built.cached,
        "stages": len(built.specs),
        "saved_values": sum(a.role == "saved" for a in backward.arguments),
        **built.staged.partition,
        "partition": options.partition,
        "forward_transient_bytes": forward.transient_bytes,
        "backward_transient_bytes": backward.transient_bytes,
        "peak_bytes_predicted": step_peak(built.staged, built.executable.transients),
        "peak_bytes_measured": None,
        "vmfb_bytes": len(built.executable.vmfb),
        "compile_seconds": {phase: round(seconds, 4) for phase, seconds in phases.seconds.items()},
    }
    signature = captured.signature.to_dict()
    functions = (forward, backward)
    return Manifest(
        FORMAT_VERSION, functions, options.find_target().names, options.partition, _versions(), signature, report
    )


def _convention(signature: Signature, manifest: Manifest, program: Program) -> CallingConvention:
    return CallingConvention(
        manifest.signature,
        in_spec=signature.in_spec,
        out_spec=signature.out_spec,
        constants=[i.constant for i in signature.inputs],
        out_constants=[o.constant for o in signature.outputs],
        device=program.torch_device,
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
