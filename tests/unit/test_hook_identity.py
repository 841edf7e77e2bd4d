# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Hooks that differ in what they would compute have other identities; those that do not, the same."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from retrograd.frontend.autograd.hooks.hook_identity import HookIdentity, Same

factor = 2.0
settings = SimpleNamespace(times=2.0, unrelated=0)


def identity(hook: Any) -> Hashable:
    return HookIdentity().read(hook)


def scaled_by(number: Any) -> Callable[[torch.Tensor], Any]:
    return lambda gradient: gradient * number


def by_global(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * factor


def by_attribute(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * settings.times  # type: ignore[no-any-return]


class Scaler:
    def __init__(self, number: float) -> None:
        self.number = number
        self.calls = 0

    def hook(self, gradient: torch.Tensor) -> torch.Tensor:
        return self.scale(gradient)

    def scale(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * self.number

    __call__ = hook


def test_closures_count_by_code_and_numbers() -> None:
    assert identity(scaled_by(2)) == identity(scaled_by(2))
    assert identity(scaled_by(2)) != identity(scaled_by(3))
    assert identity(scaled_by(1)) != identity(scaled_by(1.0))
    assert identity(scaled_by([1, {"a": 2}])) != identity(scaled_by([1, {"a": 3}]))
    assert identity(scaled_by(scaled_by(2))) != identity(scaled_by(scaled_by(3)))
    assert identity(lambda g: g * 2) != identity(lambda g: g * 2)


def test_defaults_and_partials() -> None:
    def hook(gradient: torch.Tensor, number: float = 2) -> torch.Tensor:
        return gradient * number

    before = identity(hook)
    hook.__defaults__ = (3,)
    assert identity(hook) != before
    assert identity(partial(hook, number=2)) == identity(partial(hook, number=2))
    assert identity(partial(hook, number=2)) != identity(partial(hook, number=3))


def test_globals_and_attributes_that_the_code_reads(monkeypatch: Any) -> None:
    before, also = identity(by_global), identity(by_attribute)
    monkeypatch.setitem(globals(), "factor", 3.0)
    assert identity(by_global) != before
    settings.unrelated += 1
    assert identity(by_attribute) == also
    monkeypatch.setattr(settings, "times", 3.0)
    assert identity(by_attribute) != also


def test_objects_by_the_attributes_that_their_methods_read() -> None:
    scaler = Scaler(2.0)
    before, called = identity(scaler.hook), identity(scaler)
    scaler.calls += 1
    assert identity(scaler.hook) == before and identity(scaler) == called
    scaler.number = 3.0
    assert identity(scaler.hook) != before and identity(scaler) != called


def test_tensors_count_by_identity_and_are_found() -> None:
    one, other = torch.ones(2), torch.ones(2)
    reader = HookIdentity()
    key = reader.read(scaled_by(one))
    assert reader.tensors == {id(one): one}
    one.add_(1)
    assert identity(scaled_by(one)) == key != identity(scaled_by(other))


def test_a_dead_object_equals_nothing() -> None:
    key = Same(Scaler(1))
    gc.collect()
    assert key != key
    assert Same(key) == Same(key)


def test_optimizers_count_by_their_numbers_and_states() -> None:
    parameter = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

    def hook(_: torch.Tensor) -> None:
        optimizer.step()

    before = identity(hook)
    parameter.grad = torch.ones(2)
    optimizer.step()
    stepped = identity(hook)
    optimizer.step()
    assert before != stepped == identity(hook)
    optimizer.param_groups[0]["momentum"] = 0.8
    assert identity(hook) != stepped


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_learning_rates_are_no_part_of_the_identity_where_steps_read_them(
    make: type[torch.optim.SGD] | type[torch.optim.AdamW],
) -> None:
    optimizer = make([torch.ones(2, requires_grad=True)], lr=0.1)

    def hook(_: torch.Tensor) -> None:
        optimizer.step()

    before = identity(hook)
    optimizer.param_groups[0]["lr"] = 0.2
    assert identity(hook) == before


def test_learning_rates_of_other_optimizers_count() -> None:
    optimizer = torch.optim.RMSprop([torch.ones(2, requires_grad=True)], lr=0.1)

    def hook(_: torch.Tensor) -> None:
        optimizer.step()

    before = identity(hook)
    optimizer.param_groups[0]["lr"] = 0.2
    assert identity(hook) != before


def test_what_refers_to_itself_is_read_to_the_end() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    before = identity(scaled_by(loop))
    loop[0] = 2
    assert identity(scaled_by(loop)) != before
