# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decides about ops that do not compile: they become eager islands, or the compilation is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from retrograd.frontend.islands.island_choice import (
    REMEDY,
    Island,
    can_be_island,
    find_uncompiled,
    name_uncompiled,
    plan_islands,
    refuse_uncompiled,
)
from retrograd.frontend.islands.island_graphs import extract_islands
from retrograd.frontend.preparation.importer import ImportFailure
from retrograd.frontend.python.source_locations import source_place
from retrograd.frontend.python.user_lines import warn_user
from retrograd.frontend.sizes.size_nodes import find_heads
from retrograd.pipelines.devices.targets import Target
from retrograd.pipelines.infra.errors import CompileError
from retrograd.pipelines.stages.failing_ops import FailedOp, find_failed_ops
from retrograd.pipelines.stages.staged import ExecutableStore, StagedModule
from retrograd.runtime.steps.islands import EagerIsland, Layout

# Each finds at least one op more; ops that fail alone are all found in the first.
_ROUNDS = 16
_Result = TypeVar("_Result")


class EagerIslandWarning(UserWarning):
    """Some ops are not compiled and run in torch; said once for each compilation."""


@dataclass(frozen=True)
class Fallback:
    """How a graph is compiled for ``target`` where ops of it cannot be; ``store`` remembers which ones these were.

    ``kind`` is ``island`` or ``error``; ``versions`` are those of the toolchain. ``known`` says why which nodes are to
    be islands in any case, by name; then nothing is remembered, nor said.
    """

    kind: str
    target: Target
    versions: Mapping[str, str]
    store: ExecutableStore | None
    known: Mapping[str, str] | None = None

    def compile(
        self,
        graph_module: torch.fx.GraphModule,
        stage: Callable[[Sequence[Island]], StagedModule],
        compile_staged: Callable[[StagedModule], _Result],
    ) -> tuple[_Result, list[EagerIsland]]:
        """Returns what ``compile_staged`` makes of what ``stage`` makes of the graph, with as few ops in islands as it
        takes, and the islands.

        Raises:
            CaptureError, PipelineError, CompileError: the graph cannot be compiled, or not without islands where these
                are not wanted.
        """
        if self.kind == "error":
            islands = plan_islands(graph_module, refuse_uncompiled(graph_module, self.target.kinds))
            staged = stage(islands)
            try:
                compiled = compile_staged(staged)
            except CompileError as error:
                raise self._name_failed(graph_module, staged, error) from None
            return compiled, self._settle(graph_module, islands, {})
        known = find_uncompiled(graph_module, self.target.kinds)
        reasons = {**known, **self._recall(graph_module), **(self.known or {})}
        for _ in range(_ROUNDS):
            islands = plan_islands(graph_module, reasons)
            failure: Exception
            try:
                staged = stage(islands)
                result = compile_staged(staged)
            except ImportFailure as error:
                failure, found = error, {error.node: f"import: {error.message}"}
            except CompileError as error:
                if not error.replay:
                    # No tool failed: the functions' types are refused, which islands leave as they are.
                    raise
                if _is_of_open_sizes(error, graph_module):
                    raise _name_open_ops(error, graph_module) from None
                failure, found = error, _name_ops(find_failed_ops(staged, self.target, error), staged.merged)
            else:
                return result, self._settle(graph_module, islands, reasons)
            able = {n.name for n in graph_module.graph.nodes if can_be_island(n)}
            more = {name: reason for name, reason in found.items() if name in able and name not in reasons}
            if not more:
                raise failure
            reasons |= more
        raise failure

    def _name_failed(
        self, graph_module: torch.fx.GraphModule, staged: StagedModule, error: CompileError
    ) -> CompileError:
        """``error`` of a tool with the op that it is about, its line and what to do; as it is where no op is found."""
        if not error.replay:
            return error
        if _is_of_open_sizes(error, graph_module):
            return _name_open_ops(error, graph_module)
        found = _name_ops(find_failed_ops(staged, self.target, error), staged.merged)
        named = name_uncompiled(graph_module, found)
        return error if named is None else CompileError(error.phase, named, error.log, error.replay, REMEDY)

    def _settle(
        self, graph_module: torch.fx.GraphModule, islands: Sequence[Island], reasons: Mapping[str, str]
    ) -> list[EagerIsland]:
        if not islands:
            return []
        if self.known is None and any(island.uncompiled for island in islands):
            self._tell(graph_module, islands, reasons)
        return [
            EagerIsland(
                program.module,
                [Layout(*layout) for layout in program.layouts],
                str(island),
                program.sizes,
                is_library=island.is_library,
                by_values=island.by_values,
            )
            for island, program in zip(islands, extract_islands(graph_module, islands), strict=True)
        ]

    def _tell(self, graph_module: torch.fx.GraphModule, islands: Sequence[Island], reasons: Mapping[str, str]) -> None:
        if self.store is not None:
            self.store.put(self._key(graph_module), json.dumps(dict(reasons)).encode())
        shown = ", ".join(dict.fromkeys(op for island in islands for op in island.uncompiled))
        warn_user(
            f"not compiled, and run in torch: {shown[:300]}; explain() says why, and fallback='error' refuses instead",
            EagerIslandWarning,
        )

    def _recall(self, graph_module: torch.fx.GraphModule) -> dict[str, str]:
        """Why which nodes could not be compiled when this graph was compiled before."""
        found = self.store.get(self._key(graph_module)) if self.store is not None else None
        return {} if found is None else {str(k): str(v) for k, v in json.loads(found).items()}

    def _key(self, graph_module: torch.fx.GraphModule) -> dict[str, str]:
        lines = [f"{n.format_node()} {_types(n.meta.get('val'))}" for n in graph_module.graph.nodes]
        return {"kind": "islands", "graph": "\n".join(lines), "target": repr(self.target), **self.versions}


def _name_ops(failed: Sequence[FailedOp], merged: Mapping[str, str]) -> dict[str, str]:
    """The nodes of the captured graph that failed ops are, with reasons; those among them that were found to compute
    the same."""
    found = {}
    for op in failed:
        for value in op.values:
            for name in (value, value.rpartition(".")[0], *(n for n, kept in merged.items() if kept == value)):
                found[name] = op.message
    return found


def _is_of_open_sizes(error: CompileError, graph_module: torch.fx.GraphModule) -> bool:
    """Whether open sizes failed in iree-compile, for how ops are joined: no one op is to blame."""
    return error.phase != "lower" and bool(find_heads(graph_module.graph))


def _name_open_ops(error: CompileError, graph_module: torch.fx.GraphModule) -> CompileError:
    """``error`` of iree-compile with the ops of the line that it names, and what to do about open sizes."""
    ops = dict.fromkeys(
        str(node.meta.get("original_aten", node.target)).removesuffix(".default")
        for node in graph_module.graph.nodes
        if can_be_island(node) and (place := source_place(node.stack_trace)) and f"{place}:" in error.message
    )
    named = f" (of {', '.join(ops)}, with open sizes)" if ops else " (with open sizes)"
    remedy = "leave these axes out of dynamic_shapes (dynamic=False for torch.compile): their sizes are then fixed"
    return CompileError(error.phase, f"{error.message[:600]}{named}", error.log, error.replay, remedy)


def _types(value: Any) -> list[str]:
    leaves = torch.utils._pytree.tree_leaves(value)
    return [f"{t.dtype}{list(t.shape)}" for t in leaves if isinstance(t, torch.Tensor)]
