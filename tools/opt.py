# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``retrograd-opt``: MLIR in, passes, MLIR out, as mlir-opt does it. Never imports torch, so that it starts at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrograd.dialects.context import dialect_names, make_context
from retrograd.pipelines.infra.opt_driver import OptOptions, OptResult, Source, UsageError, list_passes, process
from retrograd.pipelines.infra.pass_page import describe_passes

PROGRAM = "retrograd-opt"
STANDARD_STREAM = "-"


def main(argv: Sequence[str] | None = None, context: Any = None) -> int:
    """Run the tool, in a `context` that is its alone where there is one; returns 0, 1 if the input or the pipeline
    failed, 2 for options that make no sense."""
    arguments = build_parser().parse_args(argv)
    if arguments.list_passes:
        sys.stdout.write(describe_passes() if arguments.markdown else list_passes())
        return 0
    if arguments.show_dialects:
        print(f"Available Dialects: {', '.join(dialect_names(make_context()))}")
        return 0
    try:
        source = read_source(arguments.input)
        result = process(source, read_options(arguments), context)
        report(result)
        if result.ok and not arguments.verify_diagnostics:
            write_output(arguments.o, result.output)
    except UsageError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{PROGRAM}: error: {error.filename or arguments.input}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0 if result.ok else 1


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Run compiler passes on MLIR text or bytecode.")
    parser.add_argument("input", nargs="?", default=STANDARD_STREAM, help="file of MLIR, or - for standard input")
    parser.add_argument(
        "-o", default=STANDARD_STREAM, metavar="FILE", help="where the result goes, - for standard output"
    )
    pipeline = parser.add_mutually_exclusive_group()
    pipeline.add_argument(
        "--pass-pipeline", metavar="TEXT", help="passes, as in builtin.module(bwd-partition,func.func(cse))"
    )
    pipeline.add_argument(
        "-p", dest="passes", metavar="PASSES", help="short for --pass-pipeline='builtin.module(PASSES)'"
    )
    for flag, text in (
        ("--split-input-file", "work on each part between lines '// -----' alone"),
        ("--verify-diagnostics", "compare diagnostics with the expected-error comments; writes no MLIR"),
        ("--mlir-print-ir-after-all", "print the module after each pass, to standard error"),
        ("--mlir-timing", "print how long each pass took, to standard error"),
        ("--mlir-print-op-generic", "write ops in generic form"),
        ("--mlir-print-debuginfo", "write locations"),
        ("--emit-bytecode", "write bytecode, not text"),
        ("--allow-unregistered-dialect", "accept ops of dialects that are not known"),
        ("--show-dialects", "print the known dialects and stop"),
        ("--list-passes", "print the passes of this project with their options and stop"),
        ("--markdown", "with --list-passes: as docs/passes.md, with the order, place and reason of each"),
    ):
        parser.add_argument(flag, action="store_true", help=text)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions and stop")
    return parser


class _Version(argparse.Action):
    """Prints versions. To look them up, files of all packages are read: not at every start."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib import metadata

        print(f"{PROGRAM} {metadata.version('retrograd')}, torch-mlir {metadata.version('torch-mlir')}")
        parser.exit()


def read_options(arguments: argparse.Namespace) -> OptOptions:
    """The options as the driver takes them."""
    pipeline = arguments.pass_pipeline if arguments.passes is None else f"builtin.module({arguments.passes})"
    return OptOptions(
        pipeline=pipeline,
        split_input_file=arguments.split_input_file,
        verify_diagnostics=arguments.verify_diagnostics,
        print_ir_after_all=arguments.mlir_print_ir_after_all,
        timing=arguments.mlir_timing,
        print_op_generic=arguments.mlir_print_op_generic,
        print_debuginfo=arguments.mlir_print_debuginfo,
        emit_bytecode=arguments.emit_bytecode,
        allow_unregistered_dialect=arguments.allow_unregistered_dialect,
    )


def read_source(name: str) -> Source:
    """The input: a file's contents, or standard input's for ``-``.

    Raises:
        OSError: the file cannot be read.
    """
    if name == STANDARD_STREAM:
        return Source("<stdin>", sys.stdin.buffer.read())
    return Source(name, Path(name).read_bytes(), name)


def write_output(name: str, data: bytes) -> None:
    """Write to a file, or to standard output for ``-``.

    Raises:
        OSError: the file cannot be written.
    """
    if name == STANDARD_STREAM:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    else:
        Path(name).write_bytes(data)


def report(result: OptResult) -> None:
    """Print the diagnostics to standard error."""
    for diagnostic in result.diagnostics:
        print(diagnostic, file=sys.stderr)
    sys.stderr.write(result.traceback)


if __name__ == "__main__":
    sys.exit(main())
