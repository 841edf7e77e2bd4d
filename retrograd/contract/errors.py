# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The base of all errors."""


class RetrogradError(Exception):
    """Says that something the user gave is wrong: a model, an argument, an option, a file or a machine.

    The message says what, and what to do about it; it needs no traceback. Each error is one of Python's own kinds too
    (``RuntimeError``, ``ValueError`` or ``TypeError``). Exceptions
    that stay inside of the compiler, where one part tells another to do without something, are not derived from it.
    """
