# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The op that torch-mlir makes of ``index_put`` and its like: its name, its operands by number, and an attribute."""

SCATTER = "tm_tensor.scatter"
UPDATES, PLACES, TENSOR = 0, 1, 2
# Whether no two updates are of one place.
UNIQUE = "unique_indices"
