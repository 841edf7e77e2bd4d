# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Records the value of every node of a captured graph in eager: slices of a compiled program get these as arguments,
and are compared with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import TangentAOTInput
from torch.fx import GraphModule, Interpreter, Node

from retrograd.frontend.doors.capture import CapturedGraph
from retrograd.frontend.layers.random_ops import DRAW_SEED
from retrograd.frontend.libraries.run_as import LibraryInterpreter
from retrograd.frontend.verification.first_comparison import relative_error, to_double, tolerance_of
from retrograd.frontend.verification.judgement import SLACK, InDouble
from retrograd.frontend.verification.rounding import find_tolerances

# A value that is zero but for rounding, as the mean of what was centred, is measured against what it was computed from.
_OF_OPERANDS = 1e-2


@dataclass(frozen=True)
class EagerValues:
    """The tensors of a captured graph by the names of their nodes, from one run op by op, and how far others may be
    from them by rounding, relative to their norm.

    A value is allowed what its own dtype is, and what those are that it is computed from: rounded in bfloat16 elsewhere
    than eager does, they differ by that, whatever they are widened to. Where values part by more, ``precise`` is asked
    for those of a run in float64: what cancels out, as the gradient of a bias in front of a batch norm, may be as far
    from eager's as verification allows it, which is a multiple of how far eager itself is from float64.
    """

    tensors: Mapping[str, torch.Tensor]
    tolerances: Mapping[str, float]
    precise: Callable[[], Mapping[str, torch.Tensor]] = dict

    def find_difference(
        self, names: Sequence[str], results: Sequence[torch.Tensor], operands: Mapping[str, Sequence[str]]
    ) -> str | None:
        """Describe the first of ``results`` that differs from its value by more than rounding, and by how much.
        ``operands`` has the names of the values that one is computed from."""
        for name, result in zip(names, results, strict=True):
            value = self.tensors[name]
            floor = max((_norm(self.tensors[o]) for o in operands.get(name, ())), default=0.0) * _OF_OPERANDS
            error = relative_error(result, value, floor)
            if not error <= self.tolerances[name] and not self._is_noise(name, result):
                return (
                    f"{name}, {str(value.dtype).removeprefix('torch.')} {list(value.shape)}, differs from eager's by "
                    f"{error:.2e} (relative norm; {self.tolerances[name]:.0e} is allowed)"
                )
        return None

    def _is_noise(self, name: str, result: torch.Tensor) -> bool:
        """Whether a result is no further from eager's value than rounding may have it, by how far that is from the
        value in float64."""
        value, precise = self.tensors[name], self.precise().get(name)
        if precise is None or not value.is_floating_point() or result.shape != value.shape:
            return False
        found, eager, exact = (to_double(tensor) for tensor in (result, value, precise))
        # What is no number is no noise: neither side of this is true then.
        return bool((found - eager).norm() <= SLACK * (eager - exact).norm())


def find_primals(captured: CapturedGraph, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The primals of a captured graph: the model's parameters and buffers as they are, then the tensor arguments."""
    named = {**dict(captured.module.named_parameters()), **dict(captured.module.named_buffers())}
    state = [named[name] for name in (*captured.joint.params_spec, *captured.joint.buffers_spec)]
    leaves = torch.utils._pytree.tree_leaves((tuple(args), dict(kwargs)))
    return [*state, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]


def record_values(graph_module: GraphModule, primals: Sequence[torch.Tensor]) -> EagerValues:
    """Run a joint graph in eager on ``primals``, with tangents and a seed drawn from torch's default generator. The
    primals are only read; the generator is as before afterwards."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        given = iter(primals)
        arguments = [
            _draw_tangent(node) if isinstance(node.meta["desc"], TangentAOTInput) else next(given).detach()
            for node in placeholders
        ]
        return record_run(graph_module, arguments)


def record_run(graph_module: GraphModule, arguments: Sequence[Any]) -> EagerValues:
    """Run a graph in eager on its arguments, which are only read."""
    recorder, random_state = _Recorder(graph_module), torch.get_rng_state()
    with torch.no_grad():
        recorder.run(*arguments, enable_io_processing=False)
    tolerances = find_tolerances(graph_module.graph, tolerance_of)
    precise = cache(partial(_run_precise, graph_module, list(arguments), random_state))
    return EagerValues(recorder.tensors, {node.name: tolerance for node, tolerance in tolerances.items()}, precise)


def _run_precise(
    graph_module: GraphModule, arguments: Sequence[Any], random_state: torch.Tensor
) -> Mapping[str, torch.Tensor]:
    """The values of a graph in float64; none where an op has no float64, or gives something else there."""
    if any(_is_of_its_type(node) for node in graph_module.graph.nodes):
        return {}
    recorder = _PreciseRecorder(graph_module)
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        torch.set_rng_state(random_state)
        try:
            recorder.run(*arguments, enable_io_processing=False)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            # As for a rerun of a first call: ops of libraries for one dtype, say.
            return {}
    return recorder.tensors


def _is_of_its_type(node: Node) -> bool:
    """Whether a node draws numbers of its type, or reads the bits of one."""
    if node.target is torch.ops.aten.view.dtype:
        return True
    return node.target is not DRAW_SEED and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


class _Keeping(Interpreter):
    """Runs a graph and keeps what each node gives."""

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__(graph_module, garbage_collect_values=False)
        self.tensors: dict[str, torch.Tensor] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.tensors[n.name] = value
        return value


class _Recorder(_Keeping, LibraryInterpreter):
    """Does so as torch runs the graph."""


class _PreciseRecorder(_Keeping, InDouble):
    """Does so in float64."""


def _draw_tangent(node: Node) -> torch.Tensor:
    value = node.meta["val"]
    return torch.randn(value.shape, dtype=value.dtype, device=value.device)


def _norm(tensor: torch.Tensor) -> float:
    return float(to_double(tensor).norm()) if tensor.is_floating_point() or tensor.is_complex() else 0.0
