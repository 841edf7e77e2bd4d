# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Contexts that know the dialects that programs are in."""

import threading
from typing import Any

from retrograd.dialects import bwd, ir

# Loading a Python-defined dialect writes tables that all contexts of the process share.
_LOADING = threading.Lock()


def make_context(*, allow_unregistered_dialects: bool = False) -> Any:
    """A new ``ir.Context`` that knows the torch, torch_c and bwd dialects, and with it torch-mlir's passes."""
    context = ir.Context()
    ir.register_dialect(context)
    context.allow_unregistered_dialects = allow_unregistered_dialects
    with _LOADING, context:
        bwd.Bwd.load()
        # The bindings do not register torch_c, which casts torch's tensors to built-in ones; a pass that needs it does.
        ir.PassManager.parse("builtin.module(torch-func-backend-type-conversion)").run(
            ir.Module.parse("module {}").operation
        )
    return context


def dialect_names(context: Any) -> tuple[str, ...]:
    """Names of the dialects that ``context`` has, sorted."""
    # The bindings list none: ask for each that has a module of generated ops, and for those that have none.
    modules = (ir.FOLDER / "dialects").glob("_*_ops_gen.py")
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
