# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Eager with every op rounded another way: the same as what a program's first call is judged by."""

from retrograd.frontend.verification.other_roundings import Rounded, is_float, move

__all__ = ["Rounded", "is_float", "move"]
