# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``retrograd.enable(background=True)``: training goes on while the backward is compiled, whatever comes of it."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

import retrograd
from retrograd.build import build_backward
from retrograd.runtime.steps.stage_executor import StageExecutor


class Held:
    """Compiles when it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.built = threading.Event(), threading.Event()
        self.runs = 0
        monkeypatch.setattr("retrograd.scope.build_backward", self.build)
        run = StageExecutor.run

        def count(*args: Any) -> Any:
            self.runs += 1
            return run(*args)

        monkeypatch.setattr(StageExecutor, "run", count)

    def build(self, traced: Any, options: Any) -> Any:
        try:
            assert threading.current_thread() is not threading.main_thread()
            assert self.go.wait(120)
            return build_backward(traced, options)
        finally:
            self.built.set()


def step(w: torch.Tensor, x: torch.Tensor) -> None:
    w.grad = torch.zeros_like(w)
    with retrograd.enable(background=True):
        (w * x).sin().prod().backward()
    expected = torch.autograd.grad((w * x).sin().prod(), w)[0]
    torch.testing.assert_close(w.grad, expected)


def settle(w: torch.Tensor, x: torch.Tensor, before: int) -> str:
    """Step until the compilation is told of; returns how."""
    for _ in range(200):
        step(w, x)
        entries = retrograd.explain_recompiles()[before:]
        if entries:
            return str(entries[-1])
        threading.Event().wait(0.05)
    raise AssertionError("nothing came of it")


def test_training_goes_on_until_a_step_finds_it_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    before = len(retrograd.explain_recompiles())
    w, x = torch.rand(3, requires_grad=True), torch.rand(3)
    for _ in range(5):
        step(w, x)
    assert held.runs == 0 and len(retrograd.explain_recompiles()) == before
    held.go.set()
    assert held.built.wait(120)
    assert "compiled" in settle(w, x, before)
    rehearsals = held.runs
    step(w, x)
    assert (rehearsals, held.runs) == (1, 2)


def test_a_compilation_that_fails_is_told_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no such op")

    monkeypatch.setattr("retrograd.scope.build_backward", fail)
    before = len(retrograd.explain_recompiles())
    w, x = torch.rand(4, requires_grad=True), torch.rand(4)
    assert "no such op" in settle(w, x, before)
    step(w, x)
    assert len(retrograd.explain_recompiles()) == before + 1


def test_the_interpreter_exits_while_something_is_compiled() -> None:
    script = """
import torch, retrograd, time
import retrograd.scope
retrograd.scope.build_backward = lambda *_: time.sleep(1000)
w = torch.rand(3, requires_grad=True)
with retrograd.enable(background=True):
    w.sin().sum().backward()
print("done")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


COMPUTING = """
import threading
import torch
from retrograd.frontend.autograd.engine.background import BackgroundWork
begun = threading.Event()
def work():
    a = torch.randn(1500, 1500, dtype=torch.float64)
    begun.set()
    while True:
        a = (a @ a).clamp(-1, 1)
BackgroundWork(work)
assert begun.wait(60)
"""


def test_work_in_torch_ends_with_the_program() -> None:
    """A thread that the interpreter's end meets inside of an op would have the process abort."""
    ended = subprocess.run([sys.executable, "-c", COMPUTING], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "terminate" not in ended.stderr
