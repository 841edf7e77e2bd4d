# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``iree-compile`` with our own passes in its stream phase, where memory is laid out.

``python -m retrograd.tools.iree_compile SOURCE -o FILE FLAGS...`` takes the flags of ``iree-compile`` and gives what it
gives. ``python -m retrograd.tools.iree_compile --passes=PASSES FILE`` runs our passes alone on text of IREE's dialects,
and prints the result.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

# The bindings look for a Python module of each dialect whose ops they meet, and look again for each op where there is
# none. Our passes take ops of these as they are: modules with nothing in them will do. That of `linalg` brings a
# language for defining ops, and YAML: a seventh of the time of a small module. Nothing imports this one but the program
# that forks it.
_DIALECTS = ("complex", "flow", "func", "iree_encoding", "iree_linalg_ext", "iree_tensor_ext", "linalg", "math", "scf")
for _name in (*_DIALECTS, "tensor", "tm_tensor", "ub", "vector"):
    sys.modules.setdefault(f"iree.compiler.dialects.{_name}", ModuleType(f"iree.compiler.dialects.{_name}"))

from iree.compiler import ir  # noqa: E402

from retrograd.pipelines.stream.compiler import PHASES, CompilationFailed, Dumps, Part, compile_file, run_passes  # noqa: E402
from retrograd.pipelines.stream.passes import PASSES, PassFailure  # noqa: E402
from retrograd.pipelines.stream.side_by_side import compile_parts  # noqa: E402
from retrograd.pipelines.toolchain.module_parts import read_parts  # noqa: E402

PROGRAM = "iree_compile"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns 0, 1 if something failed, which standard error then says, or 2 for options that make no
    sense."""
    parser = build_parser()
    arguments, flags = parser.parse_known_args(argv)
    if arguments.passes is None and arguments.o is None:
        parser.error("-o says where the result goes")
    if arguments.passes is not None and (flags or arguments.o is not None):
        parser.error(f"--passes takes no {flags[0] if flags else '-o'}: the result is printed")
    if arguments.passes is not None:
        return _tell_failure(lambda: print(run_passes(arguments.source, arguments.passes.split(","))))
    dumps = Dumps(arguments.dump_allocation, arguments.dump_layout, arguments.dump_compilation_phases_to)
    verified = arguments.verify == "true"

    def compile_part(output: Path, dumps: Dumps, part: Part | None = None) -> int:
        last = arguments.compile_to
        return _tell_failure(
            lambda: compile_file(arguments.source, output, flags, last=last, dumps=dumps, verified=verified, part=part)
        )

    if arguments.parts is not None:
        return compile_parts(read_parts(arguments.parts), arguments.o, dumps, compile_part)
    return compile_part(arguments.o, dumps)


def _tell_failure(work: Callable[[], None]) -> int:
    """Do the work; returns 1 if it failed, which standard error then says."""
    try:
        work()
    except PassFailure as failure:
        print(failure, file=sys.stderr)
        return 1
    except (OSError, ValueError, ir.MLIRError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 1
    except CompilationFailed:
        return 1
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The command line, less the flags of iree-compile."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="iree-compile with our passes where memory is laid out.", allow_abbrev=False
    )
    parser.add_argument("source", type=Path, help="file of MLIR")
    parser.add_argument("-o", metavar="FILE", type=Path, help="where the result goes")
    parser.add_argument("--passes", help=f"passes to run on the file alone, separated by commas: {', '.join(PASSES)}")
    parser.add_argument("--compile-to", choices=PHASES, default="end", help="the last phase")
    parser.add_argument("--verify", choices=("true", "false"), default="true", help="check the IR after each pass")
    parser.add_argument("--parts", help="functions that are compiled side by side, each to a file: a,b;c,d")
    parser.add_argument("--dump-allocation", metavar="FILE", type=Path, help="write the IR before buffers are packed")
    parser.add_argument("--dump-layout", metavar="FILE", type=Path, help="write the IR after the stream phase")
    parser.add_argument("--dump-compilation-phases-to", metavar="FOLDER", type=Path, help="as for iree-compile")
    return parser


if __name__ == "__main__":
    sys.exit(main())
