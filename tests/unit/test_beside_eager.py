# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A captured model beside the model in eager: what parts is named, and nothing else. What is "compiled" here is eager
code that is told that it compiles."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd
from retrograd.beside_eager import beside_eager
from retrograd.contract.errors import RetrogradError
from retrograd.frontend.doors.capture import capture_joint
from retrograd.frontend.doors.flat_module import compiling
from retrograd.frontend.verification.beside_eager import find_fork
from retrograd.frontend.verification.first_comparison import run_eager
from retrograd.parting import PartsFromEagerError

CPU = torch.device("cpu")


class Asking(nn.Module):
    """Does something else while it is compiled, as ``kind`` says."""

    count: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.runs = kind, 0
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        compiles = torch.compiler.is_compiling() if "asks" in self.kind else False
        self.count += 2 if compiles and "counts" in self.kind else 1
        if "drops" in self.kind:
            x = self.drop(x)
        y: Tensor = self.linear(x)
        if compiles and "scales" in self.kind:
            y = y * 1.01
        if compiles and "reorders" in self.kind:
            y = (y * 0.1) * 10
        if compiles and "detaches" in self.kind:
            y = y.detach() + self.linear.bias * 0
        if not compiles and "draws" in self.kind:
            y = y + random.random()
        if not compiles and "raises" in self.kind:
            raise ValueError("not so")
        if not compiles and "keeps" in self.kind:
            self.last = y
        return y.tanh()


def call_first(kind: str, **wrong: Any) -> tuple[Asking, Tensor]:
    """The model after the first call of what stands for it compiled, and the state of torch's generator then."""
    torch.manual_seed(0)
    model, x = Asking(kind), torch.randn(3, 4)
    with contextlib.ExitStack() as stack:
        captured = capture_joint(stack, model, (x,))

    def compiled(primals: Sequence[Tensor]) -> Sequence[Tensor]:
        with compiling(True):
            return [o + wrong.get("off", 0.0) for o in run_eager(captured, primals)]

    notes: list[str] = []
    call = beside_eager(captured, compiled, CPU, notes.append)
    # What is compiled takes buffers as they are.
    primals = [*model.parameters(), *model.buffers(), x]
    call(primals)
    assert notes == (["the model in eager gives the same as it does while it is compiled"] if "asks" in kind else [])
    for _ in range(2):
        call(primals)
    return model, torch.get_rng_state()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("asks scales", r"output differs by \d\.\de-03 .*another way at .*test_beside_eager.py:\d+$"),
        ("asks counts", r"count, which it writes to, differs by 1\.0e\+00"),
        ("asks detaches", r"linear.weight has a gradient in one of the two only"),
        ("asks drops scales", r"output differs by \d\.\de-03"),
        ("asks draws", r"output differs by"),
        ("asks raises", r"in eager it raises ValueError: not so"),
    ],
)
def test_what_parts_is_named(kind: str, said: str) -> None:
    with pytest.raises(PartsFromEagerError) as caught:
        call_first(kind)
    assert re.search(said, caught.value.parting), caught.value.parting
    assert "verify=False" in str(caught.value)
    assert caught.value.is_last == ("drops" in kind)


@pytest.mark.parametrize("kind", ["asks", "asks reorders", "asks drops", "asks keeps", "scales"])
def test_what_does_not_part_runs_once_for_each_call(kind: str) -> None:
    model, _ = call_first(kind)
    assert model.count == 3
    assert not hasattr(model, "last")


def test_what_was_compiled_may_itself_be_off() -> None:
    """The captured graph may be another one than what the model does, whatever it is told."""
    with pytest.raises(PartsFromEagerError, match="output differs"):
        call_first("asks", off=0.01)
    call_first("asks", off=1e-9)


def test_nothing_is_seen_of_a_call_that_parts() -> None:
    torch.manual_seed(0)
    model, x = Asking("asks drops scales"), torch.randn(3, 4)
    with contextlib.ExitStack() as stack:
        captured = capture_joint(stack, model, (x,))
    call = beside_eager(captured, lambda primals: run_eager(captured, primals), CPU, print)
    state, draws = torch.get_rng_state(), random.getstate()
    with pytest.raises(PartsFromEagerError):
        call([*model.parameters(), *model.buffers(), x])
    assert model.count == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == draws


def _fail_while_compiling(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        raise RuntimeError("no copies here")
    return x * 2


def test_what_does_not_run_on_copies_is_told_and_used(caplog: pytest.LogCaptureFixture) -> None:
    model, x, notes = Asking("asks"), torch.randn(3, 4), list[str]()
    with contextlib.ExitStack() as stack:
        captured = capture_joint(stack, model, (x,))
    primals = [*model.parameters(), *model.buffers(), x]
    call = beside_eager(captured, lambda primals: run_eager(captured, primals), CPU, notes.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.linear, "forward", _fail_while_compiling)
        for _ in range(2):
            assert torch.equal(call(primals)[0], torch.tanh(x * 2))
    assert len(notes) == 1
    assert "not compared with the model in eager, which does not run on copies" in notes[0]
    assert "not compared" in caplog.text


def test_random_numbers_are_drawn_once() -> None:
    _, beside = call_first("asks drops")
    _, alone = call_first("drops")
    assert torch.equal(beside, alone)


def test_the_fork_is_the_first_step_that_one_run_has() -> None:
    assert find_fork([("sin", "a:1"), ("cos", "a:2")], [("sin", "a:1"), ("tan", "a:3")]) == "a:3"
    assert find_fork([("sin", "a:1")], [("sin", "a:1"), ("tan", "a:3")]) == "a:3"
    assert find_fork([("sin", "a:1")], [("sin", "a:1")]) is None


def test_a_model_that_parts_is_compiled_as_it_runs_in_eager(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, x = Asking("asks scales counts"), torch.randn(3, 4)
    step = retrograd.compile_backward(model, (x,))
    given = [step(x), step(x)]
    assert model.count == 2
    given[1].sum().backward()
    found = model.linear.weight.grad
    model.zero_grad()
    expected = model(x)
    expected.sum().backward()
    assert found is not None
    assert model.linear.weight.grad is not None
    torch.testing.assert_close(given, [expected, expected])
    torch.testing.assert_close(found, model.linear.weight.grad)
    assert "as it runs in eager" in str(step.explain())
    with pytest.raises(RetrogradError, match="while it is compiled"):
        step.save(tmp_path / "model.rgd")


def test_a_random_model_that_parts_runs_in_eager() -> None:
    torch.manual_seed(0)
    model, x = Asking("asks drops scales"), torch.randn(3, 4)
    step = retrograd.compile_backward(model, (x,))
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match=r"output differs by .*runs in eager.*enable\(\).*verify=False"):
        found = step(x)
    torch.manual_seed(1)
    assert torch.equal(found, model(x))
    strict = retrograd.compile_backward(model, (x,), fallback="error")
    with pytest.raises(RetrogradError, match="output differs"):
        strict(x)
