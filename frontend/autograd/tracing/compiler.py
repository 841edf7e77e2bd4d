# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compiled autograd's tracer, with the nodes left in the order of the trace and then put in the engine's order.

PyTorch's own passes move hooks about by kind, which brings them near to eager's order but not to it: unpack hooks come
before a node's pre-hooks, and nodes are visited depth first. Within one autograd node the trace is in eager's order
already, so only whole nodes are moved here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch._dynamo.compiled_autograd import AutogradCompilerInstance, extract_bw_module

from retrograd.frontend.autograd.engine.engine_order import capture_order, engine_order, read_node_graph
from retrograd.frontend.autograd.engine.trials import Trial
from retrograd.frontend.traceable.fake_modes import forget_tensors


@dataclass(frozen=True)
class RuntimeCapture:
    """A whole backward as compiled autograd gives it: ``graph_module`` takes (inputs, sizes, scalars, hooks,
    packed_data), calls autograd nodes as functions, and is in the order in which eager executes it.

    ``nodes`` are the names of the autograd nodes in the order of execution.
    """

    graph_module: torch.fx.GraphModule
    nodes: tuple[str, ...]


# Under this key a node of a capture has the number of the autograd node that it is part of.
NODE_NUMBER = "retrograd_node"


@dataclass(frozen=True)
class BackwardCall:
    """One call of ``backward()``: its roots, and the tensors asked for (none: all leaves)."""

    roots: Sequence[Any]
    inputs: Sequence[Any]

    def find_node(self, number: int) -> Any:
        """PyTorch's node of this number in a capture."""
        graph = read_node_graph(self.roots, self.inputs)
        return graph.nodes[capture_order(graph)[number] - 1]


class RunsEagerly(Exception):
    """A captured backward is to run in PyTorch's engine; nothing of it has run."""


class NeedsEngine(RunsEagerly):
    """Raised for a backward that is to run in PyTorch's engine each time: its capture, run eagerly, is not enough."""


class TakesTurn(RunsEagerly):
    """A backward that is compiled is to run in PyTorch's engine this time, and to be timed for ``trial``."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.trial = trial


class FreesTooEarly(Exception):
    """A backward was not captured before, and its graph would free what it saved before it is known whether it can be
    compiled; nothing of it has run."""


class RunsCompiled(Exception):
    """A captured backward is compiled, and needs nothing of what PyTorch's graph saved but what it is given; nothing of
    it has run."""


@dataclass(slots=True)
class BackwardRun:
    """One run of a captured backward.

    ``is_held``: PyTorch's graph keeps what it saved for this run's sake, and is to free it after it. ``can_restart``:
    it is kept, so that PyTorch's engine could run the backward. ``takes_turn``: it may be one that runs in PyTorch's
    engine to be timed. ``repeats``: one of the same graph was recorded. ``was_eager`` is set where it ran eagerly
    nevertheless, ``was_recorded`` where its results are those of a recording, ``trial`` where it is to be known how
    long it takes.
    """

    call: BackwardCall
    is_held: bool
    can_restart: bool
    takes_turn: bool = False
    repeats: bool = False
    was_eager: bool = False
    was_recorded: bool = False
    trial: Trial | None = None


class OrderedCompiler(AutogradCompilerInstance):
    """Traces one backward; ``receive`` gets the capture and returns what runs in its place, ``run`` is what PyTorch
    calls with the numbers of the sizes that are used, that function, and the arguments for it."""

    def __init__(
        self, call: BackwardCall, receive: Callable[[RuntimeCapture], Callable[..., Any]], run: Callable[..., list[Any]]
    ) -> None:
        super().__init__(lambda graph: receive(RuntimeCapture(graph, tuple(self._names))))
        # What PyTorch calls however a capture ends.
        self.close = self._leave
        self._call, self._run = call, run
        self._names: list[str] = []
        # For each node that was traced: its number, and how many FX nodes there were before its first.
        self._starts: list[tuple[int, int]] = []
        self._tail: int | None = None
        self._tracing = False
        # The sizes that the graph uses, by number.
        self._sizes: list[int] = []

    def begin_capture(self, *args: Any, **kwargs: Any) -> Any:
        result = super().begin_capture(*args, **kwargs)
        self._tracing = True
        return result

    def _leave(self) -> None:
        """Leave what a capture entered. PyTorch leaves the context of a compilation only where that succeeds; else the
        garbage collector does, in the middle of another compilation, say, whose own is gone then."""
        self.stack.close()
        if "compile_context" in vars(self):
            self.compile_context.__exit__(None, None, None)

    def set_node_origin(self, node_name: str, nodecall_index: int, pyobj: Any) -> None:
        super().set_node_origin(node_name, nodecall_index, pyobj)
        if self._tracing:
            self._starts.append((nodecall_index, self._size()))
            self._names.append(node_name.rpartition("::")[2])

    def proxy_call_aot_backward(
        self,
        pinputs: Sequence[Any],
        psaved_tensors: Sequence[Any],
        saved_tensors: Sequence[torch.Tensor],
        pctx: Any,
        ctx: Any,
        *rest: Any,
    ) -> Sequence[Any]:
        """Paste the graph of a backward that was compiled ahead, as PyTorch does, and bring what waits on another
        device (``retrograd.offload``) to where that graph expects it."""
        sizes = len(ctx._get_compiled_autograd_symints())
        expected = extract_bw_module(ctx._forward_cls).graph.find_nodes(op="placeholder")[sizes:]  # type: ignore[attr-defined]
        # Tangents stand behind what is saved.
        devices = [node.meta["val"].device for node in expected[: len(saved_tensors)]]
        there: Sequence[Any] = bring_to(devices, saved_tensors, psaved_tensors)
        return super().proxy_call_aot_backward(pinputs, there, saved_tensors, pctx, ctx, *rest)

    def end_capture(self, outputs: Any) -> Any:
        self._tail = self._size()
        _, function = super().end_capture(outputs)
        forget_tensors(self.fake_tensor_mode)
        # The tracer is part of cycles, which the collector finds late: the graph is not to live as long.
        self._call = BackwardCall((), ())
        return partial(self._run, self._sizes), function

    def remove_unused_sizes(self) -> set[int]:
        used = super().remove_unused_sizes()
        self._sizes = sorted(used)
        return used

    def move_graph_nodes_to_cuda(self, graph: torch.fx.Graph) -> list[int]:
        """Do nothing: that is for Inductor's CUDA graphs."""
        return []

    def _size(self) -> int:
        return len(self.fx_tracer.graph.nodes)

    # PyTorch's passes, in the order in which end_capture calls them: the first makes way for ours.

    def delay_unpack_hook_nodes(self) -> None:
        """Put the nodes in the engine's order."""
        numbers = [number for number, _ in self._starts]
        ranks = _engine_ranks(self._call, dict(zip(numbers, self._names, strict=True)))
        if ranks is None:
            return
        nodes = list(self.fx_tracer.graph.nodes)
        bounds = [start for _, start in self._starts] + [self._tail]
        head, tail = nodes[: bounds[0]], nodes[bounds[-1] :]
        segments = [nodes[a:b] for a, b in pairwise(bounds)]
        for number, segment in zip(numbers, segments, strict=True):
            for node in segment:
                node.meta[NODE_NUMBER] = number
        order = sorted(range(len(segments)), key=lambda i: ranks[numbers[i]])
        if _reorder(self.fx_tracer.graph, [head, *(segments[i] for i in order), tail]):
            self._names = [self._names[i] for i in order]

    def reorder_tensor_pre_hook_nodes(self) -> None:
        """Do nothing; the module's docstring says why."""

    reorder_pre_hook_nodes_to_schedule_asap = reorder_tensor_pre_hook_nodes
    reorder_accumulate_grad_nodes = reorder_tensor_pre_hook_nodes
    reorder_pre_hook_nodes_to_mimic_eager = reorder_tensor_pre_hook_nodes
    reorder_post_acc_grad_hook_nodes = reorder_tensor_pre_hook_nodes
    reorder_post_hook_nodes = reorder_tensor_pre_hook_nodes


