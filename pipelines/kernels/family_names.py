# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The names of the families of kernels: who only chooses among them imports none."""

NAMES = ("attention", "columns", "convolutions", "products", "rows", "scatters", "transposes")
