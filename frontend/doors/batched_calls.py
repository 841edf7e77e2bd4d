# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Backwards for a batch of gradients at once: ``torch.autograd.grad(..., is_grads_batched=True)`` and
``torch.autograd.functional.jacobian(..., vectorize=True)`` call a backward once, on tensors that hide an axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_BATCHING = torch._C._dispatch_key_parse("VmapMode")


def is_batching() -> bool:
    """Whether PyTorch maps over gradients meanwhile."""
    return torch._C._dispatch_tls_is_dispatch_key_included(_BATCHING)


def call_by_rows(call: Callable[[list[Any]], list[Any]], tensors: list[Any]) -> list[Any]:
    """``call`` for each row of what comes as a batch, since compiled code has no rules for the axis that is hidden.
    What it gives is put together to batches. ``call`` may be mapped itself: maps may stand in one another."""
    level = torch._C._vmapmode_decrement_nesting() + 1
    try:
        # What an outer map alone hides an axis of is given one of size 1 here.
        whole = {i: torch._remove_batch_dim(t, level, 1, 0) for i, t in enumerate(tensors) if _is_batched(t)}
        count = next((t.shape[0] for t in whole.values() if t.shape[0] != 1), 1)
        # `tensors` holds them until the last row is done, so that no row overwrites what the next one takes.
        rows = [
            [whole[i].expand(count, *whole[i].shape[1:])[row] if i in whole else t for i, t in enumerate(tensors)]
            for row in range(count)
        ]
        results = [call(row) for row in rows]
        together = [
            torch.stack(each) if isinstance(each[0], torch.Tensor) else each[0] for each in zip(*results, strict=True)
        ]
    finally:
        torch._C._vmapmode_increment_nesting()
    return [torch._add_batch_dim(each, 0, level) if isinstance(each, torch.Tensor) else each for each in together]


def _is_batched(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(value)
