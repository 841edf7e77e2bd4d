# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Constant tensors of a graph keep literals of their own in the program."""

from __future__ import annotations

import torch

from retrograd.frontend.preparation.importer import KeptTensors


def test_a_tensor_at_the_address_of_another_has_no_literal_yet() -> None:
    """torch-mlir's tracker of weak references gives it the other's."""
    tracker = KeptTensors()
    for number in range(100):
        known = tracker.track(torch.full((2,), number))
        assert known.is_empty
        known.value = number


def test_a_tensor_that_is_used_twice_has_one_literal() -> None:
    tracker, tensor = KeptTensors(), torch.zeros(2)
    tracker.track(tensor).value = "literal"
    assert tracker.track(tensor).value == "literal"
