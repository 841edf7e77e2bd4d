# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which tensors are copied for a call of a compiled function, wherever they begin in memory."""

from __future__ import annotations

import torch

from retrograd.runtime.programs.copied_call import MOST_BYTES, is_worth_copying


def test_small_tensors_are_copied_wherever_they_begin() -> None:
    """Parts of others, such as the rows of a split, begin at no multiple of what IREE takes."""
    whole = torch.arange(40.0)
    parts = [whole[1:4], whole[7:8], whole[:2]]
    assert any(part.data_ptr() % 64 for part in parts)
    assert is_worth_copying(parts, [torch.ones(3)])
    assert not is_worth_copying([*parts, whole[::2]], [torch.ones(3)])
    assert not is_worth_copying([whole, torch.empty(MOST_BYTES)], [])
    assert not is_worth_copying([torch.zeros(3)._neg_view()], [])
    assert not is_worth_copying([whole, 3], [])
