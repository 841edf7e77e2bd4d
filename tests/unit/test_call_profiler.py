# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Checks which functions are seen to run, and to be called, on the Python that runs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from retrograd.frontend.python.call_profiler import call_profiler
from retrograd.frontend.python.found_lines import alone
from retrograd.frontend.python.source_locations import CaptureError


def inner(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, (3,)).tanh()


def outer(x: torch.Tensor) -> torch.Tensor:
    time.perf_counter()
    return inner(x) @ x.t()


def seen(
    run: Callable[[], Any], told: CodeType = inner.__code__, user: CodeType = outer.__code__
) -> dict[Any, set[Any]]:
    """What ran, each with what it called."""
    profiler = call_profiler(lambda code: code is inner.__code__, lambda code: code is user)
    with alone():
        profiler.enable(subcalls=True, builtins=True)
        try:
            run()
        finally:
            profiler.disable()
    return {entry.code: {called.code for called in entry.calls or ()} for entry in profiler.getstats()}


def test_functions_are_seen_in_the_dispatch_of_fake_tensors() -> None:
    with FakeTensorMode() as mode:
        x = torch.randn(2, 3)
        for _ in range(2):
            found = seen(lambda: outer(x))
            assert {inner.__code__, "<built-in method time.perf_counter>"} <= found[outer.__code__]
            assert inner.__code__ in found
            mode.cache_clear()


def test_what_runs_in_another_thread_is_not_seen() -> None:
    def run() -> None:
        thread = threading.Thread(target=outer, args=(torch.ones(2, 3),))
        thread.start()
        thread.join()

    assert outer.__code__ not in seen(run)


def test_the_newest_of_several_sees_alone() -> None:
    within: list[dict[Any, set[Any]]] = []

    def run() -> None:
        time.perf_counter()
        within.append(seen(lambda: outer(torch.ones(2, 3))))
        inner(torch.ones(2, 3))

    found = seen(run, user=run.__code__)
    assert inner.__code__ in within[0][outer.__code__]
    assert outer.__code__ not in found
    assert inner.__code__ in found


def ticks() -> Iterator[float]:
    while True:
        yield time.perf_counter()


def test_a_generator_that_was_started_before_is_seen() -> None:
    started = ticks()
    next(started)
    found = seen(lambda: next(started), user=ticks.__code__)
    assert "<built-in method time.perf_counter>" in found[ticks.__code__]


def test_equal_code_is_seen_each() -> None:
    codes = [compile("clock()", f"{name}.py", "eval") for name in "ab"]
    assert codes[0] == codes[1]
    profiler = call_profiler(lambda code: False, lambda code: code in codes)
    with alone():
        profiler.enable(subcalls=True, builtins=True)
        try:
            eval(codes[0], {"clock": lambda: 0})
            eval(codes[1], {"clock": time.perf_counter})
        finally:
            profiler.disable()
    callers = [e.code for e in profiler.getstats() if "perf_counter" in str([called.code for called in e.calls or ()])]
    assert callers[0] is codes[1]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python's profiler in C takes no tool of sys.monitoring")
def test_a_model_is_not_watched_where_all_tools_are_taken() -> None:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    taken = [tool for tool in range(6) if monitoring.get_tool(tool) is None]
    for tool in taken:
        monitoring.use_tool_id(tool, "another")
    try:
        with pytest.raises(CaptureError, match=r"all tools of sys.monitoring(.|\n)*debuggers"):
            seen(lambda: None)
    finally:
        for tool in taken:
            monitoring.free_tool_id(tool)
    assert inner.__code__ in seen(lambda: inner(torch.ones(2, 3)))


def test_methods_in_c_are_named_as_their_class_has_them() -> None:
    def run() -> None:
        torch.default_generator.initial_seed()

    assert "<method 'initial_seed' of 'torch._C.Generator' objects>" in seen(run, user=run.__code__)[run.__code__]
