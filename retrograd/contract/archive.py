# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The place of our own files in a compiled program, which is a zip archive."""

OWN = "retrograd/"
"""The folder of it; IREE does not look at it."""

EPOCH = (1980, 1, 1, 0, 0, 0)
"""When its members were written, by what they say: the same bytes for the same program."""
