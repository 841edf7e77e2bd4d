# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compiling within a memory budget: the plan that liveness proposes is checked against what IREE will allocate.

Liveness only approximates IREE's scratch memory. IREE states it after its stream phase, which takes a fraction of a
compilation; where it exceeds the budget, a plan of lower peak is taken from the curve, and where none is left, plainer
flags are, from the plan of least recomputation on: a plan with plain flags may recompute less than one with fast flags
that takes more memory.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from retrograd.dialects import ir
from retrograd.pipelines.analysis.memory_size import resolve_memory_size
from retrograd.pipelines.analysis.pareto import InfeasibleBudget
from retrograd.pipelines.executable import Executable, measure_scratch
from retrograd.pipelines.interface import TensorPort
from retrograd.pipelines.lowering import lower_to_linalg
from retrograd.pipelines.staged import (
    ExecutableStore,
    Progress,
    StagedModule,
    build_executable,
    executable_parts,
    stage_module,
)
from retrograd.pipelines.targets import Target
from retrograd.pipelines.transforms.bwd_export_results import SUFFIX

# How far liveness, brought to the scale of IREE's peak for `default`, may overestimate a peak.
_SLACK = 1.1
# As many points of lowest peak are tried before a budget is called infeasible: any of them may have the least.
_LEAST = 3
# A module, its executable, and whether that was in the store.
Built = tuple[StagedModule, Executable, bool]
_UNLIMITED = 2**62
_FORWARD, _BACKWARD = "forward", "backward"


@dataclass
class _Search:
    """A limit in bytes, the planned peaks of the curve, what to report; how many plans were refused, and peaks that
    the least feasible budget is among."""

    limit: int
    points: list[int]
    facts: dict[str, Any]
    refused: int = 0
    least: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class BudgetBuilder:
    """Builds an imported module, given as text with locations, within a budget."""

    source: str
    context: ir.Context
    target: Target
    versions: dict[str, str]
    progress: Progress
    store: ExecutableStore | None

    def build(self, budget: int | float) -> Built:
        """The cheapest of the curve's plans whose peak is at most ``budget``: bytes, or (float) a fraction of the peak
        of ``default``. Also returns whether the executable was in the store.

        Raises:
            InfeasibleBudget: no plan stays within it; says the least peak that one has.
            PipelineError, CompileError: the module cannot be compiled.
        """
        default = self._stage("default")
        limit = resolve_memory_size(budget, step_peak(default, self._scratch(default, self.target)))
        curve = self._stage("budget", _UNLIMITED).partition["pareto"]
        search = _Search(limit, [int(peak) for peak, _ in curve], {"memory_budget": limit, "pareto": curve})
        # Plain flags pack no operands of matrix products, which makes slower code and takes less scratch memory.
        plain = replace(self.target, ladder=self.target.ladder[-1:])
        for target in (self.target, plain):
            found = self._search(search, target, default)
            if found is not None:
                return found
        raise InfeasibleBudget(limit, min(search.least))

    def _search(self, search: _Search, target: Target, default: StagedModule) -> Built | None:
        """The first plan that fits with the flags of ``target``: ``default``, then the curve from its cheap end."""
        limit, points = search.limit, search.points
        whole = step_peak(default, self._scratch(default, target))
        if whole <= limit:
            # What recomputes nothing and stays within the budget cannot be bettered.
            free = {"policy": "budget", "recompute_seconds": 0.0, "recompute_seconds_gap": 0.0}
            found, whole = self._compile(default, target, search, free)
            if found is not None:
                return found
        ratio = whole / max(1, default.partition["peak_bytes_planned"])
        pending = [p for p in points if p * ratio <= limit * _SLACK]
        refused: dict[int, int] = {}
        while pending or (pending := [p for p in points[-_LEAST:] if p not in refused]):
            point = pending[0]
            staged = self._stage("budget", point)
            peak = step_peak(staged, self._scratch(staged, target))
            if peak <= limit:
                found, peak = self._compile(staged, target, search, {})
                if found is not None:
                    return found
            refused[point] = peak
            search.refused += 1
            pending = [p for p in pending[1:] if p <= point - (peak - limit) // 2]
        search.least += [whole, *(refused[p] for p in points[-_LEAST:])]
        return None

    def _compile(
        self, staged: StagedModule, target: Target, search: _Search, facts: dict[str, Any]
    ) -> tuple[Built | None, int]:
        """Compile to the end, also giving the peak; ``None`` if that took other flags, which raised it over the
        limit."""
        executable, cached = build_executable(staged, target, self.versions, self.progress, self.store)
        peak = step_peak(staged, executable.transients)
        if peak > search.limit:
            return None, peak
        facts = {**staged.partition, **search.facts, "plans_refused": search.refused, **facts}
        return (replace(staged, partition=facts), executable, cached), peak

    def _stage(self, policy: str, budget: int | None = None) -> StagedModule:
        with self.context, ir.Location.unknown():
            return stage_module(ir.Module.parse(self.source), policy, self.progress, budget)

    def _scratch(self, staged: StagedModule, target: Target) -> dict[str, int]:
        """Scratch bytes of each function, from the store where they are known."""
        parts = {"kind": "scratch", **executable_parts(staged, target, self.versions)}
        found = self.store.get(parts) if self.store is not None else None
        if found is not None:
            return {str(name): int(size) for name, size in json.loads(found).items()}
        with self.progress.phase("measure memory"):
            scratch = measure_scratch(lower_to_linalg(staged.source.encode()), target)
        if self.store is not None:
            self.store.put(parts, json.dumps(scratch).encode())
        return scratch


def step_peak(staged: StagedModule, scratch: dict[str, int]) -> int:
    """The peak of live bytes of a step: results, residuals, gradients and scratch memory, in each half; parameters and
    inputs are not counted.

    The forward's results stay alive through the backward (the caller holds the outputs, autograd the residuals);
    updated buffers are copied to their place and freed before it.
    """
    forward, backward = staged.function(_FORWARD), staged.function(_BACKWARD)
    kept = sum(port_bytes(r) for r in forward.results if r.role != "mutation")
    return max(
        sum(map(port_bytes, forward.results)) + scratch.get(_FORWARD + SUFFIX, 0),
        kept + sum(map(port_bytes, backward.results)) + scratch.get(_BACKWARD + SUFFIX, 0),
    )


def port_bytes(port: TensorPort) -> int:
    """Bytes of a contiguous tensor."""
    bits = re.match(r"[a-z]*?(\d+)", port.dtype)
    return prod(port.shape) * (int(bits[1]) // 8 if bits else 1)
