# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From linalg to an executable, by iree-compile."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from retrograd.contract.launches import Launches
from retrograd.contract.roles import INTO
from retrograd.pipelines.devices.device_targets import DATA_TILING, SHARED_BINDINGS
from retrograd.pipelines.devices.elementwise_tiles import elementwise_rules
from retrograd.pipelines.devices.kernel_rules import write_library
from retrograd.pipelines.devices.product_tiles import write_tile_script
from retrograd.pipelines.devices.targets import Target
from retrograd.pipelines.infra.errors import CompileError
from retrograd.pipelines.kernels.family import CHOICES
from retrograd.pipelines.toolchain.compiler_parts import UNVERIFIED, select_parts
from retrograd.pipelines.toolchain.launch_reader import read_launches
from retrograd.pipelines.toolchain.lowering import keep_for_replay, tool_failure
from retrograd.pipelines.toolchain.module_parts import Parts, part_paths, write_parts
from retrograd.pipelines.toolchain.scratch import LAYOUT_PASS, read_joined, read_placed, read_transients
from retrograd.pipelines.toolchain.subprocesses import ToolLimits, ToolResult, run_tool
from retrograd.pipelines.toolchain.timeline import ALLOCATION_PASS, Step, read_timelines
from retrograd.pipelines.toolchain.vmfb import add_launches, add_parts, read_formats
from retrograd.pipelines.toolchain.warm_tool import WarmTool

# Where iree-compile writes the module as it is after each of its phases, and after the passes that we read it after.
_PHASES, _PASSES = "phases", "passes"
# IREE's compiler with our passes in its stream phase.
_OWN = WarmTool("retrograd.tools.iree_compile", server="retrograd.tools.iree_compile_server")
# LLVM has no instructions for a kernel, and ends the process: for products of bf16 whose operands are packed, on a CPU
# with fewer features than its model has. A set of flags that packs them too would end there as well, as late.
_LLVM_GAVE_UP = "LLVM ERROR: Do not know how to"
# iree-compile refuses a module without functions, which is what is left where all of a graph runs in torch.
_FUNCTION, _NOTHING = "func.func", "func.func @nothing() { return }"
# Constants are worked out on the device when a program is loaded: worked out now, on a CPU, they are data in the file,
# which launch plans do not reach.
_NO_EVALUATION = "--iree-opt-const-eval=false"


@dataclass(frozen=True)
class Executable:
    """A vmfb, the optimization flags that made it, scratch bytes per function, and how long it took, in seconds.

    Of a function that works out what it allocates from open sizes, these are the bytes at the sizes of the trace.

    ``placed`` are the bytes of results that lie in arguments which the caller gave up, ``joined`` those of
    arguments that lie one behind another. ``timelines`` have the steps of
    each function with the scratch memory in use; ``notes`` say in words where results
    are not what the module asks for; ``kernels`` which op became a kernel of our own, and which did not and why.
    """

    vmfb: bytes
    flags: tuple[str, ...]
    transients: dict[str, int]
    seconds: float
    notes: tuple[str, ...] = ()
    timelines: dict[str, tuple[Step, ...]] = field(default_factory=dict)
    kernels: tuple[str, ...] = ()
    placed: dict[str, int] = field(default_factory=dict)
    joined: dict[str, int] = field(default_factory=dict)

    @property
    def working(self) -> dict[str, int]:
        """Bytes that each function takes beyond arguments and results: below zero where results lie in arguments."""
        return {name: scratch - self.placed.get(name, 0) for name, scratch in self.transients.items()}


@cache
def iree_tool(name: str) -> Path:
    """Path of a tool (``iree-compile``, ``iree-opt``) of the IREE compiler package; the package itself is not imported.

    Raises:
        FileNotFoundError: the package is not installed; says the command that installs it.
    """
    spec = importlib.util.find_spec("iree.compiler")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        tool = Path(folder) / "_mlir_libs" / name
        if tool.exists():
            return tool
    raise FileNotFoundError(f"{name} not found: pip install iree-base-compiler")


