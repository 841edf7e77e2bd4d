# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The op that calls backward hooks of modules, by itself."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograd.frontend.hooks import hook_calls
from retrograd.frontend.hooks.hook_calls import CALL_HOOKS, ModuleHooks, hooks_called_once, hooks_left_out

NUMBER = -1


def put(monkeypatch: pytest.MonkeyPatch, hook: Any) -> tuple[nn.Module, ModuleHooks]:
    """A module with a hook, of which call ``NUMBER`` has gradients of its second argument and of its result."""
    module = nn.Identity()
    key = module.register_full_backward_hook(hook).id
    call = ModuleHooks(weakref.ref(module), (), (key,), (False, True), (True,))
    monkeypatch.setitem(hook_calls._CALLS, NUMBER, call)
    return module, call


def gradients() -> tuple[list[Tensor], list[Tensor]]:
    return [torch.arange(3.0)], [torch.ones(2)]


def call() -> Tensor:
    token, gradient = CALL_HOOKS(*gradients(), None, NUMBER)
    assert (token.dtype, token.shape) == (torch.int8, (0,))
    assert isinstance(gradient, Tensor)
    return gradient


def write(_: nn.Module, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
    inputs[1].mul_(3)


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (lambda module, inputs, outputs: None, [0.0, 1.0, 2.0]),
        (lambda module, inputs, outputs: (None, inputs[1] + outputs[0].sum()), [2.0, 3.0, 4.0]),
        (lambda module, inputs, outputs: (torch.ones(1), None), [0.0, 0.0, 0.0]),
        (lambda module, inputs, outputs: [None, inputs[1].double() * 2], [0.0, 2.0, 4.0]),
        (write, [0.0, 3.0, 6.0]),
    ],
    ids=["leaves it", "changes it", "gives none", "gives another type", "writes to it"],
)
def test_what_a_hook_makes_of_a_gradient(monkeypatch: pytest.MonkeyPatch, hook: Any, expected: list[float]) -> None:
    module, kept = put(monkeypatch, hook)
    with torch.no_grad():
        found = call()
    assert kept.module() is module
    assert found.dtype == torch.float32
    assert found.tolist() == expected


def test_a_hook_that_gives_something_else_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    module, kept = put(monkeypatch, lambda module, inputs, outputs: (None,))
    with pytest.raises(RuntimeError, match="invalid number of grad_input, got 1, but expected 2"):
        call()
    assert kept.module() is module
    module, kept = put(monkeypatch, lambda module, inputs, outputs: (None, torch.ones(4)))
    with pytest.raises(RuntimeError, match=r"of shape \(4,\) in the place of one of shape \(3,\)"):
        call()


def test_one_call_of_several_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is called, and the others give what it gave; without hooks none is, and one that was taken off is not
    either."""
    calls: list[Tensor] = []

    def double(_: nn.Module, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        calls.append(inputs[1])
        return (None, inputs[1] * 2)

    module, kept = put(monkeypatch, double)
    assert kept.keys
    with hooks_called_once():
        assert [call().tolist() for _ in range(3)] == [[0.0, 2.0, 4.0]] * 3
    assert len(calls) == 1
    with hooks_left_out():
        assert call().tolist() == [0.0, 1.0, 2.0]
    assert len(calls) == 1
    call()
    assert len(calls) == 2
    module._backward_hooks.clear()
    assert call().tolist() == [0.0, 1.0, 2.0]
