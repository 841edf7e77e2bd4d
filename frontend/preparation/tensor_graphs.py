# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A traced graph made ready for the importer: a function of tensors and open sizes, with constants on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import SymFloat, SymInt
from torch._functorch._aot_autograd import descriptors as d
from torch.utils._python_dispatch import _disable_current_modes

from retrograd.frontend.doors.deferred_code import make_graph_module
from retrograd.frontend.layers.random_ops import find_seed
from retrograd.frontend.sizes.size_nodes import SIZE, find_heads


class SeedAOTInput(d.AOTInput):
    """Describes the seed of the random ops as AOTAutograd's descriptors do the other arguments."""


@dataclass(frozen=True)
class SizeAOTInput(d.AOTInput):
    """Describes a size that differs from call to call."""

    name: str

    def expr(self) -> str:
        return self.name


def on_tensors(graph_module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, list[Any]]:
    """A copy of the graph on tensors alone, without numbers and ``None`` among its arguments and outputs, and the
    descriptors of the outputs that stay."""
    graph = torch.fx.Graph()
    val_map: dict[torch.fx.Node, torch.fx.Node] = {}
    output = graph.graph_copy(graph_module.graph, val_map)
    (old,) = graph_module.graph.find_nodes(op="output")
    kept = [
        (node, desc)
        for node, desc in zip(flatten_output(output), old.meta["desc"], strict=True)
        if isinstance(node, torch.fx.Node) and not isinstance(node.meta.get("val"), SymInt)
    ]
    for source, target in val_map.items():
        target.meta = dict(source.meta)
    graph.output(tuple(node for node, _ in kept))
    for node in graph.find_nodes(op="placeholder"):
        # Sizes that Dynamo hands in, and which the graph was specialized on.
        if not node.users and SIZE not in node.meta and isinstance(node.meta.get("val"), int | SymInt | SymFloat):
            graph.erase_node(node)
    for node in graph.nodes:
        if node.op == "call_function" and node.kwargs.get("device") is not None:
            # The module is compiled per target; a device here would pin it to the one it was traced on.
            node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
        if node.target is torch.ops.prims.device_put.default:
            # All of a module is on one device: what moves a tensor copies it.
            node.target, node.args, node.kwargs = torch.ops.aten.clone.default, node.args[:1], {}
    _take_seed(graph)
    _take_sizes(graph)
    # The constants among the module's attributes come along with the graph.
    on_tensors = make_graph_module(graph_module, graph)
    _bring_constants(on_tensors)
    return on_tensors, [desc for _, desc in kept]


def _bring_constants(graph_module: torch.fx.GraphModule) -> None:
    """Have constants of the user's that are on a device on the CPU, where the importer reads their values: in the fake
    tensor mode that is on while it does, what is copied from a device has none."""
    for target in {str(node.target) for node in graph_module.graph.find_nodes(op="get_attr")}:
        constant = getattr(graph_module, target)
        if isinstance(constant, torch.Tensor) and constant.device.type != "cpu":
            with _disable_current_modes():
                setattr(graph_module, target, constant.detach().cpu())


def _take_seed(graph: torch.fx.Graph) -> None:
    """The seed becomes an argument of the function: whoever calls it draws it."""
    seed = find_seed(graph)
    if seed is not None:
        seed.op, seed.target = "placeholder", seed.name
        seed.meta["desc"] = SeedAOTInput()


def _take_sizes(graph: torch.fx.Graph) -> None:
    """Open sizes become arguments of the function: both halves take them as numbers."""
    for node in find_heads(graph):
        node.args = ()
        node.op, node.target = "placeholder", node.name
        node.meta["desc"] = SizeAOTInput(node.meta[SIZE])


def flatten_output(output: Any) -> list[Any]:
    """List a graph's results, in order, out of their nesting."""
    return torch.utils._pytree.arg_tree_leaves(output)
