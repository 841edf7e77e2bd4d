# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which ops of a module a compilation fails for: what is to run outside of compiled code.

Each op is made a function by itself, and all of them are compiled as one module. What an error is located in has
failed; where an error is nowhere, or the compiler crashed, the functions are halved (group testing; Dorfman, "The
Detection of Defective Members of Large Populations", 1943). Ops that only fail together are found by the search of
``analysis/stages/slices.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from retrograd.contract.attributes import BWD_SIZES
from retrograd.pipelines.devices.targets import Target
from retrograd.pipelines.infra.errors import CompileError
from retrograd.pipelines.stages.slicing import ModuleSlice, Slicer
from retrograd.pipelines.stages.staged import StagedModule
from retrograd.pipelines.toolchain.executable import compile_executable, compile_to_phase
from retrograd.pipelines.toolchain.lowering import forget_replay, lower_to_linalg
from retrograd.pipelines.toolchain.subprocesses import ToolLimits

# Seconds for a few ops: what takes longer by itself would take as long in the whole.
_SECONDS = 120.0
# It takes a tenth of the time of all that comes after it, and finds what is wrong with an op itself.
_EARLY_PHASE = "global-optimization"
_PART = re.compile(r"func\.func (?:private |public )?@part_(\d+)")
_RESOURCES = "\n{-#"
_LOCATED = re.compile(r":(\d+):\d+: error:")
# Names of values differ between ops that are the same; those of sizes are in shapes, and stay.
_NAMES = re.compile(r'bwd\.(?:value|label|name) = "[^"]*"(?!, bwd\.role = "size")|bwd\.values = \[[^\]]*\]')


@dataclass(frozen=True)
class FailedOp:
    """An op that does not compile: its name, the values that it gives, and the error in a line."""

    op: str
    values: tuple[str, ...]
    message: str


@dataclass(frozen=True)
class Part:
    """An op by itself: a function's text without names, and the values that it gives wherever it is."""

    op: str
    text: str
    values: tuple[str, ...]


def find_failed_ops(staged: StagedModule, target: Target, error: CompileError) -> list[FailedOp]:
    """The ops for which the compilation of ``staged`` ended in ``error``; none where that cannot be told. Each trial is
    a child process; there are about as many as failing ops where the compiler locates its errors."""
    limits = ToolLimits.from_environment()
    limits = replace(limits, seconds=min(limits.seconds, _SECONDS))
    # The plainest flags are those with which all else failed too.
    plain = replace(target, ladder=target.ladder[-1:])
    is_early = error.phase != "lower" and _fails_early(staged, plain, limits)

    def attempt(text: str) -> str:
        """Compile as far as the phase that failed; returns the text that the errors of this phase are located in."""
        try:
            return compile_trial(text)
        except CompileError as failure:
            forget_replay(failure)
            raise

    def compile_trial(text: str) -> str:
        if error.phase == "lower":
            lower_to_linalg(text.encode(), target, twins_alone=True, limits=limits)
            return text
        linalg = lower_to_linalg(text.encode(), target, twins_alone=True, locations=False, limits=limits)
        try:
            if is_early:
                compile_to_phase(linalg, plain, _EARLY_PHASE, limits=limits)
            else:
                compile_executable(linalg, plain, limits=limits)
        except CompileError as failure:
            raise _Located(failure, linalg) from failure
        return linalg

    slicers = [Slicer(staged.source, function.name, None) for function in staged.stages]
    parts = _find_parts(slicers)
    resources, sizes = find_resources(staged.source), slicers[0].sizes if slicers else ""
    isolated = isolate(parts, lambda text: attempt(f"{_with_sizes(text, sizes)}\n{resources}"))
    failed = [FailedOp(p.op, p.values, message) for p, message in isolated]
    return failed or _search(slicers, attempt)


def _fails_early(staged: StagedModule, target: Target, limits: ToolLimits) -> bool:
    """Whether iree-compile refuses the module before it makes kernels: then no trial has to make any."""
    if target.is_in_order:
        return False
    linalg = lower_to_linalg(staged.source.encode(), target, twins_alone=True, locations=False, limits=limits)
    try:
        compile_to_phase(linalg, target, _EARLY_PHASE, limits=limits)
    except CompileError as failure:
        forget_replay(failure)
        return True
    return False


class _Located(CompileError):
    """A failure, and the text that its lines are of."""

    def __init__(self, failure: CompileError, text: str) -> None:
        super().__init__(failure.phase, failure.message, failure.log, failure.replay)
        self.text = text


def _find_parts(slicers: Sequence[Slicer]) -> list[Part]:
    """Each op by itself; those that are the same but for names once."""
    found: dict[str, Part] = {}
    for slicer in slicers:
        for op, names, text in slicer.singles():
            plain = _NAMES.sub(lambda names: re.sub('"[^"]*"', '"_"', names[0]), text)
            known = found.get(plain)
            found[plain] = Part(op, plain, (*(known.values if known else ()), *names))
    return [*found.values()]


def find_resources(source: str) -> str:
    """The section of a module's text that has the numbers of its constants, to which functions refer by name."""
    return source[start:] if (start := source.rfind(_RESOURCES)) >= 0 else ""


def isolate(parts: Sequence[Part], attempt: Callable[[str], str]) -> Iterator[tuple[Part, str]]:
    """Those of ``parts`` that do not compile, with what was said."""
    while parts:
        text = _join(parts)
        try:
            attempt(text)
        except CompileError as failure:
            if len(parts) == 1:
                yield parts[0], say(failure, parts[0].op)
                return
            at = _find_part(failure, text)
            if at is None:
                yield from isolate(parts[: len(parts) // 2], attempt)
                parts = parts[len(parts) // 2 :]
                continue
            yield parts[at], say(failure, parts[at].op)
            parts = [*parts[:at], *parts[at + 1 :]]
        else:
            return


def _search(slicers: Sequence[Slicer], attempt: Callable[[str], str]) -> list[FailedOp]:
    """Find the last of ops that fail together."""
    messages: dict[str, str] = {}

    def is_faulty(piece: ModuleSlice) -> bool:
        if piece.text not in messages:
            try:
                attempt(piece.text)
                messages[piece.text] = ""
            except CompileError as failure:
                messages[piece.text] = say(failure, "an op")
        return bool(messages[piece.text])

    for slicer in slicers:
        found = slicer.find(is_faulty)
        if found is not None:
            return [FailedOp(found.name, (found.value,), f"{messages[found.slice.text]} (with the ops before it)")]
    return []


def _join(parts: Sequence[Part]) -> str:
    """One module with a function ``@part_N`` for each."""
    return "\n".join(re.sub(r"func\.func @\w+", f"func.func @part_{i}", p.text, count=1) for i, p in enumerate(parts))


def _with_sizes(text: str, sizes: str) -> str:
    """Functions in a module that says which sizes it was traced with, in the lines that they were in."""
    return f"module attributes {{{BWD_SIZES} = {sizes}}} {{ {text}\n}}" if sizes else text


def _find_part(failure: CompileError, text: str) -> int | None:
    """The function that an error is located in."""
    located = _LOCATED.search(failure.message)
    if located is None:
        return None
    lines = (failure.text if isinstance(failure, _Located) else text).splitlines()
    for line in reversed(lines[: int(located[1])]):
        if (part := _PART.search(line)) is not None:
            return int(part[1])
    return None


def say(failure: CompileError, op: str) -> str:
    """Say in a line why ``op`` failed, without the place."""
    message = failure.message.splitlines()[0] if failure.message else "it gave no reason"
    if failure.phase == "lower" and "failed to legalize" in message:
        return f"torch-mlir does not lower {op.removeprefix('torch.')}"
    return f"{failure.phase}: {re.sub(r'^.*?: error: ', '', message)[:200]}"
