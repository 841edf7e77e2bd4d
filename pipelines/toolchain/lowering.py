# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From staged torch functions to linalg, in a process of its own: an abort there is an error here, not the end."""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
from hashlib import sha256
from pathlib import Path

from retrograd.pipelines.devices.targets import Target
from retrograd.pipelines.infra.errors import CompileError
from retrograd.pipelines.toolchain.lowering_steps import lowering_pipeline
from retrograd.pipelines.toolchain.subprocesses import ToolLimits, ToolResult
from retrograd.pipelines.toolchain.warm_tool import WarmTool

LOWER = WarmTool("retrograd.tools.lower", server="retrograd.tools.lowering_server")
"""``retrograd-opt``, as each compilation runs it."""


_KEPT = "retrograd-replay-"


def lower_to_linalg(
    staged: bytes,
    target: Target | None = None,
    *,
    locations: bool = True,
    twins_alone: bool = False,
    asking: bool = False,
    donating: bool = False,
    limits: ToolLimits | None = None,
) -> str:
    """Lower a staged module (text or bytecode, locations included) to linalg on tensors, as text.

    ``target``, ``twins_alone``, ``asking`` and ``donating`` are as for :func:`lowering_pipeline`. ``locations`` says
    whether the result has them too; ``limits`` are the tool's, else those of the environment.

    Raises:
        CompileError: an op has no lowering, or the lowering crashed; names the op, its source line and the replay
            command.
    """
    with tempfile.TemporaryDirectory(prefix="retrograd-lower-") as name:
        folder = Path(name)
        source, lowered = folder / "staged.mlir", folder / "linalg.mlir"
        source.write_bytes(staged)
        pipeline = lowering_pipeline(target, twins_alone=twins_alone, asking=asking, donating=donating)
        options = [f"--pass-pipeline={pipeline}", "--allow-unregistered-dialect"]
        options += ["--mlir-print-debuginfo"] * locations
        result = LOWER.run([str(source), "-o", str(lowered), *options], folder=folder, limits=limits)
        if result.returncode == 0:
            return lowered.read_text(encoding="utf-8")
        kept = keep_for_replay(source)
        replay = shlex.join(["retrograd-opt", str(kept), *options])
        raise tool_failure("lower", result, source, kept, replay)


def tool_failure(phase: str, result: ToolResult, source: Path, kept: Path, replay: str) -> CompileError:
    """The error for a tool that failed on ``source``; what it said of that file is said of the ``kept`` copy."""
    log = result.stderr.replace(str(source), str(kept))
    return CompileError(phase, first_error(ToolResult(result.returncode, log, result.exceeded)), log, replay)


def keep_for_replay(source: Path) -> Path:
    """Copy a tool's input to where the user can run the tool on it again; the same input goes to the same file."""
    digest = sha256(source.read_bytes()).hexdigest()[:16]
    kept = Path(tempfile.gettempdir()) / f"{_KEPT}{digest}{source.suffix}"
    shutil.copyfile(source, kept)
    return kept


def forget_replay(error: CompileError) -> None:
    """Delete the input that was kept for an error's replay: of a trial, which no user is to repeat."""
    for part in shlex.split(error.replay):
        if Path(part).name.startswith(_KEPT):
            Path(part).unlink(missing_ok=True)


def first_error(result: ToolResult) -> str:
    """The first error a tool reported, with its location; how it ended, where it reported none, crashed or came to a
    limit."""
    errors = re.findall(r"^(?:.*?:)? ?error: .*", result.stderr, flags=re.MULTILINE)
    if result.exceeded:
        return f"the tool was ended at {result.exceeded}; or find the op with retrograd bisect"
    if errors and not result.crashed:
        return str(errors[0].strip())
    ended = f"was ended by {result.crashed}" if result.crashed else f"gave exit status {result.returncode}"
    last = errors[:1] or result.stderr.strip().splitlines()[-1:] or ["no message"]
    return f"the tool {ended}: {last[0].strip()[:500]}"
