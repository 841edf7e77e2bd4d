# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The public functions: where frontend, pipelines and runtime meet."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from retrograd.contract.collectives import Collectives
from retrograd.contract.partitions import BUDGET, MIN_CUT, Partition
from retrograd.frontend.autograd.engine.family_lock import COMPILING
from retrograd.frontend.doors.frame_settings import captured_with
from retrograd.frontend.layers.recurrent import recurrent_loops
from retrograd.frontend.libraries.ops import library_ops
from retrograd.frontend.python.source_locations import CaptureError
from retrograd.known_models import ModelInQuestion
from retrograd.options import Request, check_choice, check_flag, target_on
from retrograd.pipelines.kernels.choice import AUTO, OFF, find_obstacle
from retrograd.pipelines.stages.save_policy import SavePolicy
from retrograd.runtime.steps.compiled import CompiledBackward
from retrograd.specializations import Specializations
from retrograd.tuning import MEASURE

if TYPE_CHECKING:
    from retrograd.bisection import Bisection

# The modes of ``torch.compile``. Inductor's trade compile time for speed. Here the fastest code is tried first in any
# case; CUDA graphs, which keep memory, are those of "reduce-overhead" alone, and "max-autotune" measures the tiles of
# kernels on the device.
MEASURING = ("max-autotune", "max-autotune-no-cudagraphs")
MODES = ("default", "reduce-overhead", *MEASURING)


def compile_backward(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: str | Sequence[str] | None = None,
    partition: Partition = MIN_CUT,
    memory_budget: int | float | str | None = None,
    save_policy: SavePolicy | None = None,
    dynamic_shapes: Any = None,
    verify: Literal["first"] | bool = "first",
    fallback: Literal["island", "error"] = "island",
    kernels: str | Sequence[str] = "auto",
    tiles: str | os.PathLike[str] = "auto",
    free_early: bool | Literal["auto"] = "auto",
    cuda_graphs: bool | str = False,
    collectives: Collectives | None = None,
    cache: bool = True,
    portable: bool = False,
    progress: Callable[[str], None] | None = None,
) -> CompiledBackward:
    """Compile the forward and backward of ``model`` for arguments like these.

    Args:
        model: an ``nn.Module``, a bound method of one, or a function of tensors. Where its mode (train or eval), or a
            number, text or other Python value that it reads from its attributes, its configuration, globals or the
            environment, is another one at a call, it is compiled once more, as it is where a tensor requires grad that
            did not.
        args: example positional arguments: tensors, containers of tensors, constants. They are not changed, and nothing
            runs.
        kwargs: example keyword arguments.
        target: the device to compile for, or several for one file: ``cpu`` (this machine's), ``cpu:x86-64-v3``,
            ``cuda``, ``cuda:sm_90``, ``vulkan``, ``vulkan:rdna3``, ``hip:gfx942``. Without it, what ``args`` are on.
            Calls run on the one of them that ``args`` are on, else on the first.
        partition: what to save between forward and backward; ``default`` as eager does, ``min-cut`` the fewest bytes,
            ``budget`` what keeps the peak of live bytes within ``memory_budget`` with the least recomputation.
        memory_budget: for ``partition="budget"``: bytes (67108864, ``"64MiB"``), or a fraction (0.5) of the peak that
            a step has in eager, or ``"free"``, what is free on the device when it is compiled. Counted are outputs,
            residuals, gradients and scratch memory of one step.
        save_policy: what must or should be saved or recomputed whatever the partition, and what is saved in a narrower
            type, such as ``retrograd.must_save(op="mm") | retrograd.saved_dtype("bf16")``, or, on CUDA, kept on the
            host until the backward (``retrograd.offload()``). Other values that are saved are packed by the
            ``saved_tensors_hooks`` that are open, if both of them are ``retrograd.inlineable``.
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
            ``["products"]``. ``library`` among them are convolutions and attention, and products on a CPU, as PyTorch's
            own libraries compute them, in steps between compiled code; ``auto`` has it from some size on, unless there
            is a budget; products where MKL is, on a CPU of Intel's. A saved file has these compiled. ``explain()`` says
            which op took which.
        tiles: into which tiles kernels of retrograd's own divide their work: ``auto``, as the table has it that comes
            with them; ``measure``, as a CUDA device takes the least time, which is measured for each kernel and each of
            its sizes once and kept; or the path of a file of what was measured, which ``retrograd tiles FILE`` writes,
            for where there is no device. Under ``torch.compile``, ``mode="max-autotune"`` measures. ``explain()`` says
            of which kernels the tiles are from a measurement.
        cuda_graphs: on CUDA, capture forward and backward after some calls, and replay each by one call of the host,
            for models that keep the host busier than the device. The memory that a half works in stays taken. With
            ``auto``, three calls of each half are timed, and it is captured where to queue it takes the host most of
            the time that it takes the device, and where the device has as much memory left as that takes. What
            cannot be captured (ops that run in torch and are no library's, open sizes) runs as without, and
            ``explain()`` says why. Under ``torch.compile``, ``mode="reduce-overhead"`` is the same.
        collectives: how functional collectives of PyTorch's in the graph are joined and moved, a
            :class:`retrograd.Collectives`, for programs of which every process compiles the same; otherwise they start
            in the order in which they were captured, and are waited for when what they give is needed.
        free_early: cut forward and backward into stages where that lowers the peak of live bytes: residuals are freed
            after the stage that needs them last, and a gradient has no memory before its own. ``auto`` does so
            on a CPU where that saves 32 MiB of a step; ``True`` where it saves one, which costs small models time. A
            program to be saved, a memory budget's, and one for Vulkan has functions in one piece.
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
        or kernels are asked for by name that there are none of here, or tiles of kernels of which there are none; or
        residuals are to be offloaded from another device than CUDA, of a CUDA graph or of a portable program.
        KernelError: tiles are to be measured, and there is no device for it.
        TypeError: ``cache`` or ``portable`` is neither True nor False, ``verify`` is neither these nor ``first``,
            ``kernels`` is neither text nor several texts, or ``collectives`` is no ``Collectives``.
    """
    check_flag("portable", portable)
    if isinstance(model, CompiledBackward):
        raise CaptureError("the model is what compile_backward has made", "give the model that it was made from")
    if portable and free_early is True:
        raise ValueError("a portable program has functions in one piece: leave out free_early, or portable and save()")
    if portable and isinstance(save_policy, SavePolicy) and save_policy.offloads:
        raise ValueError("a portable program keeps residuals where it runs: leave out retrograd.offload, or portable")
    request = Request(
        target=target,
        partition=partition,
        cache=cache,
        memory_budget=memory_budget,
        save_policy=save_policy,
        fallback=fallback,
        kernels=kernels,
        tiles=tiles,
        verify=verify,
        free_early=free_early,
        cuda_graphs=cuda_graphs,
        collectives=collectives,
    )
    question = None
    # What is no listener is refused by who tells it of phases.
    if not portable and dynamic_shapes is None and (progress is None or callable(progress)):
        question = ModelInQuestion.of(model, request, args, kwargs)
        known = None if question is None else _open_known(question, progress)
        if known is not None:
            return known
    # Imported where it is needed: what compiles takes longer to import than a known model to open.
    from retrograd.compilation import Compilation

    compilation = Compilation(model, request, dynamic_shapes, progress)
    return compilation.compile(args, kwargs, portable=portable, question=question)


