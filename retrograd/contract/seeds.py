# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Seeds of random ops: how many numbers one has, and which."""

WORDS = 2
LEAST, BEHIND_MOST = -(2**63), 2**63 - 1
"""Each number is drawn from the least on and below the other: so do the process that compiled and one that loaded a
file, which after the same ``torch.manual_seed`` have the same numbers."""
