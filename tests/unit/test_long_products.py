# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which products of long sums are computed in pieces, and in which."""

from __future__ import annotations

import pytest

from retrograd.pipelines.analysis.layout.cpu_products import LEAST_INNER, LEAST_LONG_VOLUME, LEAST_SIDE, find_pieces


@pytest.mark.parametrize("inner", [6144, 6151, 8192, 12564, 16384, 30522, 32000, 50257, 50265, 128256, 151936])
def test_the_pieces_are_the_whole_sum_in_order(inner: int) -> None:
    pieces = find_pieces(1024, inner, 768)
    assert len(pieces) > 1
    assert [start for start, _ in pieces] == [sum(terms for _, terms in pieces[:n]) for n in range(len(pieces))]
    assert sum(terms for _, terms in pieces) == inner
    lengths = {terms for _, terms in pieces[:-1]}
    assert len(lengths) == 1
    assert 0 < pieces[-1][1] <= lengths.pop() <= 3200


def test_pieces_are_as_long_where_a_number_near_by_divides_the_sum() -> None:
    assert find_pieces(1024, 50257, 768) == [(1733 * n, 1733) for n in range(29)]
    assert find_pieces(1024, 8192, 384) == [(1024 * n, 1024) for n in range(8)]


@pytest.mark.parametrize(
    ("rows", "inner", "columns"),
    [
        (1024, LEAST_INNER - 1, 1024),
        (LEAST_SIDE - 1, 8192, 1024),
        (1024, 8192, LEAST_SIDE - 1),
        (LEAST_SIDE, LEAST_LONG_VOLUME // LEAST_SIDE**2 - 1, LEAST_SIDE),
        (0, 8192, 1024),
    ],
)
def test_what_is_computed_whole(rows: int, inner: int, columns: int) -> None:
    assert find_pieces(rows, inner, columns) == []
