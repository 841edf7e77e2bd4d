# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Runs some tests of one file of PyTorch's, each a few times, eagerly or inside of ``retrograd.enable()``.

``pytorch_file.py FILE list|eager|enable TIMES``; the names of tests come from the input, a list in JSON. A line of JSON
goes to the output for each: whether it passed, with which error, and what was captured and compiled.

A test that opens PyTorch's compiled autograd by itself gets ours in its place, or eager. What is counted of stock's
own, its captures and compilations, is not compared.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import traceback
import unittest
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._dynamo import compiled_autograd

import retrograd
from retrograd.frontend.autograd.engine.engine import Engine
from retrograd.frontend.autograd.steps.variants import Use

COMPARES = "check_output_and_recompiles"
# In the names of classes whose tests open stock's compiled autograd where they want it.
STOCKS_TESTS = "CompiledAutograd"


class AnyCount(int):
    """A number of stock's captures or compilations."""


class Steps:
    """Counts the steps at which a captured backward ran, and those at which one ran that was compiled before."""

    def __init__(self) -> None:
        self.captured = self.compiled = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count while this is open."""
        run, run_compiled = Engine._run_function, Use.run

        def counting(engine: Engine, *arguments: Any) -> Any:
            self.captured += 1
            return run(engine, *arguments)

        def counting_compiled(use: Use, frame: Any) -> Any:
            self.compiled += 1
            return run_compiled(use, frame)

        with mock.patch.object(Engine, "_run_function", counting), mock.patch.object(Use, "run", counting_compiled):
            yield


def load_file(path: Path) -> Any:
    """Import a file of tests, with its folder in the path."""
    sys.path.insert(0, str(path.parent))
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module
    specification.loader.exec_module(module)
    return module


def find_cases(module: Any) -> dict[str, unittest.TestCase]:
    """The tests of a module by name, without those that it wraps for stock's compiled autograd."""
    suites = [s for s in unittest.defaultTestLoader.loadTestsFromModule(module) if isinstance(s, unittest.TestSuite)]
    found = [case for suite in suites for case in suite if isinstance(case, unittest.TestCase)]
    cases = {f"{type(case).__name__}.{case.id().rpartition('.')[2]}": case for case in found}
    return {name: case for name, case in cases.items() if "WithCompiledAutograd" not in name}


def scope(mode: str) -> AbstractContextManager[Any]:
    """In what a test runs."""
    return retrograd.enable() if mode == "enable" else contextlib.nullcontext()


def check_outputs(mode: str) -> Callable[..., None]:
    """In place of PyTorch's own comparison, which counts what stock captures: of what a program gives alone."""

    def check(case: Any, fn: Callable[[], Any], *_: Any, compile_fn: bool = False, **__: Any) -> None:
        with torch.autograd.set_multithreading_enabled(False):
            torch._dynamo.reset()
            torch.manual_seed(123)
            expected = list(fn())
            for _again in range(3):
                torch.manual_seed(123)
                with scope(mode):
                    case.assertEqual(expected, list((torch.compile(fn) if compile_fn else fn)()))

    return check


@contextlib.contextmanager
def in_stocks_place(mode: str, case: unittest.TestCase) -> Iterator[None]:
    """What a test that opens stock's compiled autograd gets: ours, or eager."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(compiled_autograd, "_enable", lambda *_, **__: scope(mode)))
        counters = torch._dynamo.utils.counters
        counted = mock.patch.dict(counters, {"compiled_autograd": defaultdict(AnyCount)})
        stack.enter_context(counted)
        kind: Any = type(case)
        equal = kind.assertEqual

        def unless_counted(case: Any, found: Any, *expected: Any, **how: Any) -> None:
            if not isinstance(found, AnyCount):
                equal(case, found, *expected, **how)

        stack.enter_context(mock.patch.object(kind, "assertEqual", unless_counted))
        if hasattr(kind, COMPARES):
            stack.enter_context(mock.patch.object(kind, COMPARES, check_outputs(mode)))
        yield


def run_case(case: unittest.TestCase, mode: str, times: int) -> dict[str, Any]:
    """Run a test a few times, all in one scope."""
    steps, before = Steps(), len(retrograd.explain_recompiles())
    opens_itself = STOCKS_TESTS in type(case).__name__
    found: dict[str, Any] = {"kind": "passed"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(steps.counted())
        stack.enter_context(in_stocks_place(mode, case))
        if not opens_itself:
            stack.enter_context(scope(mode))
        for number in range(times):
            result = unittest.TestResult()
            case.run(result)
            problems = [*result.errors, *result.failures]
            if problems:
                found = {"kind": "failed", "error": _last_line(problems[0][1]), "at": number, "trace": problems[0][1]}
                break
            if result.skipped:
                found = {"kind": "skipped", "error": result.skipped[0][1]}
                break
    entries = retrograd.explain_recompiles()[before:]
    compiled = [entry for entry in entries if "eagerly" not in entry.outcome and "left" not in entry.outcome]
    why = [f"{e.outcome}: {'; '.join(e.reasons)}"[:300] for e in entries if e not in compiled]
    ran = steps.compiled + len(compiled)
    return {**found, "captured": steps.captured, "compiled": ran, "compilations": len(compiled), "eager": why}


def _last_line(text: str) -> str:
    lines = [
        line for line in text.splitlines() if line.strip() and not line.startswith((" ", "To execute", "This mes"))
    ]
    return next((line for line in lines if "Error" in line or "Exception" in line), lines[-1] if lines else "")[:300]


def main() -> None:
    """Run what the command line says."""
    path, mode, times = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    # What tests print goes nowhere; verdicts have the output to themselves.
    verdicts = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    cases = find_cases(load_file(path))
    if mode == "list":
        print(json.dumps(list(cases)), file=verdicts, flush=True)
        return
    names = json.load(sys.stdin)
    print("{}", file=verdicts, flush=True)
    for name in names:
        try:
            found = run_case(cases[name], mode, times)
        except Exception:  # noqa: BLE001 (a verdict too)
            found = {"kind": "failed", "error": traceback.format_exc()[-300:]}
        print(json.dumps(found), file=verdicts, flush=True)


if __name__ == "__main__":
    main()
