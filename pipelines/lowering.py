# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From staged torch functions to linalg, in a process of its own: an abort there is an error here, not the end."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

from retrograd.pipelines.device_targets import DATA_TILING
from retrograd.pipelines.errors import CompileError
from retrograd.pipelines.subprocesses import ToolLimits, ToolResult, run_tool
from retrograd.pipelines.targets import Target

# What all devices have in common; what code for one needs comes in the end.
_LOWERING = (
    "bwd-functionalize-rng,"
    "convert-torch-complex-to-pairs,"
    "convert-torch-view-to-tensor,"
    "func.func(torch-match-quantized-custom-ops),"
    "torchdynamo-export-to-torch-backend-pipeline{extra-library=},"
    "torch-backend-to-linalg-on-tensors-backend-pipeline,"
    "bwd-verify-legality{level=linalg},"
    "bwd-export-complex,"
    "bwd-isolate-constants,"
    "bwd-isolate-arguments,"
    "bwd-bound-indices,"
    "bwd-isolate-scatters,"
    "bwd-isolate-gathers,"
    "bwd-isolate-reductions,"
    "bwd-copy-updated,"
    "bwd-export-results"
)
# What code for a CPU and nothing else needs.
_MARKS = "bwd-mark-products"
_CPU_ALONE = f"bwd-order-scatters,{_MARKS},bwd-share-matrices,bwd-accumulate-products,bwd-expand-tanh"
# What takes less memory, where kernels run one at a time to that end.
_IN_ORDER = "bwd-repeat-elementwise,bwd-split-columns"
# What code on packed operands needs besides.
_PACKING = "bwd-isolate-products"


def lowering_pipeline(target: Target | None = None, *, twins_alone: bool = False) -> str:
    """The passes from staged functions to linalg for a target; without one, what all have in common.

    ``twins_alone`` leaves out the functions that give results: those that write them to storage have the same kernels.
    """
    common = _LOWERING + "{twins-alone=true}" * twins_alone + ",bwd-keep-roundings"
    if target is None:
        return f"builtin.module({common})"
    has_matrix_units = not {"cuda", "hip"}.isdisjoint(target.kinds)
    cpu_alone = target.kinds == ("cpu",)
    own = _CPU_ALONE if cpu_alone else "bwd-fold-widenings"
    own = own.replace(_MARKS, f"{_MARKS}{{avoid-tails=true}}") if target.has_avx512 else own
    own = f"{own},{_PACKING}" if cpu_alone and any(DATA_TILING in flags for flags in target.ladder) else own
    own = own if "cpu" in target.kinds else f"bwd-combine-scatters,{own}"
    own = _convert_to_kernels(target, "scatters") + own
    before = "bwd-negate-products," * ("cpu" in target.kinds)
    products = _convert_to_kernels(target, "rows") + _convert_to_kernels(target, "products")
    after = f",bwd-narrow-products,{products}bwd-pad-products" * has_matrix_units
    own = f"{_IN_ORDER},{own}" if target.is_in_order else own
    # In f64, and for a GPU beside the CPU too: they share the module.
    sines = ",bwd-expand-sines" * ("cpu" in target.kinds and target.has_f64)
    return f"builtin.module({common},{before}{own}{sines}{after})"


def _convert_to_kernels(target: Target, family: str) -> str:
    """The pass that has kernels of ours take what a family of them is for, and a comma; nothing without that family."""
    if family not in target.kernels:
        return ""
    return f"convert-linalg-to-kernels{{arch={target.name.partition(':')[2]} families={family}}},"


def lower_to_linalg(
    staged: bytes,
    target: Target | None = None,
    *,
    locations: bool = True,
    twins_alone: bool = False,
    limits: ToolLimits | None = None,
) -> str:
    """Lower a staged module (text or bytecode, locations included) to linalg on tensors, as text.

    ``target`` and ``twins_alone`` are as for :func:`lowering_pipeline`. ``locations`` says whether the result has them
    too; ``limits`` are the tool's, else those of the environment.

    Raises:
        CompileError: an op has no lowering, or the lowering crashed; names the op, its source line and the replay
            command.
    """
    with tempfile.TemporaryDirectory(prefix="retrograd-lower-") as name:
        folder = Path(name)
        source, lowered = folder / "staged.mlir", folder / "linalg.mlir"
        source.write_bytes(staged)
        pipeline = lowering_pipeline(target, twins_alone=twins_alone)
        options = [f"--pass-pipeline={pipeline}", "--allow-unregistered-dialect"]
        options += ["--mlir-print-debuginfo"] * locations
        result = run_tool(
            [sys.executable, "-m", "retrograd.tools.lower", source, "-o", lowered, *options],
            folder=folder,
            limits=limits,
        )
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
    kept = Path(tempfile.gettempdir()) / f"retrograd-replay-{digest}{source.suffix}"
    shutil.copyfile(source, kept)
    return kept


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
