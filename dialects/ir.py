# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The MLIR bindings, and the only file that imports them.

Every name of the bindings' ``ir`` module is a name here (``ir.Module``, ``ir.Operation``, ...); ``ext``, ``func`` and
``torch`` are dialects, ``rewrite`` and ``PassManager`` the pass machinery. torch itself is never imported.
"""

import re
import subprocess
import sys
import threading
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

__all__ = [
    "PassManager",
    "dialect_names",
    "ext",
    "func",
    "has_dialect",
    "make_context",
    "native_pass_names",
    "rewrite",
]

# Loaded on first use: together they take as long to import as all the rest, and torch's 850 ops as long again.
_LAZY_DIALECTS = frozenset({"arith", "linalg", "math", "scf", "tensor", "torch"})
# Dialects for which torch-mlir has no Python module. The bindings look for it whenever they meet one of their ops, and
# remember only what was found: searching for files took longer than most passes.
for _name in ("bwd", "flow", "hal", "iree_codegen", "iree_linalg_ext", "tm_tensor", "torch_c", "util"):
    sys.modules.setdefault(f"torch_mlir.dialects.{_name}", ModuleType(f"torch_mlir.dialects.{_name}"))
# Loading a Python-defined dialect writes tables that all contexts of the process share.
_LOADING = threading.Lock()


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


def make_context(*, allow_unregistered_dialects: bool = False) -> Any:
    """A new ``ir.Context`` that knows the torch, torch_c and bwd dialects, and with it torch-mlir's passes."""
    bwd = import_module("retrograd.dialects.bwd")  # bwd is built from this module's names
    context = _bindings.Context()
    register_dialect(context)
    context.allow_unregistered_dialects = allow_unregistered_dialects
    with _LOADING, context:
        bwd.Bwd.load()
        # The bindings do not register torch_c, which casts torch's tensors to built-in ones; a pass that needs it does.
        PassManager.parse("builtin.module(torch-func-backend-type-conversion)").run(
            _bindings.Module.parse("module {}").operation
        )
    return context


@cache
def native_pass_names() -> tuple[str, ...]:
    """Names of torch-mlir's passes and pipelines; empty where torch-mlir came without its tool.

    The bindings list none, so torch-mlir's own tool is asked: for suggestions in error messages, nothing depends on it.
    """
    tool = Path(_bindings.__file__).parent / "_mlir_libs" / "torch-mlir-opt"
    try:
        listing = subprocess.run([tool, "--help"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(re.findall(r"^ {6}--([a-z][\w-]*?)-? ", listing, flags=re.MULTILINE))


def dialect_names(context: Any) -> tuple[str, ...]:
    """Names of the dialects that ``context`` has, sorted."""
    # The bindings list none: ask for each that has a module of generated ops, and for those that have none.
    modules = (Path(_bindings.__file__).parent / "dialects").glob("_*_ops_gen.py")
    known = {module.name.removeprefix("_").removesuffix("_ops_gen.py") for module in modules}
    return tuple(
        sorted(
            name for name in known | {"bwd", "chlo", "stablehlo", "tm_tensor", "torch_c"} if has_dialect(context, name)
        )
    )


def has_dialect(context: Any, name: str) -> bool:
    """Whether ``context`` has a dialect of that name, registered or loaded."""
    try:
        context.get_dialect_descriptor(name)
    except ValueError:
        return False
    return True
