# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tests of passes and tools on MLIR text. Run: .venv/bin/lit -v tests/lit

All tools run under the interpreter that runs lit, so that the tests need no path and see the same packages.
"""

import shlex
import sys
from pathlib import Path
from typing import Any

import lit.formats

config: Any
lit_config: Any

PYTHON = shlex.quote(sys.executable)
# pip's lit brings no `not`: succeed where the command ends with an error, and fail where a signal ended it.
NOT = "import subprocess, sys; sys.exit(not 0 < subprocess.run(sys.argv[1:]).returncode < 128)"

config.name = "retrograd"
# lit's own shell knows the quoting and pipes that the tests use and needs no bash.
config.test_format = lit.formats.ShTest(execute_external=False)
config.suffixes = [".mlir"]
config.test_source_root = str(Path(__file__).parent)
# No test leaves files beside the sources.
config.test_exec_root = str(Path(__file__).parents[2] / "build" / "lit")
Path(config.test_exec_root).mkdir(parents=True, exist_ok=True)
# filecheck has no module that `python -m` could run.
FILECHECK = "import sys; from filecheck.main import main; sys.exit(main())"
config.substitutions += [
    ("%repeat", f"{PYTHON} {shlex.quote(str(Path(__file__).with_name('repeat.py')))}"),
    (r"(?<![\w.-])retrograd-opt(?![\w.-])", f"{PYTHON} -m retrograd.tools.opt"),
    (r"(?<![\w./-])(FileCheck|filecheck)(?![\w.-])", f"{PYTHON} -c {shlex.quote(FILECHECK)}"),
    (r"(?<![\w./-])not (?=\S)", f"{PYTHON} -c {shlex.quote(NOT)} "),
]
