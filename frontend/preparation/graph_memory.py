# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How much memory a traced graph takes when torch runs it, and how much there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from retrograd.frontend.doors.outputs import hint


def peak_bytes(graph_module: torch.fx.GraphModule) -> int:
    """The most bytes that are alive at a time when the graph runs op by op, its arguments apart, at the sizes of the
    trace. A storage lives until the last use of the values that look at it."""
    nodes = [*graph_module.graph.nodes]
    storages = {node: _storages(node.meta.get("val")) for node in nodes}
    last: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for place, node in enumerate(nodes):
        for used in (node, *node.all_input_nodes):
            for storage, size in storages[used].items():
                last[storage] = place
                sizes.setdefault(storage, size if used is node and node.op == "call_function" else 0)
    ends: dict[int, list[int]] = {}
    for storage, place in last.items():
        ends.setdefault(place, []).append(storage)
    alive, live, most = set[int](), 0, 0
    for place, node in enumerate(nodes):
        for storage in storages[node].keys() - alive:
            alive.add(storage)
            live += sizes[storage]
        most = max(most, live)
        live -= sum(sizes[storage] for storage in ends.get(place, ()) if storage in alive)
    return most


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on ``device``; ``None`` where nobody tells."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    limits = [_read_available(), _read_group()]
    return min((limit for limit in limits if limit is not None), default=None)


def _storages(value: Any) -> dict[int, int]:
    """The storages of a traced value, by identity, and the bytes that each has."""
    storages = [leaf.untyped_storage() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return {storage._cdata: hint(storage.nbytes()) for storage in storages}


def _read_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def _read_group() -> int | None:
    """Read how many bytes are left of the memory that this process's control group (v2) is allowed."""
    folder = Path("/sys/fs/cgroup")
    try:
        allowed, taken = (
            (folder / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current")
        )
    except OSError:
        return None
    return int(allowed) - int(taken) if allowed.isdigit() and taken.isdigit() else None
