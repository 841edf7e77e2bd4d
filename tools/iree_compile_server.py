# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``python -m retrograd.tools.iree_compile_server SOCKET PARENT``: IREE's compiler with our own passes, forked for each
module from a process that has it loaded. A search for what fits a memory budget compiles tens of times.

It ends as :mod:`retrograd.tools.lowering_server` does.
"""

from retrograd.pipelines.toolchain.fork_server import serve
from retrograd.tools.iree_compile import main as compile_module


def main() -> None:
    """Run the program; returns when its work is over."""
    serve(compile_module)


if __name__ == "__main__":
    main()
