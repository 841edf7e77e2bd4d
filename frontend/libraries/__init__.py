# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Ops that libraries of PyTorch's compute: kept whole in the trace, run in torch between compiled functions."""