def compile_executable(
    linalg: str,
    target: Target,
    *,
    on_attempt: Callable[[tuple[str, ...]], None] | None = None,
    limits: ToolLimits | None = None,
    parts: Parts = (),
) -> Executable:
    """Compile linalg text for ``target``, trying its sets of flags in turn; ``on_attempt`` hears of each.

    ``limits`` are those of one attempt, else the environment's. ``parts`` are functions that are compiled side by side
    for a CPU: what they become is one executable to our runtime, and to others the first part alone.

    Raises:
        CompileError: every set failed; reports the last and plainest one's first error, and the replay command. Or the
            functions take or give float64, which the target does not have, or the result lacks code for a device.
    """
    check_float64(linalg, target)
    if _FUNCTION not in linalg:
        linalg = _NOTHING
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="retrograd-compile-") as name:
        folder = Path(name)
        vmfb = folder / "module.vmfb"
        dumps = _dump_options(folder / _PASSES, target)
        if target.max_bindings is not None or _is_launched(target):
            dumps += [f"--dump-compilation-phases-to={folder / _PHASES}"]
        if parts:
            dumps.append(f"--parts={write_parts(parts)}")
        options = [_NO_EVALUATION] if _is_launched(target) else []
        flags = _climb(linalg, target, vmfb, options, on_attempt, dumps, limits)
        transients: dict[str, int] = {}
        placed: dict[str, int] = {}
        joined: dict[str, int] = {}
        timelines: dict[str, tuple[Step, ...]] = {}
        for laid_out in _read_dumps(folder, LAYOUT_PASS):
            transients |= read_transients(laid_out, frees_late=target.frees_late)
            placed |= read_placed(laid_out)
            joined |= read_joined(laid_out)
        for allocated in _read_dumps(folder, ALLOCATION_PASS):
            timelines |= read_timelines(allocated)
        data, *others = (path.read_bytes() for path in part_paths(vmfb))
        for code in (data, *others):
            check_formats(code, target)
        data = add_parts(data, others)
        seconds = time.perf_counter() - start
        notes = find_demotions(linalg, target)
        kernels = read_choices(linalg)
        if _is_launched(target):
            launches = _read_launches(folder)
            data = add_launches(data, launches)
            transients.update((name, plan.scratch) for name, plan in launches.functions.items())
            kernels += tuple(f"{name} waits for the device: {why}" for name, why in launches.reasons.items())
        return Executable(data, flags, transients, seconds, notes, timelines, kernels, placed, joined)


def _is_launched(target: Target) -> bool:
    """Whether the runtime queues the kernels itself: those of a program for CUDA alone."""
    return target.kinds == ("cuda",)


def _read_launches(folder: Path) -> Launches:
    """The launch plans of the module of which the phases are in ``folder``: of functions that take storage for their
    results, which are the ones that the runtime calls."""
    launches = read_launches(next((folder / _PHASES).glob("*.hal.mlir")).read_text(encoding="utf-8"))
    reasons = {name.removesuffix(INTO): why for name, why in launches.reasons.items() if name.endswith(INTO)}
    return replace(launches, reasons=reasons)


def read_choices(linalg: str) -> tuple[str, ...]:
    """Read the choices that convert-linalg-to-kernels noted in a module's text: which op took which path, a line each;
    a line once."""
    noted = re.search(rf'{re.escape(CHOICES)} = \[("[^\]]*")\]', linalg)
    return tuple(dict.fromkeys(re.findall(r'"([^"]*)"', noted[1]))) if noted else ()


def _dump_options(folder: Path, target: Target) -> list[str]:
    """The options that have IR written to ``folder`` for :func:`_read_dumps`."""
    if target.is_packed:
        folder.mkdir()
        options = {"dump-allocation": ALLOCATION_PASS, "dump-layout": LAYOUT_PASS}
        return [f"--{option}={folder / f'0_{name}.mlir'}" for option, name in options.items()]
    passes = f"--mlir-print-ir-after={ALLOCATION_PASS},{LAYOUT_PASS}"
    return [f"--mlir-print-ir-tree-dir={folder}", "--mlir-print-debuginfo", passes]


def _read_dumps(folder: Path, name: str) -> list[str]:
    """The module as it was after the pass of that name, part by part."""
    first = next((folder / _PASSES).rglob(f"*_{name}.mlir"))
    return [path.read_text(encoding="utf-8") for path in part_paths(first)]


def check_formats(vmfb: bytes, target: Target) -> None:
    """Raise :class:`CompileError` where ``vmfb`` lacks executables for a device of ``target``. Read back from the file,
    since iree-compile leaves a device out without a word; a module that computes nothing has executables for none."""
    found = read_formats(vmfb)
    missing = [d.name for d in target.devices if d.executable_format not in found]
    if found and (missing or len(set(found.values())) > 1):
        counts = ", ".join(f"{count} {name}" for name, count in sorted(found.items()))
        what = f"the executable lacks code for {', '.join(missing) or 'a device'} of {target.name}: it holds {counts}"
        raise CompileError(
            "iree-compile", what, "", f"iree-compile {shlex.join(target.flags)} linalg.mlir -o module.vmfb"
        )


