# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which packed values a captured backward may take for itself."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from retrograd.frontend.autograd.hooks.packed_values import take_packed


def test_what_nobody_else_has_is_taken() -> None:
    packed = (torch.ones(3), (torch.ones(2, 3).t(), torch.ones(()), torch.float32), torch.ones(4))
    tensor, (turned, scale, dtype), other = take_packed(packed, {0, 1})
    assert [t.numel() for t in (packed[0], *packed[1][:2])] == [0, 0, 0]
    assert other is packed[2] and other.numel() == 4
    assert (tensor.shape, turned.shape, turned.stride(), scale.shape) == ((3,), (3, 2), (1, 3), ())
    assert dtype is torch.float32
    assert bool(tensor.all() and turned.all() and scale.all())


def keep(values: list[Any]) -> Any:
    return values[0]


def keep_container(values: list[Any]) -> Any:
    values[0] = (values[0],)
    return values[0]


def refer(values: list[Any]) -> Any:
    return weakref.ref(values[0])


def save(values: list[Any]) -> Any:
    """C++ has it: what the product saves is the tensor itself."""
    return torch.ones(3, requires_grad=True) * values[0]


def differentiate(values: list[Any]) -> None:
    values[0].requires_grad_()


def compress(values: list[Any]) -> None:
    values[0] = values[0].to_sparse()


@pytest.mark.parametrize("have", [keep, keep_container, refer, save, differentiate, compress])
def test_what_others_know_stays(have: Any) -> None:
    values: list[Any] = [torch.ones(3)]
    known = have(values)
    packed = tuple(values)
    values.clear()
    taken: list[Any] = take_packed(packed, {0})
    assert taken[0] is packed[0]
    found = taken[0][0] if isinstance(taken[0], tuple) else taken[0]
    assert found.numel() == 3
    del known
