# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A parsed pipeline to a pass manager, native passes and our own in one."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from retrograd.dialects import ir
from retrograd.pipelines.infra.passes import ModulePass, PassFailure, PassOptionError
from retrograd.pipelines.infra.pipeline_string import PipelineElement, PipelineSyntaxError, split_options
from retrograd.pipelines.infra.registry import PASSES, load_pass, registered_passes

MODULE = "builtin.module"
_NONE_MADE: Mapping[int, ModulePass] = {}


@dataclass
class PipelineTrace:
    """Notes of a running pipeline: the pass that it is at, and the exception that a Python pass ended in."""

    current: str | None = None
    error: BaseException | None = None

    def reraise_interrupt(self) -> None:
        """Raise what is no failure of a pass: KeyboardInterrupt, SystemExit."""
        if self.error is not None and not isinstance(self.error, Exception):
            raise self.error


def build_pass_manager(
    root: PipelineElement,
    text: str,
    trace: PipelineTrace,
    *,
    mark_native: bool = True,
    made: Mapping[int, ModulePass] = _NONE_MADE,
) -> ir.PassManager:
    """A pass manager for ``builtin.module`` in the current context.

    Args:
        root: the tree of `text`.
        text: the pipeline, for error messages.
        trace: filled in while the pass manager runs.
        made: passes that were made already, by their places: not made from their options.
        mark_native: run a step before each native pass that notes its name; it would show in printed IR and in timings.

    Raises:
        PipelineSyntaxError: a pass does not exist, does not take its options or cannot stand where it stands.
    """
    manager = ir.PassManager(MODULE)
    for place, element in enumerate(root.children or ()):
        if element.name in PASSES:
            pass_ = made.get(place) or _instantiate(element, text)
            manager.add(
                _make_runner(pass_, trace), name=element.name, argument=element.name, description=pass_.description
            )
            continue
        _refuse_nested(element, text)
        if mark_native:
            manager.add(_make_marker(str(element), trace), name="note-pass")
        try:
            manager.add(str(element))
        except ValueError as error:
            raise _locate_problem(element, MODULE, text, error) from error
    return manager


def _instantiate(element: PipelineElement, text: str) -> ModulePass:
    if element.children is not None:
        raise PipelineSyntaxError(f"pass '{element.name}' takes no passes of its own", text, element.column)
    try:
        return load_pass(element.name).from_options(split_options(element.options or ""))
    except (PassOptionError, ValueError) as error:
        raise PipelineSyntaxError(str(error), text, element.column) from error


def _make_runner(pass_: ModulePass, trace: PipelineTrace) -> Callable[[ir.Operation, Any], None]:
    def run(op: ir.Operation, handle: Any) -> None:
        trace.current = pass_.name
        try:
            pass_.apply(op)
        except PassFailure as failure:
            (failure.location or op.location).emit_error(_describe(pass_.name, failure))
            _fail(handle, trace, failure)
        # Nothing may pass through MLIR's frames, which are compiled without exceptions; it is raised after the run.
        except BaseException as error:  # noqa: BLE001
            op.location.emit_error(f"{pass_.name}: internal error, {type(error).__name__}: {error}; please report it")
            _fail(handle, trace, error)

    return run


def _fail(handle: Any, trace: PipelineTrace, error: BaseException) -> None:
    # The frames hold ops, and an op that is used after its module changed under it ends the process.
    traceback.clear_frames(error.__traceback__)
    trace.error = error
    handle.signal_pass_failure()


def _describe(pass_name: str, failure: PassFailure) -> str:
    message = failure.message.removeprefix(f"{pass_name}: ")
    place = "" if failure.op_name is None or failure.op_name == MODULE else f"'{failure.op_name}' op: "
    return f"{pass_name}: {place}{message}; {failure.remedy}"


def _make_marker(name: str, trace: PipelineTrace) -> Callable[[ir.Operation, Any], None]:
    def mark(op: ir.Operation, handle: Any) -> None:
        trace.current = name

    return mark


def _refuse_nested(element: PipelineElement, text: str) -> None:
    """Python passes run on the module alone: MLIR cannot nest them."""
    for child in element.children or ():
        if child.name in PASSES:
            raise PipelineSyntaxError(
                f"pass '{child.name}' runs on {MODULE} and cannot stand inside {element.name}(...); "
                f"put it directly into {MODULE}(...)",
                text,
                child.column,
            )
        _refuse_nested(child, text)


def _locate_problem(element: PipelineElement, anchor: str, text: str, error: ValueError) -> PipelineSyntaxError:
    """The error at the native pass that MLIR rejects, which is found by offering it one at a time."""
    for leaf, parent in _leaves(element, anchor):
        try:
            ir.PassManager(parent).add(str(leaf))
        except ValueError as problem:
            return PipelineSyntaxError(_explain(leaf, str(problem)), text, leaf.column)
    return PipelineSyntaxError(_one_line(str(error)), text, element.column)


def _leaves(element: PipelineElement, anchor: str) -> Iterator[tuple[PipelineElement, str]]:
    if element.children is None:
        yield element, anchor
    for child in element.children or ():
        yield from _leaves(child, element.name)


def _explain(leaf: PipelineElement, problem: str) -> str:
    if "does not refer to a registered pass" not in problem:
        return _one_line(problem)
    near = difflib.get_close_matches(leaf.name, [*registered_passes(), *ir.native_pass_names()])
    suggestion = (
        f"did you mean {' or '.join(near)}?" if near else "retrograd-opt --list-passes lists those of this project"
    )
    return f"there is no pass '{leaf.name}'; {suggestion}"


def _one_line(problem: str) -> str:
    return "; ".join(line.strip() for line in problem.splitlines() if line.strip())
