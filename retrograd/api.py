# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The public functions: where frontend, pipelines and runtime meet."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from retrograd.bisection import Bisection, find_fault, saved_executable
from retrograd.build import build, build_functions, tell_notes
from retrograd.built import Build
from retrograd.contract.roles import BACKWARD, FORWARD
from retrograd.description import describe
from retrograd.frontend.autograd.engine.family_lock import make_lock
from retrograd.frontend.doors.capture import CapturedGraph, capture_joint, find_constants
from retrograd.frontend.doors.dynamo import MODES, compile_with_dynamo
from retrograd.frontend.doors.function_changes import CAN_CHANGE
from retrograd.frontend.hooks.pack_hooks import find_open_pair, under_hooks
from retrograd.frontend.islands.eager_values import find_primals, record_values
from retrograd.frontend.islands.island_choice import draws_numbers
from retrograd.frontend.layers.random_ops import find_seed
from retrograd.frontend.layers.recurrent import recurrent_loops
from retrograd.frontend.layers.recurrent_frames import takes_recurrent_layers
from retrograd.frontend.libraries.ops import NO_LIBRARIES, library_ops
from retrograd.frontend.preparation.fx_partition import bind, bind_traced
from retrograd.frontend.python.python_places import PythonValues
from retrograd.frontend.python.source_locations import CaptureError
from retrograd.frontend.sizes.size_one import admit_ones
from retrograd.frontend.verification.first_comparison import verified
from retrograd.options import Request, check_choice, check_flag, tensors_of
from retrograd.pipelines.devices.targets import Target
from retrograd.pipelines.infra.errors import CompileError
from retrograd.pipelines.stages.save_policy import SavePolicy
from retrograd.pipelines.stages.staged import (
    STAGE_NAMES,
    Progress,
    StagedModule,
)
from retrograd.runtime.calling import CallingConvention
from retrograd.runtime.compiled import CompiledBackward, Parts, Unchecked
from retrograd.runtime.executor import Program
from retrograd.runtime.repeated_memory import filling_repeated
from retrograd.runtime.state import ModelState
from retrograd.specializations import Specializations, asking
from retrograd.stagers import AheadOfTime, Work
from retrograd.variants import variants_of

# PyTorch's tracer keeps its state in globals: two threads that trace at once break it for the whole process.
COMPILING = make_lock()