def bring_to(
    devices: Sequence[torch.device], tensors: Sequence[torch.Tensor], proxies: Sequence[torch.fx.Proxy]
) -> list[torch.fx.Proxy]:
    """Proxies of the tensors on these devices: of a copy where a tensor lies elsewhere."""
    copy = torch.ops.aten._to_copy.default
    return [
        proxy
        if tensor.device == device
        else proxy.tracer.create_proxy("call_function", copy, (proxy,), {"device": device})
        for device, tensor, proxy in zip(devices, tensors, proxies, strict=True)
    ]


def _engine_ranks(call: BackwardCall, names: dict[int, str]) -> dict[int, int] | None:
    """For each node's number in the capture, its place in the engine's order; None where the graph that Python sees is
    not the one captured."""
    graph = read_node_graph(call.roots, call.inputs)
    captured = capture_order(graph)
    if any(number >= len(captured) or not _same(graph.names[captured[number]], name) for number, name in names.items()):
        return None
    places = {node: place for place, node in enumerate(engine_order(graph))}
    return {number: places[node] for number, node in enumerate(captured)}


def _same(mine: str, captured: str) -> bool:
    return mine.rpartition("::")[2] == captured


def _reorder(graph: torch.fx.Graph, segments: Sequence[Sequence[torch.fx.Node]]) -> bool:
    """Put the segments in this order; says whether that can be. A segment whose arguments come later waits for them
    with all that is left of it (a sum of two gradients, of which the trace met the second first)."""
    placed: set[torch.fx.Node] = set()
    waiting: dict[torch.fx.Node, list[list[torch.fx.Node]]] = {}
    order: list[torch.fx.Node] = []
    for segment in segments:
        ready = [list(reversed(segment))]
        while ready:
            rest = ready.pop()
            while rest:
                missing = next((a for a in rest[-1].all_input_nodes if a not in placed), None)
                if missing is not None:
                    waiting.setdefault(missing, []).append(rest)
                    break
                node = rest.pop()
                placed.add(node)
                order.append(node)
                ready.extend(reversed(waiting.pop(node, [])))
    if waiting:
        return False
    for node in order:
        graph._root.prepend(node)
    return True
