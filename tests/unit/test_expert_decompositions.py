# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products of groups of rows, as decompositions, against a loop over the groups; nothing is compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.decompositions.matrices import experts
from retrograd.frontend.decompositions.table import decomposition_table

SIZES = [(16, 4), (7, 3), (5, 8), (1, 1), (64, 5), (3, 1)]


def offsets(rows: int, groups: int, how: str) -> Tensor:
    cuts = torch.sort(torch.randint(0, rows + 1, (groups,))).values
    if how == "all":
        cuts[-1] = rows
    elif how == "first":
        cuts[:] = rows
    elif how == "none":
        cuts[:] = 0
    return cuts.to(torch.int32)


@pytest.mark.parametrize("how", ["all", "first", "none", "some"])
@pytest.mark.parametrize(("rows", "groups"), SIZES)
def test_groups_are_multiplied_and_summed(rows: int, groups: int, how: str) -> None:
    """Groups that are empty, groups of all rows, and rows of no group."""
    torch.manual_seed(rows + groups)
    ends = offsets(rows, groups, how)
    x, w, g = (torch.randn(*s, dtype=torch.float64) for s in ((rows, 6), (groups, 6, 5), (rows, 5)))
    out, of_rows, of_matrices, start = torch.zeros_like(g), torch.zeros_like(x), torch.zeros_like(w), 0
    for i, end in enumerate(ends.tolist()):
        out[start:end] = x[start:end] @ w[i]
        of_rows[start:end] = g[start:end] @ w[i].T
        of_matrices[i] = x[start:end].T @ g[start:end]
        start = end
    torch.testing.assert_close(experts.multiply_groups(x, w, ends), out)
    torch.testing.assert_close(experts.grouped_mm(x, w, ends), out)
    torch.testing.assert_close(experts.grouped_mm(x.t(), g, ends), of_matrices)
    found = experts.grouped_mm_backward(x, w, ends, g)
    torch.testing.assert_close(found, (of_rows, of_matrices))


@pytest.mark.parametrize(("rows", "groups"), SIZES)
def test_blocks_hold_each_row_once(rows: int, groups: int) -> None:
    torch.manual_seed(rows)
    blocks = experts.Blocks.of(offsets(rows, groups, "all"), rows)
    assert sorted(blocks.row[blocks.filled].tolist()) == list(range(rows))
    assert blocks.group.shape[0] <= 2 * groups
    numbers = torch.arange(rows, dtype=torch.float64).unsqueeze(-1)
    assert torch.equal(blocks.spread(blocks.gather(numbers)), numbers)


def test_other_forms_are_left_alone() -> None:
    x, w, ends = torch.randn(4, 3), torch.randn(2, 3, 5), torch.tensor([2, 4], dtype=torch.int32)
    assert experts.grouped_mm(x, w) is NotImplemented
    assert experts.grouped_mm(x, w, ends, torch.randn(2, 5)) is NotImplemented
    assert experts.grouped_mm(x, w, ends, out_dtype=torch.float64) is NotImplemented
    assert experts.grouped_mm(torch.randn(2, 4, 3), w, ends) is NotImplemented
    assert experts.multiply_groups(x[:0], w, ends) is NotImplemented
    assert experts.grouped_mm_backward(x[:0], w, ends, torch.randn(0, 5)) is NotImplemented


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_histograms(dtype: torch.dtype) -> None:
    """Whole numbers, as experts are counted, the ends of the range among them; others; and what is outside of it."""
    torch.manual_seed(0)
    whole, other = torch.randint(0, 8, (50,)).to(dtype), torch.randn(5, 40, dtype=dtype)
    for values, arguments in ((whole, (8, 0, 7)), (whole, (7, 0, 7)), (other, (13, -1, 1.5)), (other[:0], (3, 0, 1))):
        assert torch.equal(experts.histc(values, *arguments), torch.histc(values, *arguments))
    # Of a range that is that of the numbers.
    assert experts.histc(other, 5) is NotImplemented
    assert experts.histc(other, experts.MOST_PAIRS) is NotImplemented


def test_ops_of_a_library_are_found_by_name_once_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "NAMED", {"corpus_test::grouped": experts.multiply_groups})
    assert experts.find_named() == []
    with torch.library._scoped_library("corpus_test", "FRAGMENT") as library:
        library.define("grouped(Tensor rows, Tensor matrices, Tensor offsets) -> Tensor")
        library.impl("grouped", lambda rows, matrices, offsets: rows @ matrices[0], "CompositeExplicitAutograd")
        (entry,) = experts.find_named()
        assert entry.op is torch.ops.corpus_test.grouped.default
        arguments = torch.randn(4, 3), torch.randn(2, 3, 5), torch.tensor([2, 4])
        graph = make_fx(torch.ops.corpus_test.grouped, decomposition_table(), "fake")(*arguments)
        assert entry.op not in {node.target for node in graph.graph.nodes}
