# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The partition that was decided on MLIR, carried out on the captured FX graph as well.

AOTAutograd gets an ordinary forward and backward pair, and its runtime wrappers look after mutated inputs, aliases and views. Its
compiler callbacks return calls of the compiled functions: values are matched by FX name, nothing is imported a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors
from torch._functorch.partitioners import _extract_fwd_bwd_modules

from retrograd.frontend.capture import CapturedGraph

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class CompiledFunction:
    """A compiled function: FX names of its arguments and results, in order, and how to call it on tensors.

    ``copied`` are arguments of which it gives copies, because what they hold is overwritten before the backward.
    """

    arguments: tuple[str, ...]
    results: tuple[str, ...]
    copied: frozenset[str]
    call: Callable[[Tensors], Tensors]


def bind(captured: CapturedGraph, forward: CompiledFunction, backward: CompiledFunction) -> Callable[[Tensors], Tensors]:
    """A differentiable function of the graph's primals (params, buffers, tensor inputs) that gives the model's tensor outputs.

    Must be called while the stack that the graph was captured in is open.
    """

    def partition(joint: torch.fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_options: Any) -> Any:
        return split_joint(joint, backward, num_fwd_outputs)

    def compile_forward(graph_module: torch.fx.GraphModule, _inputs: Any) -> Any:
        return make_boxed_func(graph_caller(graph_module, forward, restride=captured.num_forward_outputs))

    def compile_backward(graph_module: torch.fx.GraphModule, _inputs: Any) -> Any:
        return make_boxed_func(graph_caller(graph_module, backward, restride=0))

    wrapped = aot_compile_joint_with_descriptors(
        captured.joint, partition_fn=partition, fw_compiler=compile_forward, bw_compiler=compile_backward
    )
    return lambda tensors: wrapped(*tensors)


def split_joint(
    joint: torch.fx.GraphModule, backward: CompiledFunction, num_forward_outputs: int
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """The forward and backward of ``joint`` that save what the compiled backward takes."""
    nodes = {node.name: node for node in joint.graph.nodes}
    saved = [nodes[name] for name in backward.arguments if not name.startswith("tangents")]
    forward_graph, backward_graph = _extract_fwd_bwd_modules(joint, saved, [], num_fwd_outputs=num_forward_outputs)
    return forward_graph, backward_graph


def graph_caller(
    graph_module: torch.fx.GraphModule, function: CompiledFunction, *, restride: int
) -> Callable[..., list[Any]]:
    """A function with the graph's signature that runs ``function``; the first ``restride`` results get the strides of the trace."""
    places = {node.name: i for i, node in enumerate(graph_module.graph.find_nodes(op="placeholder"))}
    (output,) = graph_module.graph.find_nodes(op="output")
    nodes = torch.utils._pytree.arg_tree_leaves(*output.args)
    taken = [places[name] for name in function.arguments]
    index = {name: i for i, name in enumerate(function.results)}
    # Each result of the graph: an argument handed through, or a result of the compiled function.
    handed = {name: place for name, place in places.items() if name not in function.copied}
    through = [handed.get(node.name) if isinstance(node, torch.fx.Node) else None for node in nodes]
    computed = [
        index[node.name] if isinstance(node, torch.fx.Node) and node.name not in handed else None for node in nodes
    ]
    strides = [_strides_of(node) if i < restride else None for i, node in enumerate(nodes)]

    def call(*tensors: torch.Tensor) -> list[Any]:
        results = function.call([tensors[i] for i in taken])
        out: list[Any] = []
        for argument, result, stride in zip(through, computed, strides, strict=True):
            if argument is not None:
                out.append(tensors[argument])
            else:
                out.append(None if result is None else _with_strides(results[result], stride))
        return out

    return call


def _strides_of(node: Any) -> tuple[int, ...] | None:
    """Strides to restore: those of a traced result that was dense but not contiguous."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.is_contiguous():
        return None
    return tuple(int(s) for s in value.stride())


def _with_strides(tensor: torch.Tensor, stride: tuple[int, ...] | None) -> torch.Tensor:
    if stride is None:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
