# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Changes of the ``autograd.Function`` that AOTAutograd builds around a compiled forward and backward."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

# First: the two import each other, and this one begins well.
import torch._dynamo  # noqa: F401
from torch._functorch._aot_autograd import runtime_wrappers

# Releases of PyTorch before 2.13 have none: what AOTAutograd builds stays as it is there.
_FACTORY: Any = getattr(runtime_wrappers, "_AOTDispatchAutogradFunctionFactory", None)
CAN_CHANGE = _FACTORY is not None
"""Whether this PyTorch has what :class:`FunctionChange` changes."""


class FunctionChange:
    """Changes each function that AOTAutograd builds in this thread while :meth:`open` is open; others are left alone.
    Several may be open at once: the one opened last changes what the others have changed."""

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Change the functions that are built in the block."""
        if _FACTORY is None:
            yield
            return
        build, thread = _FACTORY.build, threading.get_ident()

        def build_changed(factory: Any) -> Any:
            function = build(factory)
            return self._change(function) if threading.get_ident() == thread else function

        with mock.patch.object(_FACTORY, "build", build_changed):
            yield

    def _change(self, function: Any) -> Any:
        """``function``, a class derived from ``autograd.Function``, with other methods."""
        raise NotImplementedError(f"{type(self).__name__} changes nothing")
