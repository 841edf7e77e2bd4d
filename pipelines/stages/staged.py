# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The staged pipeline: imported -> partitioned -> scheduled -> linalg -> executable, verified at each hand-over."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from retrograd.contract.hooks import Communicating
from retrograd.contract.plan import StagePlan
from retrograd.contract.roles import BACKWARD, FORWARD, JOINT, SAVED
from retrograd.contract.tensors import FunctionSpec
from retrograd.dialects import ir
from retrograd.pipelines.analysis.hooks.hook_schedule import HookSchedule
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.pareto import Curve
from retrograd.pipelines.analysis.partition.policies import POLICIES, Policy, find_curve
from retrograd.pipelines.devices.targets import Target, host_cpu
from retrograd.pipelines.infra.errors import CompileError
from retrograd.pipelines.infra.functions import find_function, functions
from retrograd.pipelines.infra.runner import run_passes
from retrograd.pipelines.kernels.ptx import find_triton, fingerprint
from retrograd.pipelines.stages.collective_passes import collective_passes
from retrograd.pipelines.stages.interface import read_interface
from retrograd.pipelines.stages.kept_code import pack_code, unpack_code
from retrograd.pipelines.stages.save_policy import SavePolicy
from retrograd.pipelines.stages.stage_plan import read_island_plans, read_plan
from retrograd.pipelines.stages.stage_steps import BACKWARD_STAGES, ISLANDS, MARKS, STAGES, passes_of
from retrograd.pipelines.toolchain.executable import Executable, compile_executable
from retrograd.pipelines.toolchain.lowering import lower_to_linalg
from retrograd.pipelines.toolchain.lowering_steps import lowering_pipeline
from retrograd.pipelines.toolchain.module_parts import count_processors, divide_functions
from retrograd.pipelines.toolchain.timeline import Step
from retrograd.pipelines.transforms.helpers.collective_notes import read_collective_notes
from retrograd.pipelines.transforms.helpers.hook_reader import has_collectives, has_islands, mark_communication
from retrograd.pipelines.transforms.torch.bwd_apply_save_policy import BwdApplySavePolicy
from retrograd.pipelines.transforms.torch.bwd_cse import read_merged
from retrograd.pipelines.transforms.torch.bwd_functionalize_rng import GENERATOR
from retrograd.pipelines.transforms.torch.bwd_narrow_saved import read_narrowed
from retrograd.pipelines.transforms.torch.bwd_offload_saved import BwdOffloadSaved, read_offloaded
from retrograd.pipelines.transforms.torch.bwd_partition import BwdPartition, read_problem
from retrograd.pipelines.transforms.torch.bwd_schedule_hooks import BwdScheduleHooks
from retrograd.pipelines.transforms.torch.bwd_sink_recompute import BwdSinkRecompute

STAGE_NAMES = (*STAGES, "linalg")


class ExecutableStore(Protocol):
    """Where executables are kept between runs: bytes under a key that says all that they depend on."""

    def get(self, parts: dict[str, str]) -> bytes | None:
        """Return the bytes that were put under these parts, if any."""

    def put(self, parts: dict[str, str], data: bytes) -> None:
        """Keep ``data`` under these parts."""

    def making(self, parts: dict[str, str]) -> AbstractContextManager[None]:
        """Let nobody else make what is kept under these parts meanwhile."""


