# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``retrograd bisect``: the first op of a model that is compiled wrongly, or not at all, and a reproducer of it."""

from __future__ import annotations

import argparse

from retrograd.pipelines.devices.targets import find_target
from retrograd.tools.compile_command import check_budget, check_writable
from retrograd.tools.console import show_progress
from retrograd.tools.factory import Factory, make_example


def execute(arguments: argparse.Namespace) -> int:
    """Look for the fault, print it and write the reproducer; exit status 1 where there is one."""
    factory = Factory.parse(arguments.factory)
    target, partition = arguments.target, arguments.partition
    check_budget(partition, arguments.memory_budget)
    check_writable(arguments.o / "reproduce.sh" if arguments.o.is_dir() else arguments.o)
    with show_progress() as announce:
        announce("loading torch")
        from retrograd.api import bisect
        from retrograd.runtime.artifact import read_artifact

        if arguments.artifact is not None:
            manifest = read_artifact(arguments.artifact).manifest
            target, partition = manifest.targets[0], manifest.partition
        find_target(target)
        example = make_example(factory)
        announce("compare with eager")
        found = bisect(
            example.model,
            example.args,
            example.kwargs,
            target=target,
            partition=partition,
            memory_budget=arguments.memory_budget,
            fallback=arguments.fallback,
            artifact=arguments.artifact,
        )
    print(found)
    if found.reproducer is not None:
        print(f"  reproduce with {found.write(arguments.o)}")
    return int(bool(found))
