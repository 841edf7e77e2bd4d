# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Settings of Dynamo's that hold while it captures for one backend, and stay as they are for others.

Dynamo has them for all backends together. (They belong to a thread.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch._dynamo import config, convert_frame

Backend = TypeVar("Backend", bound=Callable[..., Any])


def captured_with(**settings: Any) -> Callable[[Backend], Backend]:
    """Have Dynamo capture with these settings what it compiles with the backend, which is returned as it is."""

    def register(backend: Backend) -> Backend:
        convert = convert_frame.ConvertFrameAssert.__call__

        @functools.wraps(convert)
        def convert_for_backend(self: Any, *args: Any, skip: int = 0, **kwargs: Any) -> Any:
            if _innermost(self) is not backend:
                return convert(self, *args, skip=skip + 1, **kwargs)
            with config.patch(settings):
                return convert(self, *args, skip=skip + 1, **kwargs)

        convert_frame.ConvertFrameAssert.__call__ = convert_for_backend  # type: ignore[method-assign]
        return backend

    return register


def _innermost(converter: Any) -> Any:
    """The function that the user chose, below what Dynamo wraps it in."""
    while hasattr(converter, "_torchdynamo_orig_backend"):
        converter = converter._torchdynamo_orig_backend
    return getattr(converter, "compiler_fn", converter)