def _open_known(question: ModelInQuestion, progress: Callable[[str], None] | None) -> CompiledBackward | None:
    """The model as another process compiled it, if one has and nothing is in doubt."""
    # What is kept as long as the result is not to hold the arguments.
    model, request = question.model, question.request

    def compile_anew(
        args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, as_in_eager: bool = False
    ) -> CompiledBackward:
        from retrograd.compilation import Compilation

        return Compilation(model, request, as_in_eager=as_in_eager).compile(args, kwargs)

    tell = progress or (lambda _: None)
    with COMPILING:
        tell("look up")
        found = question.find()
        if found is None:
            return None
        tell("load")
        known = question.open(*found, compile_anew)
    in_eager = partial(compile_anew, as_in_eager=True)
    known.specializations = Specializations(model, question.python, compile_anew, in_eager, None, request.fallback)
    return known


def bisect(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: str | Sequence[str] | None = None,
    partition: Partition = MIN_CUT,
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
    from retrograd.compilation import Compilation

    request = Request(
        target=target,
        partition=partition,
        memory_budget=memory_budget,
        save_policy=save_policy,
        fallback="error" if artifact is not None else fallback,
    )
    return Compilation(model, request).bisect(args, kwargs, artifact)


def options_of(mode: str | None, tensors: Sequence[torch.Tensor], options: Mapping[str, Any]) -> dict[str, Any]:
    """Reads what a mode of ``torch.compile`` stands for beside ``options``: CUDA graphs, or tiles by measurement on the
    CUDA device of the graph's tensors; where there are no kernels to measure, a warning says why."""
    if mode == "reduce-overhead":
        return {"cuda_graphs": True}
    device = next((t.device for t in tensors if t.is_cuda), None)
    if mode not in MEASURING or device is None or "tiles" in options:
        return {}
    kernels = options.get("kernels", AUTO)
    target = target_on(device, options.get("target"), kernels)
    if target.kernels:
        return {"tiles": MEASURE}
    if kernels != OFF:
        warnings.warn(f"mode='{mode}' has no kernels to measure: {find_obstacle(target)}", UserWarning, stacklevel=2)
    return {}


# Recurrent layers are taken, gradients that a function takes itself are part of its graph, and hooks that are put on
# modules, or taken off, between two calls are seen.
@captured_with(allow_rnn=True, skip_nnmodule_hook_guards=False, trace_autograd_ops=True)
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
    from retrograd.build import build_functions
    from retrograd.frontend.doors.dynamo import compile_with_dynamo

    check_choice("mode", mode or "default", MODES)
    # A graph may take nothing, and make tensors on a device.
    made = (node.meta.get("example_value") for node in graph_module.graph.nodes)
    tensors = [t for t in (*example_inputs, *made) if isinstance(t, torch.Tensor)]
    chosen = Request.read({**options_of(mode, tensors, options or {}), **(options or {})}).on(tensors)
    with library_ops(chosen.libraries), recurrent_loops(chosen.loops):
        return compile_with_dynamo(
            graph_module, example_inputs, partial(build_functions, options=chosen), in_budget=chosen.partition == BUDGET
        )
