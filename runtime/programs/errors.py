# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The error of a call."""

from retrograd.contract.errors import RetrogradError


class ExecutionError(RetrogradError, RuntimeError):
    """A function that is not there, tensors that it does not take, or a failure while it ran."""