@dataclass(frozen=True)
class StagedModule:
    """A module that went through all stages up to ``scheduled``.

    ``texts`` holds the IR at each, ``source`` the last with locations; ``partition`` is what bwd-partition decided, as
    numbers; ``merged`` are the values that bwd-cse found to be others', by name, ``narrowed`` how bwd-narrow-saved
    packed those that it did: the type, or the function of the user's hook. ``plans`` are those of functions that were
    cut, by name, because of ops that run in torch or to lower the peak, and ``stages`` the functions that are compiled;
    where nothing is cut these are ``functions``. ``whole`` is the module before it was cut to lower the peak, or with
    the backward of all outputs where that of a loss was compiled first. ``memory_budget`` are the bytes that it was
    chosen to stay within, ``notes`` what was done to collectives, in words; ``offloaded`` are the residuals that go to
    the host, by the names of their values.
    """

    texts: dict[str, str]
    source: str
    functions: tuple[FunctionSpec, ...]
    partition: dict[str, Any]
    seconds: dict[str, float]
    merged: dict[str, str] = field(default_factory=dict)
    narrowed: dict[str, str] = field(default_factory=dict)
    plans: dict[str, StagePlan] = field(default_factory=dict)
    stages: tuple[FunctionSpec, ...] = ()
    whole: StagedModule | None = None
    memory_budget: int | None = None
    notes: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()

    @property
    def planned_peak(self) -> int:
        """The peak of live bytes of a step, by the liveness of what was partitioned."""
        return int(self.partition["peak_bytes_planned"])

    def function(self, name: str) -> FunctionSpec:
        """The function called ``name``."""
        return next(f for f in self.functions if f.name == name)

    @property
    def saved(self) -> list[str]:
        """The names of the values that the forward computes for the backward alone; a half by itself saves nothing."""
        if not {FORWARD, BACKWARD} <= {f.name for f in self.functions}:
            return []
        return [r.value for r in self.function(FORWARD).results if r.role == SAVED]

    def linalg(self) -> str:
        """The module on linalg, without locations; lowered again at each call."""
        return lower_to_linalg(self.source.encode(), locations=False)


# A module that was compiled, what to, and whether that was in the store.
Finished = tuple[StagedModule, Executable, bool]


@dataclass(frozen=True)
class StagedBackward:
    """A backward with hooks: the functions that its plan calls, up to ``scheduled``, and the plan."""

    module: StagedModule
    plan: StagePlan


