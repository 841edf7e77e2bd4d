# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Two processes that train one model over gloo under ``retrograd.enable()``: compiled, and gradients as eager's."""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import retrograd

SECONDS = 300
# In front of the name of a wrapper whose gradients are right.
RIGHT = "as eager: "


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


def shard(model: Any, reshard: bool) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


WRAPPERS: dict[str, Any] = {
    "ddp": DistributedDataParallel,
    "fsdp1": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    "fsdp2": lambda model: shard(model, False),
    "fsdp2, resharded": lambda model: shard(model, True),
}


def train(wrapper: Any, rank: int) -> list[str]:
    """Two models side by side, with a step that accumulates; returns what the compiled one is told."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), Block(6), Block(6), nn.Linear(6, 2))
    models = [wrapper(copy.deepcopy(plain)) for _ in range(2)]
    before = len(retrograd.explain_recompiles())
    for step in range(5):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(5, 4)
        contexts: list[AbstractContextManager[None]] = [contextlib.nullcontext(), retrograd.enable()]
        for model, context in zip(models, contexts, strict=True):
            if step != 3:
                model.zero_grad()
            with context:
                model(x).square().mean().backward()
        for eager, ours in zip(*[model.parameters() for model in models], strict=True):
            torch.testing.assert_close(whole(ours.grad), whole(eager.grad), rtol=2e-5, atol=1e-6)
    return [str(entry) for entry in retrograd.explain_recompiles()[before:]]


def whole(tensor: Any) -> torch.Tensor:
    result: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return result


def main(store: str, rank: int) -> None:
    """Train with each wrapper in turn, and print the name of each that trained as eager."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for name, wrapper in WRAPPERS.items():
        # Without what the wrapper before had compiled: compiled autograd's cache goes by the graph alone.
        torch._C._dynamo.compiled_autograd.clear_cache()
        entries = train(wrapper, rank)
        assert entries and not any("runs eagerly" in entry for entry in entries), (name, entries)
        print(f"{RIGHT}{name}", flush=True)
    dist.destroy_process_group()


def test_training_is_eagers(tmp_path: Path) -> None:
    """With every wrapper in the same two processes: to start these takes longer than to train."""
    command = [sys.executable, "-W", "ignore", __file__, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=SECONDS)[0] for process in ranks]
    finally:
        # One that failed leaves the other waiting.
        for process in ranks:
            process.kill()
            process.wait()
    expected = [f"{RIGHT}{name}" for name in WRAPPERS]
    assert [[line for line in text.splitlines() if line in expected] for text in told] == [expected] * 2, "\n".join(
        told
    )
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(told)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    # Gloo's threads may outlive the group.
    os._exit(0)
