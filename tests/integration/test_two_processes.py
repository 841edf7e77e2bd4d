# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Two processes that train one model over gloo: gradients as eager's, and compiled where ``rank_programs`` says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import rank_collectives
import rank_faults
import rank_programs
from rank_programs import GROUPS, ONE_OF_EACH, find_surprises
from rank_runner import Rank, RankRunner, open_runner


@pytest.fixture(scope="module")
def runner() -> Iterator[RankRunner]:
    with open_runner(rank_programs.__name__, rank_faults.__name__, rank_collectives.__name__) as opened:
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


@pytest.mark.long
def test_processes_that_do_not_agree_on_joined_reductions_run_eagerly(runner: RankRunner, tmp_path: Path) -> None:
    ranks = run_fault(runner, "disagree", tmp_path)
    assert [rank.code for rank in ranks] == [0, 0], "\n".join(rank.text for rank in ranks)
    first, second = (rank.text.splitlines()[-1] for rank in ranks)
    seconds = rank_faults.SECONDS_LATE
    assert first == f"{rank_programs.EAGER}: process 1 compiled nothing alike within {seconds} seconds"
    assert second == f"{rank_programs.EAGER}: RuntimeError: this process cannot compile it"


@pytest.mark.long
@pytest.mark.parametrize("name", ["later, buckets", "sizes"])
def test_processes_whose_sizes_or_times_differ_are_eagers(name: str, runner: RankRunner, tmp_path: Path) -> None:
    ranks = run_fault(runner, name, tmp_path)
    assert [rank.code for rank in ranks] == [0, 0], "\n".join(rank.text for rank in ranks)
    assert [rank.text.splitlines()[-1] for rank in ranks] == [rank_programs.COMPILED] * 2


@pytest.mark.long
def test_an_error_of_a_program_that_was_compiled_ahead_of_time_says_which_process(
    runner: RankRunner, tmp_path: Path
) -> None:
    first, second = run_fault(runner, "ahead of time", tmp_path)
    assert "ValueError: this data cannot be read" in second.text
    assert [rank.code for rank in (first, second)] == [rank_faults.FAILED] * 2, first.text + second.text
    assert "in a collective of compiled code, in the process of rank 0 of 2" in first.text


def test_collectives_of_compiled_code(runner: RankRunner, tmp_path: Path) -> None:
    """What each process did in the last backward of each program, whose gradients are eager's: one test, as all of them
    run in the same two processes."""
    ranks = runner.run(rank_collectives.__name__, ["cpu"], tmp_path)
    assert [rank.code for rank in ranks] == [0, 0], "\n".join(rank.text for rank in ranks)
    lines = [[line.partition(": ") for line in rank.text.splitlines()] for rank in ranks]
    for rank in lines:
        own = {name: how for name, _, how in rank if name in rank_collectives.PROGRAMS}
        check_that_hooks_start_early(own)
        check_that_hooks_are_joined(own)
        check_that_a_gathering_starts_early(own)


def check_that_hooks_start_early(own: dict[str, str]) -> None:
    """Sixteen gradients, that hooks average: in eager's order each is waited for at once."""
    assert own["hooks"].startswith("compiled: compute all_reduce(1) compute wait all_reduce(1) wait")
    assert own["hooks, overlap"] == "compiled: " + "compute all_reduce(1) " * 16 + "wait x16"
    assert own["hooks, one rank"] == "compiled"


def check_that_hooks_are_joined(own: dict[str, str]) -> None:
    ran, *joined = own["hooks, buckets"].split("; ")
    assert ran == (
        "compiled: compute all_reduce(3) compute all_reduce(1) compute all_reduce(1) compute all_reduce(1) "
        "compute all_reduce(3) compute all_reduce(1) compute all_reduce(1) compute all_reduce(1) "
        "compute all_reduce(4) wait x16"
    )
    assert joined == [
        "joined: 3 times all_reduce (avg), 80 bytes in one bucket",
        "joined: 3 times all_reduce (avg), 72 bytes in one bucket",
        "joined: 4 times all_reduce (avg), 168 bytes in one bucket",
    ]
    # Of each hook the second follows the first; it is joined with the first of the next.
    ran, *joined = own["hooks, one depends on the other"].split("; ")
    assert ran.startswith("compiled: compute all_reduce(1) compute wait compute all_reduce(2) wait x2 ")
    assert ran.count("all_reduce(2)") == 15 and ran.count("all_reduce(1)") == 2
    assert joined and all(line.startswith("joined: 2 times") for line in joined)


def check_that_a_gathering_starts_early(own: dict[str, str]) -> None:
    """Three layers in parts: the backward gathers the weights of the last two, and reduces three gradients."""
    reduced, moved = "@backward: 3 times reduce_scatter (avg)", "moved: 1 times all_gather one stage earlier, 144 bytes"
    gathered, forward = "@backward: 2 times all_gather", "@forward: 3 times all_gather"
    late = (
        "all_gather(1) compute reduce_scatter(1) all_gather(1) compute wait compute reduce_scatter(1) wait "
        "compute reduce_scatter(1) wait x3"
    )
    assert own["sharded"].split("; ") == [late, gathered, reduced, forward]
    # Of 144 bytes each; there is memory for none.
    assert own["sharded, no memory"] == own["sharded"]
    early = (
        "all_gather(1) x2 compute reduce_scatter(1) compute wait compute reduce_scatter(1) wait "
        "compute reduce_scatter(1) wait x3"
    )
    assert own["sharded, prefetched"].split("; ") == [early, gathered, reduced, forward, moved]
    assert own["sharded, dynamo"].startswith("compute reduce_scatter(1) compute reduce_scatter(1) compute")
