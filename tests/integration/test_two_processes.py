# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Two processes that train one model over gloo: gradients as eager's, and compiled where ``rank_programs`` says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import rank_programs
from rank_programs import GROUPS, find_surprises
from rank_runner import run_ranks


@pytest.mark.parametrize("group", GROUPS)
def test_training_is_eagers(group: str, tmp_path: Path) -> None:
    """With every wrapper in the same two processes: to start these takes longer than to train."""
    ranks = run_ranks(Path(rank_programs.__file__), [group, "cpu"], tmp_path)
    for number, rank in enumerate(ranks):
        assert not find_surprises(group, rank.text), f"rank {number}:\n{rank.text}"
    assert [rank.code for rank in ranks] == [0, 0], "\n".join(rank.text for rank in ranks)
