# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which line of the user's code is running, for what is told of it."""

from __future__ import annotations

import sys
import sysconfig
import warnings
from functools import lru_cache
from pathlib import Path
from types import FrameType

_NOT_USER = ("torch.", "retrograd.", "contextlib", "warnings")
# What is installed: a trainer of somebody's else calls backward() in the place of the user.
_INSTALLED = (f"{sysconfig.get_path('stdlib')}/", "<frozen ")
_PACKAGES = {"site-packages", "dist-packages"}


def find_user_frame() -> FrameType | None:
    """The innermost frame of the user's code: neither PyTorch's nor ours, and of no installed package if there is
    another."""
    frame: FrameType | None = sys._getframe(1)
    nearest = None
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_NOT_USER):
            if not _is_installed(frame.f_code.co_filename):
                return frame
            nearest = nearest or frame
        frame = frame.f_back
    return nearest


def find_user_line() -> str:
    """The line of the user's code that is running, as ``train.py:17``; empty where there is none."""
    frame = find_user_frame()
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the line of the user's code that is running."""
    frame = find_user_frame()
    if frame is None:
        warnings.warn(message, category, stacklevel=2)
        return
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    name = frame.f_globals.get("__name__", "<unknown>")
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, name, registry)


@lru_cache(maxsize=1024)
def _is_installed(filename: str) -> bool:
    return filename.startswith(_INSTALLED) or not _PACKAGES.isdisjoint(Path(filename).parts)