def compile_backward(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: str | Sequence[str] | None = None,
    partition: Literal["default", "min-cut", "budget"] = "min-cut",
    memory_budget: int | float | str | None = None,
    save_policy: SavePolicy | None = None,
    dynamic_shapes: Any = None,
    verify: Literal["first"] | bool = "first",
    fallback: Literal["island", "error"] = "island",
    kernels: str | Sequence[str] = "auto",
    free_early: bool | Literal["auto"] = "auto",
    cuda_graphs: bool = False,
    cache: bool = True,
    portable: bool = False,
    progress: Callable[[str], None] | None = None,
) -> CompiledBackward:
    """Compile the forward and backward of ``model`` for arguments like these.

    Args:
        model: an ``nn.Module``, a bound method of one, or a function of tensors. Its mode (train or eval) is compiled
            in. Where a number, text or other Python value that it reads from its attributes, its configuration,
            globals or the environment is another one at a call, it is compiled once more, as it is where a tensor
            requires grad that did not.
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
            type, such as ``retrograd.must_save(op="mm") | retrograd.saved_dtype("bf16")``. Other values that are saved
            are packed by the ``saved_tensors_hooks`` that are open, if both of them are ``retrograd.inlineable``.
        dynamic_shapes: which sizes of the arguments differ from call to call, as for ``torch.export.export``: by the
            name or place of the argument, by axis, ``Dim("batch", min=1, max=64)``, ``Dim.DYNAMIC`` or ``Dim.AUTO``.
            One program serves them all, 1 included; each call is checked against their bounds, against other sizes of
            the same name, and against what the model was found to take for granted.
        verify: ``first``, the first call of each half of a step is compared with the captured graph in torch, on
            copies of its arguments; where it is wrong by more than rounding explains, the graph takes its place, which
            a warning tells, until other code has been found that is right. What passed is remembered in the cache.
            ``True``: the whole first step is compared with the model in eager, on copies, and a difference raises
            :class:`VerificationError`. ``False``: nothing is compared.
        fallback: what becomes of ops that cannot be compiled: ``island``, they run in torch between compiled functions,
            which a warning and ``explain()`` tell; or ``error``, they are refused, as they always are for HIP, whose
            code runs nowhere here. A memory budget counts what islands give, and not what torch takes while it runs
            them.
        kernels: for CUDA, what kernels of retrograd's own compute in place of code that IREE generates: ``auto``, all
            that there is one for, if Triton is installed; ``off``, nothing; or names of families of them,
            ``["products"]``. ``library`` among them are convolutions and attention as PyTorch's own libraries compute
            them, in steps between compiled code; ``auto`` has it on CUDA from some size on, unless there is a budget,
            and never on a CPU. A saved file has these compiled. ``explain()`` says which op took which.
        cuda_graphs: on CUDA, capture forward and backward after some calls, and replay each by one call of the host,
            for models that keep the host busier than the device. The memory that a half works in stays taken. What
            cannot be captured (ops that run in torch and are no library's, open sizes) runs as without, and
            ``explain()`` says why. Under ``torch.compile``, ``mode="reduce-overhead"`` is the same.
        free_early: cut forward and backward into stages where that lowers the peak of live bytes: residuals are freed
            after the stage that needs them last, and a gradient has no memory before its own. ``auto`` does where that
            saves 32 MiB of a step; ``True`` where it saves one, which costs small models time. A program to be saved, a
            memory budget's, and one for Vulkan has functions in one piece.
        cache: keep the executable on disk and take it from there the next time.
        portable: compile at once what ``save`` writes, whose functions others than retrograd call too; otherwise
            ``save`` compiles that, so that who saves nothing waits for less.
        progress: called with the name of each phase as it begins.

    Returns:
        A callable in place of the model, whose outputs backpropagate through compiled code.

    Raises:
        CaptureError: the model cannot be captured; names the line.
        PipelineError, CompileError: it cannot be compiled, and ``fallback`` does not help; names the op, its source
        line and a command that replays the failure.
        UnknownTarget: no such target.
        InfeasibleBudget: no plan stays within ``memory_budget``; says the least number of bytes that one does.
        ValueError: no such partition or fallback, or a memory budget that is unreadable, not above zero, or of no use;
        or kernels are asked for by name that there are none of here.
        TypeError: ``cache`` or ``portable`` is neither True nor False, ``verify`` is neither these nor ``first``, or
            ``kernels`` is neither text nor several texts.
    """
    check_flag("portable", portable)
    if isinstance(model, CompiledBackward):
        raise CaptureError("the model is what compile_backward has made", "give the model that it was made from")
    if portable and free_early is True:
        raise ValueError("a portable program has functions in one piece: leave out free_early, or portable and save()")
    limits = (target, partition, cache, memory_budget, save_policy, fallback, kernels)
    request = Request(*limits, verify, free_early, cuda_graphs)
    options = request.on(tensors_of(model, args, kwargs))
    if verify is True:
        # The whole step is compared.
        options = replace(options, verify=False)
    phases, hooks = Progress(progress), find_open_pair()
    with COMPILING, contextlib.ExitStack() as stack, recurrent_loops(options.loops):
        with phases.phase("capture"), library_ops(NO_LIBRARIES if portable else options.libraries):
            captured = capture_joint(stack, model, args, kwargs, dynamic_shapes)
            python = captured.module.python or PythonValues()
        # A PyTorch that cannot tell which tangents are absent calls the backward of all outputs, as does the comparison
        # of a whole step.
        for_loss = CAN_CHANGE and verify is not True
        built = build(captured.for_build(), options, phases, portable=portable, for_loss=for_loss)
        tell_notes(built)
        variants = variants_of(built)
        backward = built.function(BACKWARD) if variants is None else variants.all_outputs()
        call = filling_repeated(bind(captured, built.function(FORWARD), backward), captured.signature.mutated)
        if verify is True:
            drawn = find_seed(captured.graph_module.graph) is not None or draws_numbers(captured.graph_module)
            traced = bool(backward.narrowed) or drawn
            reference = bind_traced(model, args, kwargs, backward, dynamic_shapes) if traced else None
            # Slices for bisection are of fixed sizes.
            unlocated = backward.narrowed or captured.sizes.sizes
            locate = None if unlocated else partial(_locate, captured, built, options.target)
            call = verified(call, captured, reference, locate)
        call = asking(captured, under_hooks(call, hooks))
    if captured.sizes.sizes:
        # Outside of the trace, in which every tensor would be a fake one.
        with COMPILING, recurrent_loops(options.loops), phases.phase("check sizes of 1"):
            captured = admit_ones(captured, model, args, kwargs)
    manifest = describe(captured, built, _name_of(model))
    if asked := [*captured.module.checks, *captured.module.answers]:
        manifest.report["checks"] = list(dict.fromkeys(map(str, asked)))
    convention = _convention(captured, built.program)
    names, training = [e.name for e in convention.state], captured.signature.training
    constants, own_hooks = find_constants(captured.graph_module), captured.module.own_hooks
    state = ModelState(names, captured.module.model, training, constants, own_hooks.find)
    how = partial(bisect, target=target, partition=partition, memory_budget=memory_budget, save_policy=save_policy)
    again = partial(how, model, fallback=fallback)
    stages = _stage_reader(built.staged)
    texts = None if variants is None else variants.texts
    said = "by the first step, or that raises" if verify is True else "not verified: not wanted"
    parts = Parts(
        call=call,
        convention=convention,
        state=state,
        program=built.program,
        portable=built.compile_portable,
        manifest=manifest,
        ir=stages,
        bisect=again,
        times=built.times,
        variants=texts,
        verification=built.checks or Unchecked(said),
        cut=built.cut_halves(),
        captured=built.captured,
        answers=[str(answer) for answer in captured.module.answers],
    )
    compiled = CompiledBackward(parts)
    once_more = partial(
        compile_backward,
        model,
        target=target,
        partition=partition,
        memory_budget=memory_budget,
        save_policy=save_policy,
        dynamic_shapes=dynamic_shapes,
        verify=verify,
        fallback=fallback,
        kernels=kernels,
        free_early=free_early,
        cuda_graphs=cuda_graphs,
        cache=cache,
        progress=progress,
    )
    compiled.specializations = Specializations(model, python, once_more, hooks, fallback)
    return compiled


