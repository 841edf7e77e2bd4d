# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The base of all errors, and what they suggest."""

from collections.abc import Iterable
from difflib import get_close_matches

# By difflib's own 0.6, "best" is like "budget".
_LEAST_LIKENESS = 0.62


class RetrogradError(Exception):
    """Says that something the user gave is wrong: a model, an argument, an option, a file or a machine.

    The message says what, and what to do about it; it needs no traceback. Each error is one of Python's own kinds too
    (``RuntimeError``, ``ValueError`` or ``TypeError``). Exceptions
    that stay inside of the compiler, where one part tells another to do without something, are not derived from it.
    """


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return ``; did you mean 'word'?`` for the known word that is most like what was given; empty if none is near."""
    return "".join(f"; did you mean '{word}'?" for word in get_close_matches(str(given), [*known], 1, _LEAST_LIKENESS))
