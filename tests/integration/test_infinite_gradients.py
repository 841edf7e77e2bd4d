# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``enable()`` compares what else a backward gives where one of its gradients is never a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_enable_properties import Interpreted

import retrograd
from retrograd.frontend.autograd.steps import compilation


class _Doubled:
    """Stands for the Python side of a backward, and doubles the gradients that it gets."""

    def __init__(self, python: Any) -> None:
        self._python = python

    def __getattr__(self, name: str) -> Any:
        return getattr(self._python, name)

    def accumulate_grad(self, param: int, gradient: torch.Tensor, owned: bool) -> None:
        self._python.accumulate_grad(param, gradient * 2, owned)


class Wrong(Interpreted):
    """A compiled backward that is wrong."""

    def run(self, arguments: Sequence[torch.Tensor | int], python: Any) -> list[torch.Tensor]:
        return super().run(arguments, _Doubled(python))


class WrongTogether(Wrong):
    """One that all processes have to run, or none."""

    is_rearranged = True


@pytest.mark.parametrize(("wrong", "size", "waits"), [(Wrong, 8, True), (WrongTogether, 9, False)])
def test_what_is_wrong_beside_a_gradient_that_is_no_number(
    wrong: type[Wrong], size: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrograd.scope.build_backward", lambda traced, _options: (wrong(traced), False))
    monkeypatch.setattr(compilation, "MOST_TOLD_NOTHING", 2)
    w, root = torch.randn(size, requires_grad=True), torch.zeros(1, requires_grad=True)

    def gradients() -> list[torch.Tensor | None]:
        w.grad = root.grad = None
        (w.sin().sum() + (root.sqrt() * 0).sum()).backward()
        return [w.grad, root.grad]

    expected, before = gradients(), len(retrograd.explain_recompiles())
    assert root.grad is not None and root.grad.isnan().all()
    for _ in range(6):
        with retrograd.enable(cache=False):
            found = gradients()
        torch.testing.assert_close(found, expected, equal_nan=True)
    entries = retrograd.explain_recompiles()[before:]
    assert [entry.outcome for entry in entries] == ["is compared at its next step"] * waits + ["runs eagerly"]
    assert "compiled, it is wrong: the gradient of input" in entries[-1].reasons[0]
