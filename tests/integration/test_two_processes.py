# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Two processes that train one model over gloo: gradients as eager's, and compiled where ``rank_programs`` says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import rank_faults
import rank_programs
from rank_programs import GROUPS, ONE_OF_EACH, find_surprises
from rank_runner import Rank, RankRunner, open_runner


@pytest.fixture(scope="module")
def runner() -> Iterator[RankRunner]:
    with open_runner(rank_programs.__name__, rank_faults.__name__) as opened:
        yield opened


@pytest.mark.short_cases(ONE_OF_EACH)
@pytest.mark.parametrize("group", [ONE_OF_EACH, *GROUPS])
def test_training_is_eagers(group: str, runner: RankRunner, tmp_path: Path) -> None:
    """With every wrapper in the same two processes: to start these takes longer than to train."""
    ranks = runner.run(rank_programs.__name__, [group, "cpu"], tmp_path)
    for number, rank in enumerate(ranks):
        assert not find_surprises(group, rank.text), f"rank {number}:\n{rank.text}"
    assert [rank.code for rank in ranks] == [0, 0], "\n".join(rank.text for rank in ranks)


def run_fault(runner: RankRunner, name: str, folder: Path) -> list[Rank]:
    """Run a program in which the second process is at fault; both have to end by themselves."""
    ranks = runner.run(rank_faults.__name__, [name, "cpu"], folder)
    assert all(rank.code >= 0 for rank in ranks), "\n".join(rank.text for rank in ranks)
    return ranks


def test_an_error_in_one_process_ends_both_and_says_which(runner: RankRunner, tmp_path: Path) -> None:
    first, second = run_fault(runner, "hook", tmp_path)
    assert second.code == rank_faults.FAILED, second.text
    assert "ValueError: this hook fails" in second.text and "rank 1 of 2" in second.text
    # What the reducer waited for did not come.
    assert first.code == rank_faults.FAILED, first.text
    assert "rank 0 of 2" in first.text


@pytest.mark.long
def test_a_process_that_fails_before_its_backward_does_not_leave_the_other_waiting(
    runner: RankRunner, tmp_path: Path
) -> None:
    first, second = run_fault(runner, "forward", tmp_path)
    assert "ValueError: this forward fails" in second.text
    assert [rank.code for rank in (first, second)] == [rank_faults.FAILED] * 2, first.text + second.text
    assert "rank 0 of 2" in first.text


@pytest.mark.long
def test_one_process_compiles_longer_and_goes_on_in_eager(runner: RankRunner, tmp_path: Path) -> None:
    first, second = run_fault(runner, "late", tmp_path)
    assert [rank.code for rank in (first, second)] == [0, 0], first.text + second.text
    assert first.text.splitlines()[-1] == rank_programs.COMPILED
    assert second.text.splitlines()[-1] == f"{rank_programs.EAGER}: RuntimeError: this process cannot compile it"
