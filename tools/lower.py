# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``retrograd-opt`` as each compilation runs it, to lower one module: it starts in half of the time.

The bindings look for a Python module of each dialect whose ops they meet, and look again for each op where there is
none, or none that can be imported. That of ``linalg`` brings a language for defining ops, and NumPy; that of ``torch``
has a class for each of 850 ops. The passes of the lowering take ops as they are: for them, modules with nothing in
them will do.
"""

import sys
from types import ModuleType

_DIALECTS = ("torch", "linalg", "util", "hal", "flow", "tm_tensor")

# A name that is bound to None cannot be imported. Nothing imports this module but the program that forks it.
sys.modules.setdefault("numpy", None)  # type: ignore[arg-type]
for _name in _DIALECTS:
    sys.modules.setdefault(f"torch_mlir.dialects.{_name}", ModuleType(f"torch_mlir.dialects.{_name}"))

from retrograd.tools.opt import main  # noqa: E402

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
