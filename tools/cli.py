# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``retrograd``: compile and explain artifacts, look at the installation and the cache. Each subcommand is a module of
its own, imported when it is asked for: ``retrograd --help`` loads no package."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from retrograd.contract.errors import RetrogradError
from retrograd.contract.partitions import MIN_CUT, PARTITIONS
from retrograd.tools.console import PROGRAM, UsageError
from retrograd.tools.interrupts import remember_interrupts

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 and the number of SIGINT, as shells have it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns 0, 1 if it failed, 2 for a command line that makes no sense, 130 after Ctrl-C."""
    try:
        remember_interrupts()
        arguments = build_parser().parse_args(argv)
        status: int = importlib.import_module(arguments.module).execute(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # Whoever read the output has seen enough; Python must not complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except UsageError as error:
        return fail(str(error), 2)
    except RetrogradError as error:
        return fail(str(error))
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == PROGRAM:
            raise
        return fail(f"the package of {error.name} is not installed; `{PROGRAM} doctor` says what is missing")


def fail(message: str, status: int = 1) -> int:
    """Print an error on standard error; returns the exit status."""
    print(f"{PROGRAM}: error: {message}", file=sys.stderr)
    return status


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="A compiler for PyTorch backward passes.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {metadata.version('retrograd')}")
    commands = parser.add_subparsers(metavar="command", required=True)
    add_compile(commands)
    add_bisect(commands)
    explain = add_command(commands, "explain", "say what a compiled file holds")
    explain.add_argument("file", type=Path, help="file that `retrograd compile` or CompiledBackward.save wrote")
    explain.add_argument("--json", action="store_true", help="print JSON")
    explain.add_argument(
        "--timeline",
        action="extend",
        nargs="+",
        type=Path,
        default=[],
        metavar="OUT",
        help="draw what is in memory while a step runs, kernel by kernel: .png, .svg, or .json, which Perfetto opens",
    )
    explain.add_argument(
        "--before", type=Path, metavar="FILE", help="with --timeline: another compiled file, to be put beside this one"
    )
    doctor = add_command(commands, "doctor", "look at the installation, and say how to mend it")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    cache = add_command(commands, "cache", "look at the cache of executables, or empty it")
    cache.add_argument("action", nargs="?", choices=("info", "clear"), default="info", help="info unless given")
    add_tiles(commands)
    return parser


def add_tiles(commands: Any) -> None:
    """Add ``retrograd tiles``."""
    parser = add_command(commands, "tiles", "list the tiles of kernels that were measured, or write them to a file")
    parser.add_argument(
        "file", type=Path, nargs="?", help="file to write, which `retrograd compile --tiles FILE` takes anywhere"
    )
    parser.add_argument("--arch", metavar="SM", help="those of one architecture alone, such as sm_90")


def add_command(commands: Any, name: str, text: str, **options: Any) -> argparse.ArgumentParser:
    """Add the subcommand that ``retrograd.tools.<name>_command`` carries out."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False, **options
    )
    parser.set_defaults(module=f"retrograd.tools.{name}_command")
    return parser


def add_compile(commands: Any) -> None:
    """Add ``retrograd compile``."""
    parser = add_command(commands, "compile", "compile the forward and backward of a model into one file")
    add_model_options(parser)
    parser.add_argument("-o", type=Path, required=True, metavar="FILE", help="the file to write, such as model.vmfb")
    parser.add_argument("--verify", action="store_true", help="run a step and compare it with eager's before writing")
    parser.add_argument(
        "--tiles",
        default="auto",
        metavar="measure|FILE",
        help="tiles of our kernels for CUDA: measured on a device here, or from a file that `retrograd tiles` wrote",
    )
    parser.add_argument("--no-cache", action="store_true", help="compile even what the cache has, and keep nothing")
    parser.add_argument(
        "--emit-mlir",
        action="extend",
        nargs="+",
        default=[],
        metavar="STAGE:FILE",
        help="write the IR at imported, partitioned, scheduled or linalg, too",
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which model to compile, and how."""
    parser.add_argument(
        "factory",
        help="package.module:factory or path/to/file.py:factory, which returns (model, args) or (model, args, kwargs)",
    )
    parser.add_argument(
        "--target",
        default="cpu",
        help="devices to compile for: cpu, cpu:x86-64-v3, cuda:sm_90, vulkan, hip:gfx942, or several with commas (cpu)",
    )
    parser.add_argument(
        "--partition",
        choices=PARTITIONS,
        default=MIN_CUT,
        help="save between forward and backward the fewest bytes (min-cut), what eager saves, or what a budget allows",
    )
    parser.add_argument(
        "--memory-budget",
        metavar="SIZE",
        help="for --partition budget: most bytes alive at once, as 64MiB, a share of what eager takes, as 0.5, or free",
    )


def add_bisect(commands: Any) -> None:
    """Add ``retrograd bisect``."""
    parser = add_command(commands, "bisect", "find the first op that is compiled wrongly, or not at all")
    add_model_options(parser)
    parser.add_argument(
        "-o",
        type=Path,
        default=Path("reproducer"),
        metavar="FOLDER",
        help="where to write the reproducer: MLIR, tensors and a script that shows the fault (reproducer)",
    )
    parser.add_argument(
        "--artifact",
        type=Path,
        metavar="FILE",
        help="test the code in this file, which was compiled from the model, with its target and partition",
    )
    parser.add_argument(
        "--fallback",
        choices=("island", "error"),
        default="island",
        help="an op that does not compile runs in torch, and is no fault (island), or is what is looked for (error)",
    )


if __name__ == "__main__":
    sys.exit(main())