@dataclass
class Progress:
    """Tells a listener which phase is running and keeps how long each took, in seconds."""

    listener: Callable[[str], None] | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.listener is not None and not callable(self.listener):
            raise TypeError(f"progress is a function that is called with a phase's name, or None; got {self.listener}")

    def tell(self, text: str) -> None:
        """Announce how far a phase is."""
        if self.listener is not None:
            self.listener(text)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Announce a phase and time it."""
        if self.listener is not None:
            self.listener(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def stage_module(
    module: ir.Module, policy: Policy | str, progress: Progress, *, in_order: bool = False, may_offload: bool = False
) -> StagedModule:
    """Run the passes of every stage on an imported module, in place; one that has no ``@joint`` is not partitioned.
    ``policy`` is a policy or the name of one without a budget; ``in_order`` says that kernels are to run one at a time,
    ``may_offload`` that those residuals are to go to the host that go where a budget's plan says so.

    Raises:
        PipelineError: a pass refused the module; names the op, its location and the command that replays it.
    """
    texts: dict[str, str] = {}
    partition: dict[str, Any] = {}
    joint = find_function(module.operation, JOINT) is not None
    chosen = POLICIES[policy] if isinstance(policy, str) else policy
    made = (
        BwdPartition.by(chosen, in_order=in_order),
        BwdOffloadSaved(maybe=may_offload),
        BwdSinkRecompute(in_order=in_order),
    )
    for stage, steps in STAGES.items():
        if stage == "partitioned" and not joint:
            continue
        with progress.phase({"imported": "verify", "partitioned": "partition", "scheduled": "schedule"}[stage]):
            run_passes(module, passes_of(steps, *made))
            texts[stage] = str(module)
        if stage == "partitioned":
            partition = _read_summary(module)
    return finish_staging(module, texts, partition, progress)


def read_curve(module: ir.Module) -> tuple[Curve, JointGraph]:
    """The curve of plans of an imported module, and the graph that ``bwd-partition`` sees of it, in which they are; the
    module is of no use afterwards.

    Raises:
        PipelineError: a pass refused the module.
    """
    before = itertools.takewhile(lambda step: step.name != BwdPartition.name, STAGES["partitioned"])
    run_passes(module, passes_of((*STAGES["imported"], *before)))
    func = find_function(module.operation, JOINT)
    if func is None:
        raise AssertionError("a module without @joint has nothing to partition")
    graph = read_problem(func).graph
    return find_curve(graph), graph


def finish_staging(
    module: ir.Module, texts: dict[str, str], partition: dict[str, Any], progress: Progress
) -> StagedModule:
    """Cut a module that is at ``scheduled`` at its islands, and collect what is known of it; adds to ``texts``.

    Raises:
        PipelineError: it cannot be cut.
    """
    interfaces = stages = read_interfaces(module)
    if any(has_islands(func) or has_collectives(func) for func in functions(module.operation)):
        with progress.phase("outline"):
            run_passes(module, passes_of(ISLANDS, *collective_passes(module)))
            texts["scheduled"], stages = str(module), read_interfaces(module)
    source = module.operation.get_asm(enable_debug_info=True)
    merged, narrowed = read_merged(module.operation), read_narrowed(module.operation)
    plans = read_island_plans(module.operation)
    notes = read_collective_notes(module.operation)
    return StagedModule(
        texts,
        source,
        interfaces,
        partition,
        progress.seconds,
        merged,
        narrowed,
        plans,
        stages,
        notes=notes,
        offloaded=read_offloaded(module.operation),
    )


def read_interfaces(module: ir.Module) -> tuple[FunctionSpec, ...]:
    """The interfaces of all functions of a staged module."""
    return tuple(read_interface(func) for func in functions(module.operation))


def mark_module(module: ir.Module, policy: SavePolicy, *, unmatched: Literal["error", "ignore"] = "error") -> None:
    """Mark the ops of an imported module that ``policy`` is about; a forward alone saves nothing.

    Raises:
        PipelineError: a rule contradicts the model, or matches nothing (unless told to ignore that).
    """
    if policy.rules and find_function(module.operation, JOINT) is not None:
        run_passes(module, passes_of(MARKS, BwdApplySavePolicy.by(policy, unmatched=unmatched)))


def stage_backward(
    module: ir.Module, hook_schedule: HookSchedule, progress: Progress, communication: Collection[Communicating] = ()
) -> StagedBackward:
    """Run the passes of every stage on an imported ``@backward``, in place.

    ``hook_schedule`` is a policy of bwd-schedule-hooks; ``communication`` are the kinds and numbers of the hooks
    and custom functions that start something that goes on while other work is done. Hooks to be inlined are
    ``@hook_N`` with ``bwd.inline``.

    Raises:
        PipelineError: a pass refused the module; names the op, its location and the command that replays it.
    """
    texts: dict[str, str] = {}
    schedule = BwdScheduleHooks(policy=hook_schedule)
    for stage, steps in BACKWARD_STAGES.items():
        with progress.phase({"imported": "verify", "ordered": "schedule", "scheduled": "outline"}[stage]):
            if stage == "ordered":
                mark_communication(module.operation, communication)
            run_passes(module, passes_of(steps, schedule, *collective_passes(module)))
            texts[stage] = str(module)
    plan = read_plan(module.operation)
    interfaces = read_interfaces(module)
    source = module.operation.get_asm(enable_debug_info=True)
    merged, notes = read_merged(module.operation), read_collective_notes(module.operation)
    return StagedBackward(
        StagedModule(texts, source, interfaces, {}, progress.seconds, merged, stages=interfaces, notes=notes), plan
    )


def build_executable(
    staged: StagedModule,
    target: Target,
    versions: dict[str, str],
    progress: Progress,
    store: ExecutableStore | None,
    *,
    standalone: bool = True,
) -> tuple[Executable, bool]:
    """Lower and compile, or take from ``store`` what did not change; also returns whether it was found there.

    What another process is compiling, one of the same training say, is waited for.

    ``standalone`` says whether others than the runtime are to call the functions (in a file, and if none is cut).

    Nothing enters the store unless the whole compilation succeeded.

    Raises:
        CompileError: an op has no lowering, or iree-compile failed with every set of flags.
    """
    standalone = standalone and not staged.plans
    if store is None:
        return _compile_with_kernels(staged, target, progress, standalone=standalone), False
    parts = executable_parts(staged, target, versions, standalone=standalone)
    found = store.get(parts)
    if found is not None:
        return _decode(found), True
    with store.making(parts):
        found = store.get(parts)
        if found is not None:
            return _decode(found), True
        executable = _compile_with_kernels(staged, target, progress, standalone=standalone)
        store.put(parts, _encode(executable))
    return executable, False


def _compile_with_kernels(staged: StagedModule, target: Target, progress: Progress, *, standalone: bool) -> Executable:
    """Compile, without kernels of our own where it fails with them."""
    try:
        return _compile(staged, target, progress, standalone=standalone)
    except CompileError as error:
        if not target.kernels:
            raise
        executable = _compile(staged, replace(target, kernels=()), progress, standalone=standalone)
        note = f"no kernels of our own are used, with which this did not compile: {error.message}"
        return replace(executable, notes=(*executable.notes, note))


def _compile(staged: StagedModule, target: Target, progress: Progress, *, standalone: bool) -> Executable:
    with progress.phase("lower"):
        linalg = lower_to_linalg(staged.source.encode(), target, twins_alone=not standalone, donating=not standalone)
    # Others than the runtime would find one part of a file's functions.
    divisible = not standalone and target.kinds == ("cpu",)
    parts = divide_functions(linalg, count_processors()) if divisible else ()
    with progress.phase("iree-compile"):
        return compile_executable(linalg, target, parts=parts)


def executable_parts(
    staged: StagedModule, target: Target, versions: dict[str, str], *, standalone: bool
) -> dict[str, str]:
    """All that an executable depends on."""
    return {
        "entry": "executable, scratch memory and its timelines, buffers and results in what is given up, copies",
        "module": staged.texts["scheduled"],
        # A backward that is compiled later, for a loss that leaves out outputs, draws what its forward drew.
        "random numbers": GENERATOR,
        "lowering": lowering_pipeline(target, twins_alone=not standalone, donating=not standalone),
        "target": repr(target),
        "cpu": host_cpu(),
        "kernels": f"{find_triton()} {fingerprint()}" if target.kernels else "",
        **versions,
    }


def _encode(executable: Executable) -> bytes:
    header: dict[str, Any] = {
        "flags": list(executable.flags),
        "transients": executable.transients,
        "seconds": executable.seconds,
        "placed": executable.placed,
        "joined": executable.joined,
    }
    header["notes"], header["kernels"] = list(executable.notes), list(executable.kernels)
    header["timelines"] = {name: [s.to_list() for s in steps] for name, steps in executable.timelines.items()}
    return pack_code(header, executable.vmfb)


def _decode(data: bytes) -> Executable:
    fields, vmfb = unpack_code(data)
    timelines = {name: tuple(Step(*s) for s in steps) for name, steps in fields["timelines"].items()}
    flags, notes = tuple(fields["flags"]), tuple(fields["notes"])
    kernels = tuple(fields["kernels"])
    sizes = fields["placed"], fields["joined"]
    return Executable(vmfb, flags, fields["transients"], fields["seconds"], notes, timelines, kernels, *sizes)


def _read_summary(module: ir.Module) -> dict[str, Any]:
    summary = ir.DictAttr(module.operation.attributes["bwd.partition"])
    return {a.name: _plain(a.attr) for a in summary}


def _plain(attribute: ir.Attribute) -> Any:
    if isinstance(attribute, ir.ArrayAttr):
        return [_plain(a) for a in attribute]
    return attribute.value
