# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-prefetch-gathers``: what a stage needs of other processes is gathered while the stage before it runs."""

from __future__ import annotations

from dataclasses import field

from retrograd.contract.collectives import ALL_GATHER, PREFETCH_BYTES
from retrograd.dialects import builders, ir
from retrograd.pipelines.analysis.hooks.collectives import find_moves
from retrograd.pipelines.infra.functions import functions
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.collective_notes import add_collective_notes
from retrograd.pipelines.transforms.helpers.hook_reader import ReadHooks, has_collectives, read_hooks
from retrograd.pipelines.transforms.torch.bwd_schedule_hooks import apply_order


class BwdPrefetchGathers(ModulePass):
    """Moves each start of an ``all_gather`` in front of the stage before it: the run of computation between two
    effects. It passes other collectives, accumulations and hooks, if it takes nothing of theirs, but no code that
    communicates by itself; what is computed for it alone goes with it.

    ``limit_bytes`` bounds what is gathered early and alive at a time, and so what this adds to the peak. For functions
    that are in their order already.
    """

    description = "Start gathering one stage earlier"

    limit_bytes: int = field(default=PREFETCH_BYTES, metadata={"help": "bytes gathered early at a time; 0 moves none"})

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            if not has_collectives(func):
                continue
            read = read_hooks(func, self.name)
            gatherings = [n for n in read.graph.effects if _gathers(read, n)]
            moves, order = find_moves(read.graph, gatherings, self.limit_bytes)
            if moves:
                apply_order(func, read, order)
                size = sum(move.bytes for move in moves)
                add_collective_notes(module, [f"moved: {len(moves)} times all_gather one stage earlier, {size} bytes"])


def _gathers(read: ReadHooks, task: int) -> bool:
    start = read.start_of(task)
    return start is not None and builders.read_collective(start).collective == ALL_GATHER
