# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Does the work of ``retrograd-opt``: reads MLIR, runs a pipeline, and writes MLIR or compares diagnostics."""

from __future__ import annotations

import io
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from retrograd.contract.errors import RetrogradError
from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.pipelines.infra.diagnostics import (
    Diagnostic,
    PipelineError,
    flatten_diagnostic,
    name_file,
    read_diagnostics,
)
from retrograd.pipelines.infra.expected_diagnostics import find_expected, find_mismatches
from retrograd.pipelines.infra.passes import PassFailure
from retrograd.pipelines.infra.registry import load_pass, registered_passes
from retrograd.pipelines.infra.runner import run_pipeline

BYTECODE_MAGIC = b"ML\xefR"
_SPLIT = re.compile(r"^// -----.*\n?", flags=re.MULTILINE)
_JOIN = "// -----\n"


@dataclass(frozen=True)
class Source:
    """Input to work on: `path` is where `data` was read from, None for standard input."""

    name: str
    data: bytes
    path: str | None = None

    @property
    def is_bytecode(self) -> bool:
        """Whether this is MLIR bytecode and no text."""
        return self.data.startswith(BYTECODE_MAGIC)


@dataclass(frozen=True)
class OptOptions:
    """The options of ``retrograd-opt``; the names are those of the command line."""

    pipeline: str | None = None
    split_input_file: bool = False
    verify_diagnostics: bool = False
    print_ir_after_all: bool = False
    timing: bool = False
    print_op_generic: bool = False
    print_debuginfo: bool = False
    emit_bytecode: bool = False
    allow_unregistered_dialect: bool = False


@dataclass(frozen=True)
class OptResult:
    """The result of a run; `output` is empty unless `ok`, and where diagnostics were compared."""

    ok: bool
    output: bytes = b""
    diagnostics: tuple[Diagnostic, ...] = ()
    traceback: str = ""


@dataclass
class _Chunk:
    """A part of the input, with the diagnostics that it causes."""

    text: str | bytes
    path: str | None = None
    diagnostics: list[Diagnostic] = field(default_factory=list)
    traceback: str = ""


class UsageError(RetrogradError, ValueError):
    """Options that do not go together, or input that is not MLIR."""


def process(source: Source, options: OptOptions, context: Any = None) -> OptResult:
    """Do what `options` say with `source`; a `context` that was made for this call alone saves making one.

    With ``verify_diagnostics`` the result is ok if the diagnostics are those that the text's comments announce.

    Raises:
        UsageError: the input is neither MLIR bytecode nor UTF-8 text; bytecode is to be split or to be compared, or
            several parts are to be written as bytecode.
    """
    chunks = split_source(source, options)
    contexts = [context, *[None] * (len(chunks) - 1)]
    outputs = [_process_chunk(chunk, source, options, own) for chunk, own in zip(chunks, contexts, strict=True)]
    found = tuple(diagnostic for chunk in chunks for diagnostic in chunk.diagnostics)
    tracebacks = "".join(chunk.traceback for chunk in chunks)
    if options.verify_diagnostics:
        mismatches = find_mismatches(find_expected(_decode(source)), found, source.name)
        return OptResult(not mismatches, diagnostics=tuple(mismatches), traceback=tracebacks)
    written = [output for output in outputs if output is not None]
    ok = len(written) == len(outputs)
    return OptResult(ok, _JOIN.encode().join(written) if ok else b"", found, tracebacks)


def split_source(source: Source, options: OptOptions) -> list[_Chunk]:
    """The parts of the input, each at its own line numbers.

    Raises:
        UsageError: as for `process`.
    """
    if source.is_bytecode and (options.split_input_file or options.verify_diagnostics):
        raise UsageError(f"{source.name}: bytecode holds no comments to split at or to compare with")
    if options.split_input_file and options.emit_bytecode:
        raise UsageError("--split-input-file and --emit-bytecode do not go together: one file holds one module")
    if source.is_bytecode:
        return [_Chunk(source.data, source.path)]
    text = _decode(source)
    if not options.split_input_file:
        return [_Chunk(text, source.path)]
    chunks: list[_Chunk] = []
    start = 0
    for separator in [*_SPLIT.finditer(text), None]:
        end = separator.start() if separator else len(text)
        chunks.append(_Chunk("\n" * text.count("\n", 0, start) + text[start:end]))
        start = separator.end() if separator else end
    return chunks


def _decode(source: Source) -> str:
    try:
        return source.data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{source.name}: neither MLIR bytecode nor UTF-8 text (byte {error.start})") from error


def _process_chunk(chunk: _Chunk, source: Source, options: OptOptions, context: Any) -> bytes | None:
    """The chunk's output, or None if it has errors."""
    context = context or make_context()
    context.allow_unregistered_dialects = options.allow_unregistered_dialect
    with context, _collect_diagnostics(context, chunk, source.name):
        try:
            # From the file itself where that can be: MLIR then puts its name into locations.
            module = ir.Module.parseFile(chunk.path) if chunk.path else ir.Module.parse(chunk.text)
            if options.pipeline is not None:
                run_pipeline(
                    module,
                    options.pipeline,
                    print_after_all=options.print_ir_after_all,
                    timing=options.timing,
                    replay=False,
                )
        except ir.MLIRError as error:
            chunk.diagnostics += read_diagnostics(error, file=source.name)
            return None
        except PipelineError as error:
            chunk.diagnostics += name_file(error.diagnostics, source.name)
            if error.__cause__ is not None and not isinstance(error.__cause__, PassFailure | ValueError):
                chunk.traceback = "".join(traceback.format_exception(error.__cause__))
            return None
        return _write(module, options)


@contextmanager
def _collect_diagnostics(context: Any, chunk: _Chunk, file: str) -> Iterator[None]:
    """Collect warnings and remarks in the chunk; errors come as exceptions."""

    def collect(diagnostic: Any) -> bool:
        chunk.diagnostics += name_file(flatten_diagnostic(diagnostic), file)
        return True

    handler = context.attach_diagnostic_handler(collect)
    try:
        yield
    finally:
        handler.detach()


def _write(module: ir.Module, options: OptOptions) -> bytes:
    if options.emit_bytecode:
        buffer = io.BytesIO()
        module.operation.write_bytecode(buffer)
        return buffer.getvalue()
    text: str = module.operation.get_asm(
        print_generic_op_form=options.print_op_generic, enable_debug_info=options.print_debuginfo
    )
    return (text.rstrip("\n") + "\n").encode()


def list_passes() -> str:
    """The passes of this project, their options under them, in aligned columns."""
    rows: list[tuple[str, str]] = []
    for name in registered_passes():
        pass_ = load_pass(name)
        rows.append((f"  {name}", pass_.description))
        rows += [(f"      {option}", _describe_option(option.help, option.default)) for option in pass_.options()]
    return "Passes of retrograd:\n" + format_rows(rows)


def format_rows(rows: Sequence[tuple[str, str]]) -> str:
    """Two columns of text, a row a line; the second starts where the longest of the first ends."""
    width = max((len(first) for first, _ in rows), default=0)
    return "".join(f"{first:<{width}}  {second}".rstrip() + "\n" for first, second in rows)


def _describe_option(text: str, default: str) -> str:
    return f"{text} (default: {default})" if text else f"(default: {default})"
