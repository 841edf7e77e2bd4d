# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""IREE's compiler with our passes before its stream phase, and in the middle of it, where it lays out memory."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iree.compiler import ir
from iree.compiler.api import Invocation, Output, Session, Source, ctypes_dl

# What our passes read belongs to these: they are imported where they are first met, else, by each child of a server
# anew, a twentieth of the time of a small module.
from iree.compiler.dialects import arith, builtin, hal, stream, util  # noqa: F401

from retrograd.pipelines.devices.device_targets import IN_ORDER
from retrograd.pipelines.stream import bwd_join_indices, bwd_overlap_commands, bwd_pack_scratch, bwd_part_groups
from retrograd.pipelines.stream.passes import load_pass

# Of IREE's stream phase: up to commands whose buffers have no place yet, up to their places, and the rest.
_TO_BUFFERS = (
    "iree-stream-tensor-transformation-pipeline",
    "iree-stream-async-transformation-pipeline",
    "iree-stream-schedule-allocation",
)
_TO_COMMANDS = ("iree-stream-cmd-transformation-pipeline",)
_TO_STREAM = ("iree-stream-optimization-pipeline", "iree-stream-cleanup-pipeline", "symbol-dce")

PHASES = ("input", "abi", "preprocessing", "global-optimization", "dispatch-creation", "flow", "stream", "end")
"""The phases that compilation may end with, in order: of IREE's own those up to where our passes come, and ``end``."""

# Buffers lie in storage for results on a CPU alone and on CUDA alone: on others this was not compared with eager yet.
_HOSTING = re.compile(
    r'--iree-hal-target-device=(?:local|#hal\.device\.target<"cuda"(?:(?!#hal\.device|,(?:local|vulkan|hip)\b).)*)'
)
# Others run a function's commands one after another, or were not tried.
_ON_CPU = "--iree-hal-target-device=local"
_RULES_FLAG = "--iree-codegen-transform-dialect-library="
_NO_KERNELS = b"module { func.func @nothing() { return } }\0"


class CompilationFailed(Exception):
    """A phase failed; IREE has said why to standard error."""


@dataclass(frozen=True)
class Dumps:
    """Where IR is written: with all buffers, before they are packed; after the stream phase; after each other phase, as
    ``iree-compile --dump-compilation-phases-to`` does it."""

    allocation: Path | None = None
    layout: Path | None = None
    phases: Path | None = None


@dataclass(frozen=True)
class Part:
    """Those of a module's public functions that one process compiles, and the name of the module that it makes of
    them: those of one context have different ones."""

    module: str
    functions: tuple[str, ...]


@dataclass(frozen=True)
class Layouts:
    """How memory is laid out: ``loose``, which takes the time of several layouts, and no block is smaller or larger by
    it; ``hosts``, with buffers in storage for results; ``overlaps``, with commands that run at the same time after;
    ``parts``, with groups of such parted before, where that takes less."""

    loose: bool
    hosts: bool
    overlaps: bool
    parts: bool


def compile_file(
    source: Path,
    output: Path,
    flags: Sequence[str],
    *,
    last: str = "end",
    dumps: Dumps | None = None,
    verified: bool = True,
    part: Part | None = None,
) -> None:
    """Compile text of MLIR with the flags of ``iree-compile`` to a vmfb, or to the IR after the ``last`` phase, one of
    ``PHASES``. Once in a process: flags are the whole compiler's. The IR is checked after each pass until kernels are
    formed, and afterwards if it is to be ``verified``. Of a ``part`` nothing else is compiled.

    Raises:
        CompilationFailed: IREE refused the module.
        PassFailure: one of our passes did.
    """
    dumps = dumps or Dumps()
    _set_flags(flags)
    session = Session()
    if any(flag.startswith(_RULES_FLAG) for flag in flags):
        _load_rules(session)
    invocation = session.invocation()
    invocation.enable_console_diagnostics()
    if dumps.phases is not None:
        _call("DumpCompilationPhasesTo", invocation, str(dumps.phases))
    _require(invocation.parse_source(Source.open_file(session, str(source))))
    if part is not None:
        _keep_part(invocation.export_module(), part)
    is_early = last not in ("stream", "end")
    _call("CompileToPhase", invocation, last if is_early else "flow")
    _require(invocation.execute())
    if is_early:
        _write(output, invocation.export_module())
        return
    _call("VerifyIR", invocation, verified)
    in_order = IN_ORDER in flags
    hosts = any(map(_HOSTING.fullmatch, flags))
    parts = not in_order and _ON_CPU in flags
    layout = Layouts(loose=last == "end" and in_order, hosts=hosts, overlaps=in_order, parts=parts)
    bwd_join_indices.apply(invocation.export_module())
    module = _lay_out(invocation, dumps, layout)
    if last == "stream":
        _write(output, module)
        return
    _call("CompileFromPhase", invocation, "stream")
    _call("CompileToPhase", invocation, "end")
    _require(invocation.execute())
    vmfb = Output.open_file(str(output))
    invocation.output_vm_bytecode(vmfb)
    vmfb.keep()