def bisect(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: str | Sequence[str] | None = None,
    partition: Literal["default", "min-cut", "budget"] = "min-cut",
    memory_budget: int | float | str | None = None,
    save_policy: SavePolicy | None = None,
    fallback: Literal["island", "error"] = "island",
    artifact: str | os.PathLike[str] | None = None,
) -> Bisection:
    """The first op of ``model(*args, **kwargs)`` or its backward whose compiled value parts from eager's, or that does
    not compile.

    Arguments are those of :func:`compile_backward`, and are run on. ``fallback="error"`` finds the first op that does
    not compile; otherwise such ops run in torch, as they do in what is compiled, and are no fault. ``artifact`` is a
    file that was saved from this model, whose code, in which nothing runs in torch, to test in place of newly compiled
    code; ``partition`` is then the one it was compiled with.

    Raises:
        CaptureError, PipelineError, UnknownTarget, ValueError: as for :func:`compile_backward`; also for values that
        are saved in narrower types, which are not eager's.
        ArtifactError: ``artifact`` cannot be read, or was compiled from another model.
    """
    tensors = tensors_of(model, args, kwargs)
    chosen = "error" if artifact is not None else fallback
    options = Request(target, partition, True, memory_budget, save_policy, chosen).on(tensors)
    with COMPILING, contextlib.ExitStack() as stack, recurrent_loops(options.loops):
        captured = capture_joint(stack, model, args, kwargs)
        graph, executable = captured.for_build(), None
        try:
            built = build(graph, options)
            staged, executable = built.staged, built.executable
        except CompileError:
            plain = replace(options, partition="min-cut" if partition == "budget" else partition)
            staged = AheadOfTime(Work(graph, plain, Progress(), None)).stage(())
    # After the trace is closed, in which every tensor would be a fake one.
    values = record_values(captured.graph_module, find_primals(captured, args, kwargs or {}))
    if artifact is not None:
        executable = saved_executable(artifact, staged)
    return find_fault(staged, options.target, values, executable)


def _locate(captured: CapturedGraph, built: Build, target: Target, primals: Sequence[torch.Tensor]) -> str:
    return str(find_fault(built.staged, target, record_values(captured.graph_module, primals), built.executable))


@takes_recurrent_layers
def dynamo_backend(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend of ``torch.compile(model, backend="retrograd")``; ``options`` are those of compile_backward, but for
    ``dynamic_shapes`` and ``progress``. By ``verify=True`` each compiled function whose first call is wrong raises
    :class:`VerificationError`.

    Raises:
        CaptureError: the graph has sizes that depend on data.
        PipelineError, CompileError, UnknownTarget, ValueError: as for :func:`compile_backward`.
    """
    check_choice("mode", mode or "default", MODES)
    graphs = {"cuda_graphs": True} if mode == "reduce-overhead" else {}
    chosen = Request.read({**graphs, **(options or {})}).on([t for t in example_inputs if isinstance(t, torch.Tensor)])
    with library_ops(chosen.libraries), recurrent_loops(chosen.loops):
        return compile_with_dynamo(graph_module, example_inputs, partial(build_functions, options=chosen))


def _convention(captured: CapturedGraph, program: Program) -> CallingConvention:
    module = captured.module
    return CallingConvention(
        captured.signature, in_spec=module.in_spec, out_spec=module.out_spec, device=program.torch_device
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
