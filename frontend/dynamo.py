# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Graphs that Dynamo captured: what ``torch.compile(backend="retrograd")`` runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from retrograd.frontend.capture import check_random, portable_ops
from retrograd.frontend.decompositions import decomposition_table
from retrograd.frontend.fx_partition import CompiledFunction, graph_caller, keep_residuals, split_joint
from retrograd.frontend.importer import JOINT
from retrograd.frontend.random_ops import share_seed
from retrograd.frontend.source import CaptureError

FORWARD, BACKWARD = "forward", "backward"

# Compiles a traced graph under the name given for its function; returns the functions it became, by name.
Build = Callable[[torch.fx.GraphModule, str], Mapping[str, CompiledFunction]]


def compile_with_dynamo(
    graph_module: torch.fx.GraphModule, example_inputs: Sequence[torch.Tensor], build: Build
) -> Callable[..., Any]:
    """Run a graph of Dynamo's through AOTAutograd, with ``build`` as the compiler of its joint or inference graph.

    Raises:
        CaptureError: symbolic sizes, or random ops that are no function of a seed.
    """
    functions: dict[str, CompiledFunction] = {}
    outputs: list[int] = []

    def partition(joint: torch.fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_options: Any) -> Any:
        _prepare(joint)
        functions.update(build(joint, JOINT))
        outputs.append(num_fwd_outputs)
        return split_joint(joint, functions[BACKWARD], num_fwd_outputs)

    def compile_forward(traced: torch.fx.GraphModule, _inputs: Any) -> Any:
        return make_boxed_func(graph_caller(traced, functions[FORWARD], restride=outputs[-1]))

    def compile_backward(traced: torch.fx.GraphModule, _inputs: Any) -> Any:
        keep_residuals()
        return make_boxed_func(graph_caller(traced, functions[BACKWARD], restride=0))

    def compile_inference(traced: torch.fx.GraphModule, _inputs: Any) -> Any:
        _prepare(traced)
        (output,) = traced.graph.find_nodes(op="output")
        count = len(torch.utils._pytree.arg_tree_leaves(*output.args))
        return make_boxed_func(graph_caller(traced, build(traced, FORWARD)[FORWARD], restride=count))

    compiler = aot_autograd(
        fw_compiler=compile_forward,
        bw_compiler=compile_backward,
        inference_compiler=compile_inference,
        partition_fn=partition,
        decompositions=decomposition_table(),
    )
    with portable_ops():
        compiled: Callable[..., Any] = compiler(graph_module, example_inputs)
    return compiled


def _prepare(traced: torch.fx.GraphModule) -> None:
    """Give the random ops one seed; refuse what cannot be compiled."""
    share_seed(traced)
    check_random(traced)
    for node in traced.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        symbolic = isinstance(value, torch.SymInt) or (
            isinstance(value, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in value.shape)
        )
        if symbolic:
            raise CaptureError(
                f"the graph has symbolic sizes ({node.name}: {value})", "call torch.compile with dynamic=False"
            )