def _keep_part(module: Any, part: Part) -> None:
    """Erase the public functions that are none of the part's; what they alone call is found to be of no use later."""
    module.attributes["sym_name"] = ir.StringAttr.get(part.module, module.context)
    for view in [*module.regions[0].blocks[0]]:
        op = view.operation
        if op.name != "func.func" or "sym_visibility" in op.attributes:
            continue
        if ir.StringAttr(op.attributes["sym_name"]).value not in part.functions:
            op.erase()


def _load_rules(session: Session) -> None:
    """Have the rules for kernels read before there are any.

    IREE reads them where they are first asked for, by a thread that compiles a kernel, and holds a lock while it has
    them verified on the pool of threads. A thread that waits there may take up another kernel, which asks for the lock:
    the compilation then stands still for ever. Once read, they are kept with the session.
    """
    invocation = session.invocation()
    invocation.enable_console_diagnostics()
    _require(invocation.parse_source(Source.wrap_buffer(session, _NO_KERNELS)))
    _run(invocation, ("iree-codegen-materialize-user-configs",))


def _lay_out(invocation: Invocation, dumps: Dumps, layouts: Layouts) -> Any:
    """Take the module through the stream phase; returns it. Passes are those of IREE's own phase, in its order; only
    ``iree-stream-schedule-allocation`` runs twice, the second time with nothing left to do."""
    _run(invocation, _TO_BUFFERS)
    module = invocation.export_module()
    if layouts.parts:
        bwd_part_groups.apply(module)
    packings = bwd_pack_scratch.plan_packings(module, loose=layouts.loose, hosts=layouts.hosts)
    if dumps.allocation is not None:
        _write(dumps.allocation, module)
    bwd_pack_scratch.carry_out(module, packings)
    _run(invocation, _TO_COMMANDS)
    if layouts.overlaps:
        bwd_overlap_commands.apply(module)
    _run(invocation, _TO_STREAM)
    if dumps.layout is not None:
        _write(dumps.layout, module)
    return module


def run_passes(source: Path, names: Sequence[str]) -> str:
    """Run our passes on a file of text of IREE's dialects; returns the result.

    Raises:
        PassFailure: a pass refused it.
        ValueError: no such pass, or no such file.
        ir.MLIRError: it is no MLIR, or a pass left none.
    """
    passes = [load_pass(name) for name in names]
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parseFile(str(source))
        for apply in passes:
            apply(module.operation)
        module.operation.verify()
        return str(module)


# The compiler keeps the flags that it is given where they are.
_kept: list[Any] = []


def _set_flags(flags: Sequence[str]) -> None:
    """Take flags as the program takes them: there are some that a session does not have."""
    _kept[:] = [ctypes.create_string_buffer(text.encode()) for text in ("iree-compile", *flags)]
    array = (ctypes.c_char_p * len(_kept))(*(ctypes.c_char_p(ctypes.addressof(text)) for text in _kept))
    ctypes_dl._dylib.ireeCompilerSetupGlobalCL(len(_kept), array, b"iree-compile", False)


def _call(setting: str, invocation: Invocation, value: str | bool) -> None:
    """Set what IREE's C API has and its Python API has not."""
    function = getattr(ctypes_dl._dylib, f"ireeCompilerInvocationSet{setting}")
    function.argtypes = [ctypes.c_void_p, ctypes.c_bool if isinstance(value, bool) else ctypes.c_char_p]
    function.restype = None
    function(invocation._inv_p, value if isinstance(value, bool) else value.encode())


def _run(invocation: Invocation, passes: Sequence[str]) -> None:
    _require(invocation.execute_text_pass_pipeline(",".join(passes)))


def _require(succeeded: bool) -> None:
    if not succeeded:
        raise CompilationFailed


def _write(path: Path, module: Any) -> None:
    path.write_text(module.get_asm(enable_debug_info=True), encoding="utf-8")
