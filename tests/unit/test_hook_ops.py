# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Hooks as library ops: traced whole, kept by FX, imported by torch-mlir and raised to the bwd dialect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch._functorch._aot_autograd import descriptors as d
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.contract.hooks import CUSTOM_BACKWARD
from retrograd.dialects import ir
from retrograd.frontend.hooks.hook_ops import (
    Declarations,
    accumulate_grad,
    call_backward,
    call_hook,
    create_token,
    declared_results,
    final_callbacks,
    update_input,
)
from retrograd.frontend.preparation.importer import import_graph
from retrograd.pipelines.infra.runner import run_pipeline


def same(values: Sequence[Tensor]) -> Sequence[Tensor]:
    return values


def trace(
    function: Callable[..., Any], declarations: Declarations, *, mode: Literal["fake", "symbolic"] = "fake"
) -> torch.fx.GraphModule:
    with declared_results(declarations):
        graph_module = make_fx(function, tracing_mode=mode)(torch.ones(4, 3))
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return graph_module


def calls(graph_module: torch.fx.GraphModule) -> list[str]:
    nodes = [n for n in graph_module.graph.nodes if getattr(n.target, "namespace", "") == "retrograd"]
    return [n.target._opname for n in nodes]


def raise_to_bwd(graph_module: torch.fx.GraphModule) -> str:
    for index, node in enumerate(graph_module.graph.find_nodes(op="placeholder")):
        node.meta["desc"] = d.PlainAOTInput(index)
    (output,) = graph_module.graph.find_nodes(op="output")
    output.meta["desc"] = [d.PlainAOTOutput(index) for index in range(len(output.args[0]))]
    module = import_graph(graph_module, function="backward")
    run_pipeline(module, "builtin.module(convert-torch-operator-to-bwd)")
    with module.context, ir.Location.unknown():
        module.operation.verify()
        return str(module)


def everything(x: Tensor) -> tuple[Tensor]:
    token = create_token()
    (a, b), token = call_hook([x, x * 2], token, "pre", 0)
    (c,), token = call_backward([a + b], token, 3)
    token = accumulate_grad(c, token, 1)
    nothing, token = call_hook([], token, "post_acc_grad", 1)
    assert nothing == []
    (unpacked,), token = call_hook([], token, "unpack", 2)
    token = update_input(x, unpacked.float(), [], token, 2)
    final_callbacks(token)
    return (unpacked * 2,)


DECLARED: Declarations = {
    ("pre", 0): same,
    (CUSTOM_BACKWARD, 3): [torch.empty(3, 4, device="meta").t()],
    ("post_acc_grad", 1): [],
    ("unpack", 2): [torch.empty(5, dtype=torch.bfloat16)],
}


def test_fx_keeps_every_call_in_order() -> None:
    assert calls(trace(everything, DECLARED)) == [
        "create_token",
        "call_hook",
        "call_backward",
        "accumulate_grad",
        "call_hook",
        "call_hook",
        "update_input",
        "final_callbacks",
    ]


def test_results_are_as_declared() -> None:
    nodes = trace(everything, DECLARED).graph.nodes
    (accumulated,) = [n for n in nodes if n.target is torch.ops.retrograd.accumulate_grad.default]
    gradient, token, number = accumulated.args
    assert (gradient.meta["val"].shape, gradient.meta["val"].stride()) == ((4, 3), (1, 4))
    assert (token.meta["val"].shape, token.meta["val"].dtype, number) == ((0,), torch.int8, 1)
    (output,) = trace(everything, DECLARED).graph.find_nodes(op="output")
    assert output.args[0][0].meta["val"].dtype is torch.bfloat16


def test_symbolic_sizes_pass_through() -> None:
    def function(x: Tensor) -> tuple[Tensor]:
        (y,), _ = call_hook([x], create_token(), "tensor_pre", 0)
        return (y * 2,)

    (output,) = trace(function, {("tensor_pre", 0): same}, mode="symbolic").graph.find_nodes(op="output")
    assert all(isinstance(size, torch.SymInt) for size in output.args[0][0].meta["val"].shape)


def test_raised_from_the_import() -> None:
    text = raise_to_bwd(trace(everything, DECLARED))
    assert "torch.operator" not in text
    assert "torch.prim.List" not in text
    names = [line.split('"')[1] for line in text.splitlines() if '"bwd.' in line]
    assert names == [f"bwd.{name}" for name in calls(trace(everything, DECLARED))]


def test_results_nobody_uses() -> None:
    def function(x: Tensor) -> tuple[Tensor]:
        token = create_token()
        (_, b), token = call_hook([x, x * 2], token, "pre", 0)
        call_hook([b], token, "post", 1)
        return (b,)

    text = raise_to_bwd(trace(function, {("pre", 0): same, ("post", 1): same}))
    assert text.count('"bwd.call_hook"') == 2
    assert "-> (!torch.none, !bwd.token)" in text


def test_an_unknown_kind() -> None:
    with pytest.raises(ValueError, match="no kind of hook is called 'later'; the kinds are tensor_pre, pre"):
        trace(lambda x: call_hook([x], create_token(), "later", 0), {})


def test_an_undeclared_call() -> None:
    with pytest.raises(LookupError, match=r"what pre number 7 gives is not declared; trace it within declared_results"):
        trace(lambda x: call_hook([x], create_token(), "pre", 7), {("pre", 6): same})
    with pytest.raises(LookupError, match="what backward number 6 gives"):
        trace(lambda x: call_backward([x], create_token(), 6), {("pre", 6): same})


def test_declarations_end_with_their_context() -> None:
    with declared_results({("pre", 0): same}):
        with declared_results({}), pytest.raises(LookupError):
            make_fx(lambda x: call_hook([x], create_token(), "pre", 0), tracing_mode="fake")(torch.ones(2))
        make_fx(lambda x: call_hook([x], create_token(), "pre", 0), tracing_mode="fake")(torch.ones(2))


def test_they_do_not_run() -> None:
    with pytest.raises(RuntimeError, match="retrograd::create_token stands for a call in a traced graph"):
        create_token()
    with pytest.raises(RuntimeError, match="retrograd::accumulate_grad stands for a call"):
        accumulate_grad(torch.ones(2), torch.empty(0, dtype=torch.int8), 0)
