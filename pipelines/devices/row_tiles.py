# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How CUDA code reduces long rows whose length is no multiple of a warp, as rules for iree-compile.

A workgroup takes a row, each thread adds up its own elements of it, four at a time, and the threads' sums are combined
last (Harris, "Optimizing Parallel Reduction in CUDA", 2007). iree-compile does so by itself where warps divide the row,
or where its length is not known, and masks the end; any other row, a vocabulary of 50,257, it gives to one thread.
"""

from __future__ import annotations

import re

from retrograd.pipelines.devices.kernel_rules import WARP, Loop, Rule, write_action, write_matcher

_WARPS, _THREAD = 8, 4
_STEP = _WARPS * WARP * _THREAD
"""The elements of a row that a workgroup reads at a time."""

SHORTEST_ROW = 512
"""Below this a thread for each row is as good: there are rows enough to fill the device, or little to do."""

_RANKS = range(1, 5)
_ROW = re.compile(r"tensor<(?:\d+x)*(\d+)x(?:f32|bf16|f16)>")


def find_rows(linalg: str) -> list[int]:
    """The lengths of long rows that warps do not divide, of the tensors in a module's text."""
    lengths = {int(length) for length in set(_ROW.findall(linalg))}
    return sorted(length for length in lengths if length >= SHORTEST_ROW and length % WARP)


def row_rules(linalg: str) -> list[Rule]:
    """The rules for reductions of such rows in a module's text."""
    return [_make_rule(length, rank) for length in find_rows(linalg) for rank in _RANKS]


# Elementwise ops on the same rows are part of the kernel, and are walked through as the reduction is.
_BESIDE = """    %kernel = "transform.get_parent_op"(%op) <{{op_name = "func.func"}}> : (!transform.any_op) -> !transform.any_op
    %beside = transform.collect_matching @{maps} in %kernel : (!transform.any_op) -> !transform.any_op
    %walk = transform.param.constant #iree_gpu.lowering_config<{{{walk}}}> -> !transform.any_param
    transform.annotate %beside "lowering_config" = %walk : !transform.any_op, !transform.any_param"""  # noqa: E501


def _make_rule(length: int, rank: int) -> Rule:
    """That for reductions of ``rank`` loops, the last one along rows of ``length``."""
    rows: list[Loop] = [("parallel", 0)] * (rank - 1)
    reduces, maps, spread = (f"{name}_{length}_{rank}" for name in ("reduces", "maps", "spread"))
    zeros, axes, ones = [0] * (rank - 1), [*range(rank)], [1] * (rank - 1)
    shares = (
        f"lane_basis = [{[*ones, WARP]}, {axes}], subgroup_basis = [{[*ones, _WARPS]}, {axes}], "
        f"thread = {[*zeros, _THREAD]}"
    )
    texts = (
        write_matcher(reduces, [*rows, ("reduction", length)], whole=True),
        write_matcher(maps, [*rows, ("parallel", length)]),
        write_action(
            spread,
            f"{shares}, partial_reduction = {[*zeros, _STEP]}, workgroup = {[*ones, 0]}",
            f"pipeline = #iree_gpu.pipeline<VectorDistribute> workgroup_size = [{_WARPS * WARP}, 1, 1] "
            f"subgroup_size = {WARP}",
            _BESIDE.format(maps=maps, walk=f"{shares}, serial = {[*zeros, _STEP]}"),
        ),
    )
    return Rule(reduces, spread, "\n".join(texts))
