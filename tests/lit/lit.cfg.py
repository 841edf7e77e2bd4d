# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tests of passes and tools on MLIR text. Run: .venv/bin/lit -v tests/lit

All tools run under the interpreter that runs lit, so that the tests need no path and see the same packages.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lit.formats

config: Any
lit_config: Any

PYTHON = f"{shlex.quote(sys.executable)} -I -S"
# pip's lit brings no `not`: succeed where the command ends with an error, and fail where a signal ended it.
NOT = (
    "import os, sys; child = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ); "
    "sys.exit(not 0 < os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) < 128)"
)
WARM_TOOLS = Path(__file__).with_name("warm_tools.py")


def start_tools() -> str:
    """Start what the tools are forked from; returns the command in front of a tool's name. It ends with lit."""
    path = Path(tempfile.mkdtemp(prefix="retrograd-lit-")) / "tools"
    # The server ends where its standard input does: the other end is closed with lit and its workers.
    stdin, _ = os.pipe()
    command = [sys.executable, str(WARM_TOOLS), "serve", str(path)]
    server = subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE)
    if server.stdout is None or not server.stdout.readline():
        lit_config.fatal(f"the tools of the tests do not start: {shlex.join(command)}")
    os.close(stdin)
    return f"{PYTHON} {shlex.quote(str(WARM_TOOLS))} {path}"


config.name = "retrograd"
# lit's own shell knows the quoting and pipes that the tests use and needs no bash.
config.test_format = lit.formats.ShTest(execute_external=False)
config.suffixes = [".mlir"]
config.test_source_root = str(Path(__file__).parent)
# No test leaves files beside the sources.
config.test_exec_root = str(Path(__file__).parents[2] / "build" / "lit")
Path(config.test_exec_root).mkdir(parents=True, exist_ok=True)
TOOL = start_tools()
config.substitutions += [
    ("%repeat", f"{PYTHON} {shlex.quote(str(Path(__file__).with_name('repeat.py')))}"),
    (r"(?<![\w.-])retrograd-opt(?![\w.-])", f"{TOOL} retrograd-opt"),
    # With IREE's bindings in place of torch-mlir's: no fork of the process that has these imported.
    (r"(?<![\w./-])iree_compile(?![\w.-])", f"{shlex.quote(sys.executable)} -m retrograd.tools.iree_compile"),
    (r"(?<![\w./-])(FileCheck|filecheck)(?![\w.-])", f"{TOOL} filecheck"),
    (r"(?<![\w./-])not (?=\S)", f"{PYTHON} -c {shlex.quote(NOT)} "),
]
