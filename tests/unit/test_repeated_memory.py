# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Writes to arguments whose elements are one in memory."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from retrograd.runtime.arguments.repeated_memory import filling_repeated


def call(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Writes rows to the first argument, as a whole, and gives it and the second."""
    first, second = tensors
    first.copy_(second)
    return [first, second]


@pytest.mark.parametrize("shape", [(3, 1), (1, 4), (1, 1), (4,)])
def test_what_is_filled_is_written_once(shape: tuple[int, ...]) -> None:
    base = torch.randn(shape)
    filled, number = base.expand(3, 4), torch.full((3, 4), 2.0)
    written, other = filling_repeated(call, (0,))([filled, number])
    assert written is filled
    assert other is number
    assert bool((base == 2).all())
    assert filled.stride() == base.expand(3, 4).stride()


def test_rows_that_are_not_one_in_memory_may_differ() -> None:
    base, rows = torch.zeros(3, 1), torch.arange(3.0).reshape(3, 1).expand(3, 4)
    filling_repeated(call, (0,))([base.expand(3, 4), rows.contiguous()])
    assert base.flatten().tolist() == [0, 1, 2]


def test_what_contradicts_itself_is_refused_as_in_eager() -> None:
    base = torch.zeros(3, 1)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        filling_repeated(call, (0,))([base.expand(3, 4), torch.randn(3, 4)])
    assert not base.any()


def test_other_arguments_are_those_of_the_caller() -> None:
    tensors = [torch.zeros(3, 4), torch.randn(3, 1).expand(3, 4)]
    written, _ = filling_repeated(call, (0,))(tensors)
    assert written is tensors[0]
    assert torch.equal(tensors[0], tensors[1])
