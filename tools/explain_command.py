# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``retrograd explain``: what a compiled file holds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from retrograd.contract.tensors import FunctionSpec, TensorSpec
from retrograd.runtime.artifact import read_artifact
from retrograd.runtime.reports.report import Report
from retrograd.tools.console import CommandError, UsageError, print_json, print_rich, print_table


def execute(arguments: argparse.Namespace) -> int:
    """Print the report, the signature of each function, and what made the file."""
    if arguments.before is not None and not arguments.timeline:
        raise UsageError("--before is for --timeline: say which pictures or traces to write")
    artifact = read_artifact(arguments.file)
    manifest = artifact.manifest
    if arguments.timeline:
        save_timelines(Report(manifest.report), arguments.timeline, arguments.before)
        return 0
    if arguments.json:
        # The signature maps Python's containers to tensors; it tells a reader nothing that the functions do not.
        fields = {key: value for key, value in manifest.to_dict().items() if key != "signature"}
        print_json({**fields, "sha256": artifact.digest})
        return 0
    print_rich(Report(manifest.report).table())
    for function in manifest.functions:
        print_function(function)
    rows = [*manifest.versions.items(), ("format", str(manifest.format_version)), ("sha256", artifact.digest)]
    print_table(("what", "value"), rows, "made by")
    return 0


def save_timelines(report: Report, paths: Sequence[Path], before: Path | None) -> None:
    """Write the timeline of memory to each of ``paths``, beside that of the file ``before``.

    Raises:
        CommandError: a file has none, or the ending of a path is that of no format.
    """
    other = Report(read_artifact(before).manifest.report) if before is not None else None
    for path in paths:
        try:
            report.save_timeline(path, before=other)
        except ValueError as error:
            raise CommandError(str(error)) from error


def print_function(function: FunctionSpec) -> None:
    """Print the arguments and results of a function, in calling order, as tables."""
    _print_tensors(f"arguments of {function.name}", function.arguments)
    _print_tensors(f"results of {function.name}", function.results)


def _print_tensors(title: str, tensors: Sequence[TensorSpec]) -> None:
    rows = [(str(i), t.name, t.role, str(list(t.shape)), t.dtype) for i, t in enumerate(tensors)]
    print_table(("", "name", "role", "shape", "dtype"), rows, title)
