# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Find the line of the user's code at which something happens, by running the code again under a tracer."""

from __future__ import annotations

import contextlib
import functools
import gc
import linecache
import sys
import sysconfig
from _lsprof import Profiler
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from retrograd.frontend.python.source_locations import is_user_file

# As `exec` names the file of what is no file's.
GENERATED = "<string>"
_STDLIB = sysconfig.get_paths()["stdlib"]


def is_library(filename: str) -> bool:
    """Whether a file is one of Python's own, or no file."""
    return filename.startswith("<frozen") or (filename.startswith(_STDLIB) and "site-packages" not in filename)


@functools.cache
def is_users(code: CodeType) -> bool:
    """Whether code is the user's: neither PyTorch's, ours nor of Python's own library."""
    return is_user_file(code.co_filename) and not is_library(code.co_filename)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Set aside another profiler for as long as this is open, and the collector of garbage: its callbacks, and what
    they call, are none of the model's code."""
    other: Any = sys.getprofile()
    collects = gc.isenabled()
    gc.disable()
    if isinstance(other, Profiler):
        other.disable()
    try:
        yield
    finally:
        if isinstance(other, Profiler):
            other.enable()
        else:
            sys.setprofile(other)
        if collects:
            gc.enable()


def describe_line(frame: FrameType, line: int) -> str:
    """A line of a frame's file, as an error ends with it."""
    code = frame.f_code
    text = linecache.getline(code.co_filename, line).strip()
    return f', at File "{code.co_filename}", line {line}, in {code.co_name}\n    {text}'


def find_line(run: Callable[[], Any], unchanged: Callable[[], bool]) -> tuple[str | None, FrameType | None]:
    """Run the model once more, up to the first line of its code after which ``unchanged`` no longer holds, and give it
    with its frame; nothing where that is so to the end: an import drew them, say."""
    last: list[str] = [""]
    frames: list[FrameType | None] = [None]

    def on_line(frame: FrameType, _event: str, _arg: Any) -> Any:
        if not unchanged():
            raise Found(last[0])
        last[0], frames[0] = describe_line(frame, frame.f_lineno), frame
        return on_line

    def on_call(frame: FrameType, _event: str, _arg: Any) -> Any:
        is_model = is_users(frame.f_code) and frame.f_code.co_filename != GENERATED
        return on_line if is_model else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        run()
    except Found as found:
        last[0] = found.place
    finally:
        sys.settrace(before)
    return (None, None) if unchanged() else (last[0], frames[0])


def find_call(run: Callable[[], Any], caller: CodeType, called: Any) -> str | None:
    """Run the model once more, up to where ``caller`` calls a function that the profiler names so; ``None`` where it
    does not."""

    def on_event(frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call" and isinstance(called, str) and frame.f_code is caller and _is_named(arg, called):
            raise Found(describe_line(frame, frame.f_lineno))
        if event == "call" and frame.f_code is called and frame.f_back is not None and frame.f_back.f_code is caller:
            raise Found(describe_line(frame.f_back, frame.f_back.f_lineno))

    return run_profiled(run, on_event)


def run_profiled(run: Callable[[], Any], on_event: Callable[[FrameType, str, Any], None]) -> str | None:
    """Run the model under a profiler that raises what it found; ``None`` where it does not."""
    with alone():
        sys.setprofile(on_event)
        try:
            run()
        except Found as found:
            return found.place
        finally:
            sys.setprofile(None)
    return None


def _is_named(function: Any, name: str) -> bool:
    module = getattr(function, "__module__", None)
    own = function.__name__
    return name in (f"<built-in method {module}.{own}>", f"<built-in method {own}>")


class Found(BaseException):
    """The place was found; no code of the model's may take this for an error of its own."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
