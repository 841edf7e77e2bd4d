# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Who gets a lock that belongs to a backward: its descendants at once, in whichever thread they run; others later."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch

from retrograd.frontend.autograd.engine.family_lock import FamilyLock, _hand_on

SECONDS = 30


class Nested(torch.autograd.Function):
    """A backward inside a backward, ``depth`` of them; beyond 60, PyTorch's engine changes threads."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, lock: FamilyLock, threads: set[int]) -> torch.Tensor:
        ctx.depth, ctx.lock, ctx.threads = depth, lock, threads
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        ctx.threads.add(threading.get_ident())
        with ctx.lock, torch.enable_grad():
            if ctx.depth:
                leaf = torch.ones(2, requires_grad=True)
                Nested.apply(leaf, ctx.depth - 1, ctx.lock, ctx.threads).sum().backward()  # type: ignore[no-untyped-call]
        return gradient, None, None, None


def test_descendants_take_it_in_other_threads() -> None:
    lock = FamilyLock()
    threads: set[int] = set()
    x = torch.ones(2, requires_grad=True)

    def run() -> None:
        with lock:
            Nested.apply(x, 70, lock, threads).sum().backward()  # type: ignore[no-untyped-call]

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert len(threads) > 1


def test_others_wait() -> None:
    lock = FamilyLock()
    order: list[str] = []

    def run() -> None:
        with lock:
            order.append("other")

    thread = threading.Thread(target=run)
    with lock:
        thread.start()
        with lock:
            order.append("inner")
        thread.join(0.1)
        order.append("outer")
    thread.join(SECONDS)
    assert order == ["inner", "outer", "other"]


def test_who_holds_it_is_counted_once() -> None:
    """PyTorch 2.11 counts no reference of its own, and gives one back."""
    value, key = object(), "retrograd.test"
    before = sys.getrefcount(value)
    _hand_on(key, value)
    assert sys.getrefcount(value) == before + 1
    _hand_on(key, None)
    assert sys.getrefcount(value) == before


def test_an_error_gives_it_back() -> None:
    lock = FamilyLock()
    with pytest.raises(ValueError, match="inside"), lock:
        raise ValueError("inside")
    test = threading.Thread(target=lock.__enter__)
    test.start()
    test.join(SECONDS)
    assert not test.is_alive()
