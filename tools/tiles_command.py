# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``retrograd tiles``: what was measured of kernels, for people, and as a file for machines without a device."""

from __future__ import annotations

import argparse

from retrograd.pipelines.kernels.tile_table import kept_table, read_table, write_table
from retrograd.tools.console import CommandError, print_table


def execute(arguments: argparse.Namespace) -> int:
    """Print what is kept, or write it to a file."""
    kept = kept_table()
    found = read_table(kept).values() if kept.exists() else []
    entries = [entry for entry in found if arguments.arch in (None, entry.architecture)]
    if not entries:
        which = f" for {arguments.arch}" if arguments.arch else ""
        raise CommandError(
            f"no tiles{which} are kept in {kept}; compile with tiles='measure' where there is a CUDA device"
        )
    if arguments.file is not None:
        write_table(arguments.file, entries)
        print(f"wrote tiles of {len(entries)} kernels to {arguments.file}")
        return 0
    rows = [
        [e.question, e.architecture, e.tiles, f"{e.microseconds:.1f}", f"{e.unasked / max(e.microseconds, 1e-3):.2f}"]
        for e in entries
    ]
    columns = ["kernel", "for", "tiles", "us", "times as fast"]
    print_table(columns, rows, f"Tiles by measurement, kept in {kept}", right=columns[3:])
    return 0
