# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Clocks in the calls of a backward: of the engine in front of PyTorch's, of PyTorch's, of what it calls, of IREE."""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

ROUNDS, STEPS = 9, 300
"""How often is measured, and steps each time."""


def count_calls() -> dict[str, int]:
    """Count the nanoseconds in calls of the backward, of PyTorch's engine, of what it calls, and of IREE."""
    from retrograd import scope as enabled
    from retrograd.frontend.autograd.engine.engine import Engine
    from retrograd.runtime.programs.loaded import Loaded

    spent: dict[str, int] = {}
    counted = partial(_counted, spent)

    class CountedEngine:
        """PyTorch's engine."""

        def __init__(self, engine: Any) -> None:
            self._engine = engine
            self.run_backward = counted("engine", engine.run_backward)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

    begin = Loaded.__init__

    def load(self: Loaded, *args: Any) -> None:
        begin(self, *args)
        self._from_dlpack = counted("IREE", self._from_dlpack)
        self._invoke = counted("IREE", self._invoke)

    enabled._ENGINE._engine = CountedEngine(enabled._ENGINE._engine)
    Engine.run_backward = counted("backward", Engine.run_backward)  # type: ignore[method-assign]
    Engine._run_function = counted("captured", Engine._run_function)  # type: ignore[method-assign]
    Loaded.__init__ = load  # type: ignore[method-assign, assignment]
    return spent


def _counted(spent: dict[str, int], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with its nanoseconds added up under a name, and its calls."""
    calls = f"{name} calls"

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter_ns()
        try:
            return function(*args, **kwargs)
        finally:
            spent[name] = spent.get(name, 0) + time.perf_counter_ns() - start
            spent[calls] = spent.get(calls, 0) + 1

    return call


def _clock_cost() -> tuple[float, float]:
    """Microseconds that a counted call takes more than one that is not: those that are counted, and those beside."""
    spent: dict[str, int] = {}
    nothing = _counted(spent, "nothing", lambda: None)
    best = (float("inf"), float("inf"))
    for _ in range(ROUNDS):
        spent.clear()
        start = time.perf_counter_ns()
        for _ in range(10 * STEPS):
            nothing()
        whole, inside = time.perf_counter_ns() - start, spent["nothing"]
        best = min(best, (inside / STEPS / 1e4, (whole - inside) / STEPS / 1e4))
    return best


def medians(step: Callable[[], None], spent: dict[str, int]) -> dict[str, float]:
    """Microseconds of a step by what they went to."""
    rounds = []
    for _ in range(ROUNDS):
        steps: list[dict[str, int]] = []
        for _ in range(STEPS):
            spent.clear()
            step()
            steps.append(dict(spent))
        rounds.append({name: statistics.median(s[name] for s in steps) for name in steps[-1]})
    inside, beside = _clock_cost()
    middle = min(rounds[1:], key=operator.itemgetter("backward"))
    calls = middle["IREE calls"]
    pytorch = (middle["engine"] - middle["captured"]) / 1e3 - inside - beside
    iree = middle["IREE"] / 1e3 - calls * inside
    backward = middle["backward"] / 1e3 - (calls + 2) * (inside + beside) - inside
    figures = {"backward": backward, "PyTorch": pytorch, "IREE": iree, "ours": backward - pytorch - iree}
    return {name: round(value, 1) for name, value in figures.items()}
