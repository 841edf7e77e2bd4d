# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Passes over IREE's stream dialect, with IREE's own bindings: never imported where those of torch-mlir are."""
