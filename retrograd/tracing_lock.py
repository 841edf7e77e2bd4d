# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The lock of whoever traces."""

from __future__ import annotations

from retrograd.frontend.autograd.engine.family_lock import make_lock

# PyTorch's tracer keeps its state in globals: two threads that trace at once break it for the whole process.
COMPILING = make_lock()
