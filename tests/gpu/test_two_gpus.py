# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Two processes that train over NCCL, a GPU each: what `tests/integration/test_two_processes.py` does over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import rank_programs
import torch
from rank_programs import GROUPS, find_surprises
from rank_runner import RANKS, open_runner


def setup_module() -> None:
    """Without two GPUs these tests fail, so that nobody takes them for passed."""
    if torch.cuda.device_count() < RANKS:
        pytest.fail(f"{torch.cuda.device_count()} CUDA devices: these tests need {RANKS}")


@pytest.mark.parametrize("group", GROUPS)
def test_training_is_eagers(group: str, tmp_path: Path) -> None:
    with open_runner(rank_programs.__name__) as runner:
        ranks = runner.run(rank_programs.__name__, [group, "cuda"], tmp_path, seconds=560)
    for number, rank in enumerate(ranks):
        assert not find_surprises(group, rank.text), f"rank {number}:\n{rank.text}"
    assert [rank.code for rank in ranks] == [0, 0], "\n".join(rank.text for rank in ranks)
