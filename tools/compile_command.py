# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``retrograd compile``: from a function that makes a model to a file that ``retrograd.load`` and IREE take."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from retrograd.contract.partitions import BUDGET
from retrograd.pipelines.analysis.partition.memory_size import parse_budget
from retrograd.pipelines.devices.targets import find_target
from retrograd.tools.console import CommandError, UsageError, print_rich, show_progress
from retrograd.tools.factory import Factory, make_example


def execute(arguments: argparse.Namespace) -> int:
    """Compile, verify if asked to, write the files and print what was compiled."""
    # All that can be found out at once comes before torch is loaded.
    factory = Factory.parse(arguments.factory)
    find_target(arguments.target)
    check_budget(arguments.partition, arguments.memory_budget)
    emitted = read_emitted(arguments.emit_mlir)
    for file in (arguments.o, *emitted.values()):
        check_writable(file)
    with show_progress() as announce:
        announce("loading torch")
        from retrograd.api import compile_backward

        example = make_example(factory)
        compiled = compile_backward(
            example.model,
            example.args,
            example.kwargs,
            target=arguments.target,
            partition=arguments.partition,
            memory_budget=arguments.memory_budget,
            tiles=arguments.tiles,
            verify=arguments.verify,
            cache=not arguments.no_cache,
            portable=True,
            progress=announce,
        )
        if arguments.verify:
            announce("compare with eager")
            # The first call is the one that is compared.
            compiled(*example.args, **example.kwargs)
        for stage, file in emitted.items():
            announce(f"write {file}")
            file.write_text(compiled.mlir(stage), encoding="utf-8")
        announce(f"write {arguments.o}")
        compiled.save(arguments.o)
    print_rich(compiled.explain().table())
    return 0


def check_budget(partition: str, budget: str | None) -> None:
    """Refuse a memory budget that makes no sense, and one that is missing.

    Raises:
        UsageError: says which.
    """
    if partition != BUDGET:
        if budget is not None:
            raise UsageError(f"--memory-budget is for --partition budget, found --partition {partition}")
        return
    try:
        parse_budget(budget)
    except ValueError as error:
        raise UsageError(f"--memory-budget: {error}") from error


def read_emitted(options: Sequence[str]) -> dict[str, Path]:
    """The file for each stage that ``--emit-mlir STAGE:FILE`` names.

    Raises:
        UsageError: no such stage, no file, or a stage given twice.
    """
    if not options:
        return {}
    from retrograd.pipelines.stages.staged import STAGE_NAMES

    emitted: dict[str, Path] = {}
    for option in options:
        stage, _, file = option.partition(":")
        if stage not in STAGE_NAMES or not file:
            raise UsageError(f"--emit-mlir takes STAGE:FILE, STAGE one of {', '.join(STAGE_NAMES)}; found '{option}'")
        if stage in emitted:
            raise UsageError(f"--emit-mlir is given twice for the stage '{stage}'")
        emitted[stage] = Path(file)
    return emitted


def check_writable(file: Path) -> None:
    """Find out before the work begins that its result would have no place.

    Raises:
        CommandError: ``file`` is a folder, or would be in one that is not there.
    """
    if file.is_dir():
        raise CommandError(f"{file}: is a folder; name a file in it")
    if not file.parent.is_dir():
        raise CommandError(f"{file}: there is no folder {file.parent}; make it first")
