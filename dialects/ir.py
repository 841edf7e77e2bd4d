# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The MLIR bindings, and the only file that imports them.

Every name of the bindings' ``ir`` module is a name here (``ir.Module``, ``ir.Operation``, ...); ``ext``, ``func`` and
``torch`` are dialects, ``rewrite`` and ``PassManager`` the pass machinery. torch itself is never imported.
"""

import re
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from torch_mlir import ir as _bindings
from torch_mlir import rewrite
from torch_mlir._mlir_libs._torchMlir import register_dialect
from torch_mlir.dialects import ext, func
from torch_mlir.passmanager import PassManager

__all__ = ["FOLDER", "PassManager", "ext", "func", "native_pass_names", "register_dialect", "rewrite"]

FOLDER = Path(_bindings.__file__).parent
"""Where torch-mlir has its bindings, and what comes with them."""

# Loaded on first use: together they take as long to import as all the rest, and torch's 850 ops as long again.
_LAZY_DIALECTS = frozenset({"arith", "linalg", "math", "scf", "tensor", "torch"})
# Dialects for which torch-mlir has no Python module. The bindings look for it whenever they meet one of their ops, and
# remember only what was found: searching for files took longer than most passes.
for _name in ("bwd", "flow", "hal", "iree_codegen", "iree_linalg_ext", "tm_tensor", "torch_c", "util"):
    sys.modules.setdefault(f"torch_mlir.dialects.{_name}", ModuleType(f"torch_mlir.dialects.{_name}"))


def __getattr__(name: str) -> Any:
    """Look up a lazily loaded dialect, or a name of the bindings' ``ir`` module (PEP 562).

    Raises:
        AttributeError: the bindings have no such name.
    """
    if name in _LAZY_DIALECTS:
        value: Any = import_module(f"torch_mlir.dialects.{name}")
    else:
        value = getattr(_bindings, name)
    globals()[name] = value
    return value


@cache
def native_pass_names() -> tuple[str, ...]:
    """Names of torch-mlir's passes and pipelines; empty where torch-mlir came without its tool. The bindings list none,
    so torch-mlir's own tool is asked: for suggestions in error messages, nothing depends on it."""
    tool = FOLDER / "_mlir_libs" / "torch-mlir-opt"
    try:
        listing = subprocess.run([tool, "--help"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(re.findall(r"^ {6}--([a-z][\w-]*?)-? ", listing, flags=re.MULTILINE))
