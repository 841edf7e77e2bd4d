# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The error of a call, and what to say of others."""

from retrograd.contract.errors import RetrogradError


class ExecutionError(RetrogradError, RuntimeError):
    """A function that is not there, tensors that it does not take, or a failure while it ran."""


def first_line(error: Exception) -> str:
    """The first line of what IREE says; the rest is where in its sources."""
    return str(error).partition("\n")[0]
