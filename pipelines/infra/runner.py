# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Runs a textual pipeline of native passes and our own on a module."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import shlex
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from retrograd.dialects import ir
from retrograd.pipelines.infra.diagnostics import Diagnostic, PipelineError, read_diagnostics
from retrograd.pipelines.infra.pass_manager import PipelineTrace, build_pass_manager
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.infra.pipeline_string import PipelineSyntaxError, parse_pipeline

OPT_COMMAND = "retrograd-opt"


def run_passes(module: ir.Module, passes: Sequence[str | ModulePass]) -> None:
    """Run passes on `module`, in place: such as were made, and texts that a pipeline may have between two commas.

    Raises:
        PipelineError: as for :func:`run_pipeline`; a pass that was made is in `replay` with the options that say what
            comes to the same.
    """
    made = {place: pass_ for place, pass_ in enumerate(passes) if isinstance(pass_, ModulePass)}
    run_pipeline(module, f"builtin.module({','.join(map(str, passes))})", made=made)


def run_pipeline(
    module: ir.Module,
    pipeline: str,
    *,
    print_after_all: bool = False,
    timing: bool = False,
    replay: bool = True,
    made: Mapping[int, ModulePass] | None = None,
) -> None:
    """Run `pipeline`, such as ``builtin.module(bwd-partition{policy=min-cut},cse)``, on `module`, in place.

    Args:
        module: a verified module; of no use after a failure.
        pipeline: the passes, anchored on ``builtin.module``.
        print_after_all: print the module after each pass, to the process's standard error.
        timing: print how long each pass took, to the process's standard error.
        made: passes of the pipeline that were made already, by their places in it.
        replay: keep a copy of the module; if the pipeline fails, write it to a temporary file for the error's `replay`.

    Raises:
        PipelineError: a pass failed, does not exist or does not take its options; the text is not well formed.
    """
    try:
        root = parse_pipeline(pipeline)
    except PipelineSyntaxError as error:
        raise PipelineError([_usage_problem(error)]) from error
    trace = PipelineTrace()
    with module.context:
        try:
            marked = not (print_after_all or timing)
            manager = build_pass_manager(root, pipeline, trace, mark_native=marked, made=made or {})
        except PipelineSyntaxError as error:
            raise PipelineError([_usage_problem(error)]) from error
        if print_after_all:
            manager.enable_ir_printing()
        if timing:
            manager.enable_timing()
        start = _Start.of(module, pipeline) if replay else None
        try:
            with _collection_paused():
                manager.run(module.operation)
        except ir.MLIRError as error:
            command = start.write() if start else None
            failure = PipelineError(read_diagnostics(error), trace.current, command)
            trace.reraise_interrupt()
            raise failure from trace.error


@contextlib.contextmanager
def _collection_paused() -> Iterator[None]:
    """Passes make many small objects and hardly a cycle of them, and to look for cycles is to walk all that torch holds
    besides: a sixth of the time that partitioning 12,000 ops takes. Beside another thread, which may train meanwhile,
    the collector goes on."""
    if not gc.isenabled() or threading.current_thread() is not threading.main_thread():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _usage_problem(error: PipelineSyntaxError) -> Diagnostic:
    return Diagnostic("error", f"{error.message}\n{error.excerpt}", "<pipeline>", 1, error.column + 1)


@dataclass(frozen=True)
class _Start:
    """The module and pipeline that a run started from."""

    bytecode: bytes
    pipeline: str

    @classmethod
    def of(cls, module: ir.Module, pipeline: str) -> _Start:
        buffer = io.BytesIO()
        module.operation.write_bytecode(buffer)
        return cls(buffer.getvalue(), pipeline)

    def write(self) -> str | None:
        """Write the module to a temporary file; returns the command that replays, None where nothing can be written."""
        # Named after its contents, so that the same failure, over and over, leaves one file.
        name = f"retrograd-replay-{hashlib.sha256(self.bytecode).hexdigest()[:16]}.mlirbc"
        path = Path(tempfile.gettempdir()) / name
        try:
            path.write_bytes(self.bytecode)
        except OSError:
            return None
        return f"{OPT_COMMAND} {shlex.quote(str(path))} --pass-pipeline={shlex.quote(self.pipeline)}"
