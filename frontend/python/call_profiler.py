# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sees which functions run in a thread, and which functions the user's code calls.

Python 3.11 has a profiler in C for it. From 3.12 on that one loses functions: it sees more ends than beginnings in
PyTorch's dispatch of fake tensors, and what was running at each is not among its entries. ``sys.monitoring`` tells of
beginnings alone, once for each function, and of the calls in functions that are named to it.
"""

from __future__ import annotations

import sys
import threading
from _lsprof import Profiler
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FrameType, MethodDescriptorType, ModuleType
from typing import Any, Protocol

from retrograd.frontend.python.source_locations import CaptureError

# There from Python 3.12 on, where a watch uses it.
_MONITORING: Any = getattr(sys, "monitoring", None)


@dataclass(frozen=True)
class Entry:
    """A function that ran, by its code, or by its name where it is one in C, and those that it called."""

    code: CodeType | str
    calls: Sequence[Entry] = ()


class CallProfiler(Protocol):
    """Notes what runs in this thread between :meth:`enable` and :meth:`disable`."""

    def enable(self, subcalls: bool = True, builtins: bool = True) -> None: ...

    def disable(self) -> None: ...

    def getstats(self) -> Sequence[Any]: ...


def call_profiler(is_told: Callable[[CodeType], bool], has_calls: Callable[[CodeType], bool]) -> CallProfiler:
    """Make a profiler. It has the callers of functions of which ``is_told``, and the functions in C that are called
    where code ``has_calls``; it may have others too."""
    return _Watch(is_told, has_calls) if sys.version_info >= (3, 12) else Profiler()


class _Watch:
    """Notes what ``sys.monitoring`` tells of one thread; of several watches of a thread the newest is told alone."""

    def __init__(self, is_told: Callable[[CodeType], bool], has_calls: Callable[[CodeType], bool]) -> None:
        self._is_told, self._has_calls = is_told, has_calls
        self._builtins = False
        # By identity: code of two files may be equal.
        self._codes: dict[int, CodeType] = {}
        self._callers: dict[int, CodeType] = {}
        self._called: dict[int, dict[int | str, CodeType | str]] = {}
        # Code whose calls are told.
        self.told: list[CodeType] = []

    def enable(self, subcalls: bool = True, builtins: bool = True) -> None:
        """Begin."""
        self._builtins = builtins
        _MONITOR.open(self)

    def disable(self) -> None:
        """End."""
        _MONITOR.close(self)

    def getstats(self) -> list[Entry]:
        """The functions that ran, those in C that were called among them."""
        called = {number: [Entry(other) for other in others.values()] for number, others in self._called.items()}
        in_c = {name for others in self._called.values() for name in others if isinstance(name, str)}
        codes = {**self._codes, **self._callers}
        return [Entry(code, called.get(number, ())) for number, code in codes.items()] + [*map(Entry, in_c)]

    def started(self, code: CodeType, frame: FrameType | None) -> bool:
        """Note code that starts to run, or goes on, in its frame; says whether to tell of it again."""
        if id(code) not in self._codes:
            self._codes[id(code)] = code
            if self._builtins and self._has_calls(code):
                self.told.append(code)
                _MONITOR.tell_calls(code)
        if not self._is_told(code):
            return False
        if frame is not None and frame.f_back is not None:
            self._note(frame.f_back.f_code, id(code), code)
        return True

    def calls(self, code: CodeType, function: Any) -> None:
        """Note what code calls."""
        if (name := _name_in_c(function)) is not None:
            self._note(code, name, name)

    def _note(self, caller: CodeType, key: int | str, called: CodeType | str) -> None:
        self._callers[id(caller)] = caller
        self._called.setdefault(id(caller), {})[key] = called


class _Monitor:
    """The one tool of ``sys.monitoring`` for all watches, there while one is open."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._tool: int | None = None
        self._watches: dict[int, list[_Watch]] = {}

    def open(self, watch: _Watch) -> None:
        """Tell a watch what runs in this thread."""
        with self._lock:
            if self._tool is None:
                # Those that no debugger, coverage or profiler is expected at come first.
                tool = next((tool for tool in (4, 3, 5, 2, 1, 0) if _MONITORING.get_tool(tool) is None), None)
                if tool is None:
                    raise CaptureError(
                        "all tools of sys.monitoring are taken, of which one says what the model runs",
                        "compile without one of the debuggers, profilers or coverage tools that run",
                    )
                _MONITORING.use_tool_id(tool, "retrograd")
                self._tool = tool
                for event in (_MONITORING.events.PY_START, _MONITORING.events.PY_RESUME):
                    _MONITORING.register_callback(self._tool, event, self._started)
                _MONITORING.register_callback(self._tool, _MONITORING.events.CALL, self._calls)
            self._watches.setdefault(threading.get_ident(), []).append(watch)
            # A generator may have been started before.
            _MONITORING.set_events(self._tool, _MONITORING.events.PY_START | _MONITORING.events.PY_RESUME)
            # What has run before is told again.
            _MONITORING.restart_events()

    def close(self, watch: _Watch) -> None:
        """Tell it no more."""
        with self._lock:
            thread = next(thread for thread, watches in self._watches.items() if watch in watches)
            self._watches[thread].remove(watch)
            if not self._watches[thread]:
                del self._watches[thread]
            still = {id(code) for watches in self._watches.values() for other in watches for code in other.told}
            for code in watch.told:
                if id(code) not in still:
                    _MONITORING.set_local_events(self._tool, code, 0)
            if self._watches:
                _MONITORING.restart_events()
                return
            _MONITORING.set_events(self._tool, 0)
            _MONITORING.free_tool_id(self._tool)
            self._tool = None

    def tell_calls(self, code: CodeType) -> None:
        """Report the calls in code while this is open."""
        _MONITORING.set_local_events(self._tool, code, _MONITORING.events.CALL)

    def _newest(self) -> _Watch | None:
        watches = self._watches.get(threading.get_ident())
        return watches[-1] if watches else None

    def _started(self, code: CodeType, _offset: int) -> Any:
        watch = self._newest()
        if watch is None:
            return None
        again = watch.started(code, sys._getframe(1))
        # Another thread's watch is to be told of what this one has seen.
        return None if again or len(self._watches) > 1 else _MONITORING.DISABLE

    def _calls(self, code: CodeType, _offset: int, function: Any, _first: Any) -> None:
        if (watch := self._newest()) is not None:
            watch.calls(code, function)


_MONITOR = _Monitor()


def _name_in_c(function: Any) -> str | None:
    """The name of a function in C, as Python's profiler has it."""
    if isinstance(function, MethodDescriptorType):
        return repr(function)
    if not isinstance(function, BuiltinFunctionType):
        return None
    owner, name = function.__self__, function.__name__
    if owner is None or isinstance(owner, ModuleType):
        return f"<built-in method {function.__module__}.{name}>"
    method = next((kind.__dict__[name] for kind in type(owner).__mro__ if name in kind.__dict__), None)
    return f"<built-in method {name}>" if method is None else repr(method)
