# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Results in arguments are tensors with storage of their own, which keep the memory and nothing else of it."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch

from retrograd.runtime.programs.placed import Placed, copy_out, place_results, read_placed


def test_what_a_program_says_is_read() -> None:
    found = read_placed(["2:0:64:128", "3:1:0:16384"], ["3"])
    assert found == (Placed(2, 0, 64, 128), Placed(3, 1, 0, 16384, True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.bool])
def test_a_result_has_storage_of_its_own_in_an_argument(dtype: torch.dtype) -> None:
    host = torch.zeros(4, 64, dtype=torch.float32)
    like = torch.empty(2, 8, dtype=dtype, device="meta")
    results = [torch.empty(3), like]
    place_results([Placed(1, 0, 128, like.nbytes)], [host], results)
    found = results[1]
    assert (found.shape, found.stride(), found.dtype) == (like.shape, like.stride(), like.dtype)
    assert found.data_ptr() == host.data_ptr() + 128
    assert found.untyped_storage().nbytes() == like.nbytes
    assert not found._is_view()
    found.fill_(1)
    values = host.view(torch.uint8).reshape(-1)
    assert bool(values[128 : 128 + like.nbytes].any())
    assert not bool(values[:128].any())
    assert not bool(values[128 + like.nbytes :].any())


def test_it_keeps_the_memory_of_the_argument() -> None:
    host, results = torch.ones(1024), [torch.empty(16), torch.empty(16)]
    address = host.data_ptr()
    place_results([Placed(0, 0, 64, 64), Placed(1, 0, 128, 64)], [host], results)
    del host
    gc.collect()
    assert all(bool(result.eq(1).all()) for result in results)
    assert [result.data_ptr() - address for result in results] == [64, 128]


def test_what_is_copied_has_memory_of_its_own() -> None:
    host, own = torch.arange(64.0), [torch.empty(16, device="meta"), torch.empty(16, device="meta"), torch.empty(16)]
    placed = [Placed(0, 0, 0, 64), Placed(1, 0, 64, 64, True), Placed(2, 0, 128, 64, True)]
    results = [*own]
    place_results(placed, [host], results)
    copy_out(placed, own, [partial(torch.empty, 16)] * 3, results)
    host.fill_(-1)
    # The first lies there, the second got memory, and the third had some.
    assert bool(results[0].eq(-1).all())
    assert torch.equal(results[1], torch.arange(16.0, 32.0))
    assert torch.equal(results[2], torch.arange(32.0, 48.0))
    assert results[2] is own[2]
