# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Holds what the parts of the compiler agree on, as plain data: names, sizes, tensors, plans, formats, errors.

Every part may import this package, and it imports nothing but the standard library: no torch, no MLIR, no IREE. What
reads such data from MLIR, or writes it there, is with the parts that know MLIR.
"""