def check_float64(linalg: str, target: Target) -> None:
    """Raise :class:`CompileError` where ``linalg`` has float64 in a signature, and ``target`` none. Inside of a
    function, float64 is then computed in float32; :func:`find_demotions` tells of it."""
    if target.has_f64:
        return
    lacking = next(device.name for device in target.devices if not device.has_f64)
    for name, signature in re.findall(r"func\.func @(\w+)(\(.*?) \{$", linalg, flags=re.MULTILINE):
        if _FLOAT64_TENSOR.search(signature):
            what = (
                f"@{name} takes or gives tensors of float64, which code for {lacking} does not have; "
                "convert the model and its arguments to float32"
            )
            raise CompileError("iree-compile", what, "", "")


def find_demotions(linalg: str, target: Target) -> tuple[str, ...]:
    """A note where ``linalg`` computes tensors of float64 that ``target`` computes in float32. Scalars that are rounded
    at once do not count: torch-mlir writes all of them as float64."""
    tensors = len(_FLOAT64_TENSOR.findall(linalg))
    if target.has_f64 or not tensors:
        return ()
    lacking = next(device.name for device in target.devices if not device.has_f64)
    return (f"{lacking} has no float64: what the model computes in it inside is computed in float32",)


_FLOAT64_TENSOR = re.compile(r"tensor<(?:[0-9?]+x)*f64>")


def measure_scratch(linalg: str, target: Target) -> dict[str, int]:
    """Bytes that each exported function takes beyond arguments and results (:attr:`Executable.working`), with the first
    set of flags that leads to IREE's stream phase.

    Raises:
        CompileError: no set does; reports the last one's first error, and the replay command.
    """
    with tempfile.TemporaryDirectory(prefix="retrograd-scratch-") as name:
        stream = Path(name) / "stream.mlir"
        # Constants are worked out at load time as well as now, which takes a code generator.
        _climb(linalg, target, stream, ["--compile-to=stream", _NO_EVALUATION], None)
        text = stream.read_text(encoding="utf-8")
        placed = read_placed(text)
        scratch = read_transients(text, frees_late=target.frees_late, is_launched=_is_launched(target))
        return {name: size - placed.get(name, 0) for name, size in scratch.items()}


def compile_to_phase(linalg: str, target: Target, phase: str, *, limits: ToolLimits | None = None) -> None:
    """Compile as far as a phase of iree-compile's, for what it says of the module.

    Raises:
        CompileError: as for :func:`compile_executable`.
    """
    with tempfile.TemporaryDirectory(prefix="retrograd-phase-") as name:
        _climb(linalg, target, Path(name) / "phase.mlir", [f"--compile-to={phase}"], None, limits=limits)


def _climb(
    linalg: str,
    target: Target,
    output: Path,
    options: Sequence[str],
    on_attempt: Callable[[tuple[str, ...]], None] | None,
    dumps: Sequence[str] = (),
    limits: ToolLimits | None = None,
) -> tuple[str, ...]:
    """Write ``output`` with the first of the target's sets of flags that compiles; returns that set.

    ``dumps`` are options that write IR to folders besides: the command that replays a failure does without, and without
    those that only save time.
    """
    folder = output.parent
    source = folder / "linalg.mlir"
    source.write_text(linalg, encoding="utf-8")
    rungs = target.find_rungs(linalg)
    tiles = _write_tiles(linalg, target, folder)
    parts = select_parts(linalg, target)
    with_tiles = [(flags, script) for flags in rungs for script in tiles]
    attempts = [*dict.fromkeys([*with_tiles, *((flags, ()) for flags in rungs)])]
    problem = None
    while attempts:
        flags, script = attempts.pop(0)
        if on_attempt is not None:
            on_attempt(flags)
        arguments = [str(source), "-o", str(output), *target.flags, *flags, *script, *parts, *options, *dumps]
        result = _run_compiler(target, arguments, folder, limits)
        if result.returncode == 0 and (problem := _find_excess(target, folder)) is None:
            return flags
        if result.returncode == 0 and SHARED_BINDINGS not in flags:
            attempts.insert(0, ((*flags, SHARED_BINDINGS), script))
        elif result.returncode == 0:
            attempts = [other for other in attempts if _fusion_flags(other[0]) != _fusion_flags(flags)]
        elif DATA_TILING in flags and result.crashed and _LLVM_GAVE_UP in result.stderr:
            attempts = [other for other in attempts if DATA_TILING not in other[0]]
    if result.crashed and UNVERIFIED in arguments:
        # What a check after each pass says tells more than where it crashed.
        said = _run_compiler(target, [part for part in arguments if part != UNVERIFIED], folder, limits)
        result = said if said.returncode else result
    kept = keep_for_replay(source)
    name = ["python", "-m", _OWN.program] if target.is_packed else ["iree-compile"]
    replay = shlex.join([*name, str(kept), "-o", output.name, *target.flags, *flags, *options])
    if result.returncode == 0 and problem is not None:
        raise CompileError("iree-compile", problem, "", replay)
    raise tool_failure("iree-compile", result, source, kept, replay)


