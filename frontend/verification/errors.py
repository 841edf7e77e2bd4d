# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Errors that a comparison with eager raises."""

from __future__ import annotations

from retrograd.contract.errors import RetrogradError


class VerificationError(RetrogradError, RuntimeError):
    """A compiled output, buffer or gradient differs from eager's by more than rounding; the message names it."""
