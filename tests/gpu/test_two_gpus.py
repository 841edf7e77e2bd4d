# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Two processes that train over NCCL, a GPU each: what `tests/integration/test_two_processes.py` does over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import rank_collectives
import rank_programs
import torch
from rank_programs import GROUPS, find_surprises
from rank_runner import RANKS, open_runner
from torch import nn

import retrograd


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


def test_collectives_that_are_ops_give_eagers_gradients(tmp_path: Path) -> None:
    with open_runner(rank_collectives.__name__) as runner:
        ranks = runner.run(rank_collectives.__name__, ["cuda"], tmp_path, seconds=560)
    assert [rank.code for rank in ranks] == [0, 0], "\n".join(rank.text for rank in ranks)
    for rank in ranks:
        lines = dict(line.split(": ", 1) for line in rank.text.splitlines() if ": " in line)
        assert set(rank_collectives.PROGRAMS) <= set(lines), rank.text
        assert lines["hooks, overlap"].endswith("wait x16"), rank.text
        assert "all_reduce(4)" in lines["hooks, buckets"], rank.text
        assert "moved: 1 times all_gather" in lines["sharded, prefetched"], rank.text


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_process_trains_on_both(order: tuple[int, int]) -> None:
    """Programs of both devices take turns, the current device being number 0: each runs in its own device's context, in
    the forward and in autograd's threads."""
    torch.backends.cuda.matmul.allow_tf32 = False
    steps = []
    for number in order:
        torch.manual_seed(number)
        model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 8)).to(f"cuda:{number}")
        x = torch.randn(16, 32, device=f"cuda:{number}")
        steps.append((model, x, retrograd.compile_backward(model, (x,), verify=False)))
    for _ in range(5):
        for model, x, compiled in steps:
            model.zero_grad()
            compiled(x).square().sum().backward()
            found = [parameter.grad for parameter in model.parameters()]
            model.zero_grad()
            model(x).square().sum().backward()
            for gradient, parameter in zip(found, model.parameters(), strict=True):
                torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-4)
    assert torch.cuda.current_device() == 0
