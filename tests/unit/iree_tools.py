# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tools of IREE's runtime package, by the package: it need not lie beside the Python that runs the tests."""

import sys

RUN_MODULE = (sys.executable, "-m", "iree._runtime.scripts.iree_run_module")
DUMP_MODULE = (sys.executable, "-m", "iree._runtime.scripts.iree_dump_module")