def _run_compiler(target: Target, arguments: Sequence[str], folder: Path, limits: ToolLimits | None) -> ToolResult:
    """Run what compiles for ``target``: for a CPU, or where kernels run one at a time, IREE's compiler with our passes
    over commands and their buffers."""
    if target.is_packed:
        return _OWN.run(arguments, folder=folder, limits=limits)
    return run_tool([iree_tool("iree-compile"), *arguments], folder=folder, limits=limits)


def _fusion_flags(flags: Sequence[str]) -> set[str]:
    """The flags that decide which ops make one kernel, and so which buffers it takes; code generation and tiles, which
    come after, do not."""
    return {flag for flag in flags if flag != SHARED_BINDINGS and not flag.startswith("--iree-codegen-")}


def _find_excess(target: Target, folder: Path) -> str | None:
    """Say what is wrong where a kernel takes more buffers than the driver of a device of ``target`` lets it; the phases
    of the compilation, if it came so far, are in ``folder``."""
    dump = next((folder / _PHASES).glob("*.executable-targets.mlir"), None)
    if target.max_bindings is None or dump is None:
        return None
    kernel = widest_kernel(dump.read_text(encoding="utf-8"))
    if kernel is None or kernel.bindings <= target.max_bindings:
        return None
    return (
        f"kernel @{kernel.name} takes {kernel.bindings} buffers, and drivers of {target.name} load none that takes "
        f"more than {target.max_bindings}; compile for the CPU"
    )


def _write_tiles(linalg: str, target: Target, folder: Path) -> list[tuple[str, ...]]:
    """The options that have iree-compile take our tiles, and those that leave elementwise ops to it; none for several
    devices, whose kernels are one another's."""
    if target.kinds != ("cuda",):
        return []
    script, maps = write_tile_script(linalg), write_library(elementwise_rules(linalg))
    common: tuple[str, ...] = ()
    if script is not None:
        common = (_write_option("preprocessing-transform-spec-filename", script, folder, "products"),)
    return [(*common, _write_option("codegen-transform-dialect-library", maps, folder, "maps")), common]


def _write_option(option: str, script: str, folder: Path, name: str) -> str:
    """The option that has iree-compile read a script, which is written to the folder."""
    path = folder / f"{name}.mlir"
    path.write_text(script, encoding="utf-8")
    return f"--iree-{option}={path}"


# -- Buffers of a kernel ----------------------------------------------------------------------------------------------

# How many buffers a kernel takes: drivers of GPUs load none that takes more than so many, and iree-compile, which
# fuses up to a bound on the operands of one op, makes some that do (the sums of all taps of a filter, say).


@dataclass(frozen=True)
class Kernel:
    """A kernel and the number of buffers that it takes."""

    name: str
    bindings: int


def widest_kernel(executables: str) -> Kernel | None:
    """The kernel that takes the most buffers in IREE's IR after its phase ``executable-targets``; None without any."""
    counts = {
        name: layout.count("#hal.pipeline.binding<")
        for name, layout in re.findall(r"^(#\w+) = #hal\.pipeline\.layout<(.*)>$", executables, flags=re.MULTILINE)
    }
    exports = re.findall(r"hal\.executable\.export public @(\w+) .*?layout\((#\w+)\)", executables)
    return max((Kernel(name, counts[layout]) for name, layout in exports), key=lambda k: k.bindings, default=None)
