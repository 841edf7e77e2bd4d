# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Holds what the subcommands of ``retrograd`` share: their errors, and how they write to a terminal or a file."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from retrograd.contract.errors import RetrogradError
from retrograd.tools.interrupts import raise_if_interrupted

PROGRAM = "retrograd"

# Where nobody looks at a terminal no name in a table has to be folded.
_FILE_WIDTH = 240


class CommandError(RetrogradError, RuntimeError):
    """Says that what was asked for cannot be done; the message says why and what helps. Exit status 1."""


class UsageError(RetrogradError, ValueError):
    """A command line that makes no sense. Exit status 2."""


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str, right: Sequence[str] = ()) -> None:
    """Print a table to standard output; the columns named in ``right`` are flush right."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    print_rich(table)


def print_rich(renderable: Any) -> None:
    """Print something of rich's to standard output."""
    from rich.console import Console

    # Markup off: names like args[0] would be read as style tags.
    Console(width=None if sys.stdout.isatty() else _FILE_WIDTH, markup=False, highlight=False).print(renderable)


def print_json(data: Any) -> None:
    """Print ``data`` to standard output as indented JSON."""
    print(json.dumps(data, indent=2))


@contextlib.contextmanager
def show_progress() -> Iterator[Callable[[str], None]]:
    """Give a function that announces a phase on standard error: in place on a terminal, else one line for each. It
    raises :class:`KeyboardInterrupt` where Ctrl-C came in the phase before."""
    if not sys.stderr.isatty():
        yield lambda phase: _announce(lambda text: print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True), phase)
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda phase: _announce(status.update, phase)


def _announce(say: Callable[[str], None], phase: str) -> None:
    raise_if_interrupted()
    say(phase)
