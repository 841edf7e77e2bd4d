# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Settings of Dynamo's that hold while it captures for one backend, and stay as they are for others.

Dynamo has them for all backends together. (They belong to a thread.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from torch._dynamo import config, convert_frame
from torch._dynamo.variables import TensorVariable

Backend = TypeVar("Backend", bound=Callable[..., Any])

# Of the settings that hold for a backend's capture, whether gradients that a function takes are part of its graph, as
# it is set for all backends.
_takes_gradients: ContextVar[bool] = ContextVar("_takes_gradients")


def captured_with(**settings: Any) -> Callable[[Backend], Backend]:
    """Have Dynamo capture with these settings what it compiles with the backend, which is returned as it is."""

    def register(backend: Backend) -> Backend:
        convert = convert_frame.ConvertFrameAssert.__call__

        @functools.wraps(convert)
        def convert_for_backend(self: Any, *args: Any, skip: int = 0, **kwargs: Any) -> Any:
            if _innermost(self) is not backend:
                return convert(self, *args, skip=skip + 1, **kwargs)
            token = _takes_gradients.set(config.trace_autograd_ops)
            try:
                with config.patch(settings):
                    return convert(self, *args, skip=skip + 1, **kwargs)
            finally:
                _takes_gradients.reset(token)

        convert_frame.ConvertFrameAssert.__call__ = convert_for_backend  # type: ignore[method-assign]
        return backend

    return register


def _innermost(converter: Any) -> Any:
    """The function that the user chose, below what Dynamo wraps it in."""
    while hasattr(converter, "_torchdynamo_orig_backend"):
        converter = converter._torchdynamo_orig_backend
    return getattr(converter, "compiler_fn", converter)


def _leave_backward() -> None:
    """Have ``loss.backward()`` in a function break its graph unless that is set for all backends: Dynamo would write
    gradients to parameters without their hooks."""
    trace = TensorVariable.method_backward

    @functools.wraps(trace)
    def trace_as_set(self: TensorVariable, tx: Any, *args: Any, **kwargs: Any) -> Any:
        with config.patch(trace_autograd_ops=_takes_gradients.get(config.trace_autograd_ops)):
            return trace(self, tx, *args, **kwargs)

    TensorVariable.method_backward = trace_as_set


_leave_backward()
