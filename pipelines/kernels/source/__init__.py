# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kernels themselves, in Triton: imported by the program that compiles them to PTX, and by nothing else."""
