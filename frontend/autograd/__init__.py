# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Capture of a whole autograd graph at the moment it runs, through PyTorch's compiled autograd."""
