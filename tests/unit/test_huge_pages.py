# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Large pages for large results: what is asked for them, and that values stay."""

import mmap
from typing import Any

import pytest
import torch

from retrograd.contract.tensors import TensorSpec
from retrograd.runtime.programs import tensors
from retrograd.runtime.programs.tensors import LEAST_BYTES, advise_huge_pages


def record(monkeypatch: pytest.MonkeyPatch, answer: int = 0) -> list[tuple[int, int, int]]:
    """Record what the system is asked."""
    asked: list[tuple[int, int, int]] = []

    def advise(*arguments: Any) -> int:
        asked.append(arguments)
        return answer

    monkeypatch.setattr(tensors, "_find_advise", lambda: advise)
    return asked


def test_whole_pages_inside_of_the_storage_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record(monkeypatch)
    tensor = torch.empty(LEAST_BYTES, dtype=torch.uint8)
    assert advise_huge_pages(tensor)
    ((start, length, advice),) = asked
    assert start % (2 << 20) == length % (2 << 20) == 0 < length
    assert tensor.data_ptr() <= start
    assert start + length <= tensor.data_ptr() + tensor.numel()
    assert advice == getattr(mmap, "MADV_HUGEPAGE", 14)


def test_values_stay() -> None:
    tensor = torch.arange(LEAST_BYTES // 4, dtype=torch.int32)
    advise_huge_pages(tensor)
    assert torch.equal(tensor, torch.arange(LEAST_BYTES // 4, dtype=torch.int32))


def test_what_holds_no_large_page_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record(monkeypatch)
    assert not advise_huge_pages(torch.empty(100))
    assert not advise_huge_pages(torch.empty(LEAST_BYTES, device="meta"))
    assert not asked


def test_a_system_that_refuses_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record(monkeypatch, -1)
    assert not advise_huge_pages(torch.empty(LEAST_BYTES))
    assert len(asked) == 1
    monkeypatch.setattr(tensors, "_find_advise", lambda: None)
    assert not advise_huge_pages(torch.empty(LEAST_BYTES))


@pytest.mark.parametrize(("rows", "times"), [(1, 0), (LEAST_BYTES // 4096, 1)])
def test_large_results_alone(rows: int, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record(monkeypatch)
    spec = TensorSpec("y", "output", (rows, 1024), "float32")
    (result,) = tensors.allocate_results([spec])
    assert result.shape == (rows, 1024)
    assert len(asked) == times
