# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Gives each argument and result of a graph its role for the user (``param``, ``grad``, ...) and a name.

AOTAutograd describes those of a graph that it traced (``node.meta["desc"]``); of one that was captured as it ran the
descriptions are made here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch._aot_autograd import descriptors as d
from torch.utils import _pytree as pytree

from retrograd.contract.roles import (
    BASE,
    BUFFER,
    GRAD,
    INPUT,
    MUTATION,
    OUTPUT,
    PARAM,
    SEED,
    SIZE,
    TANGENT,
    name_in_role,
)
from retrograd.contract.signature import CONSTANT, Signature
from retrograd.frontend.doors.deferred_code import make_graph_module, recompile_when_called
from retrograd.frontend.doors.flat_module import state_name
from retrograd.frontend.preparation.tensor_graphs import SeedAOTInput, SizeAOTInput
from retrograd.frontend.python.source_locations import CaptureError, shared_memory_error


@dataclass(frozen=True)
class RuntimeInput(d.AOTInput):
    """Describes an argument of a backward that was captured as it ran."""

    role: str
    name: str

    def expr(self) -> str:
        return self.name


@dataclass(frozen=True)
class RuntimeResult(d.AOTOutput):
    """Describes a result of a backward that was captured as it ran."""

    role: str
    name: str

    def expr(self) -> str:
        return self.name


def describe_results(graph_module: torch.fx.GraphModule, prefix: str) -> None:
    """Give a graph that was traced at run time its results in one row, called ``prefix`` and a number."""
    graph = graph_module.graph
    (output,) = graph.find_nodes(op="output")
    flat = pytree.arg_tree_leaves(output.args[0])
    output.args = (tuple(flat),)
    output.meta["desc"] = [RuntimeResult(OUTPUT, f"{prefix}{i}") for i in range(len(flat))]
    graph.set_codegen(torch.fx.graph.CodeGen())
    recompile_when_called(graph_module)


def describe_graph(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy of one half of a joint graph whose arguments and results are described: those that were in the middle of
    it are not."""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    output = graph.graph_copy(graph_module.graph, copies)
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    results = pytree.arg_tree_leaves(output)
    described = graph.output(tuple(results))
    described.meta["desc"] = [RuntimeResult(OUTPUT, f"result{i}") for i in range(len(results))]
    for node in graph.find_nodes(op="placeholder"):
        node.meta["desc"] = RuntimeInput(INPUT, node.name)
    return make_graph_module(graph_module, graph)


def argument_role(desc: Any, signature: Signature | None) -> tuple[str, str]:
    """The role of an argument that AOTAutograd, or this module, describes so, and its name to the user.

    Raises:
        CaptureError: it is none of those that can be compiled.
    """
    match desc:
        case RuntimeInput():
            return desc.role, desc.name
        case d.ParamAOTInput():
            return PARAM, state_name(desc.target)
        case d.BufferAOTInput():
            return BUFFER, state_name(desc.target)
        case d.PlainAOTInput():
            return INPUT, _input_name(desc.idx, signature)
        case SeedAOTInput():
            return SEED, _seed_name(signature)
        case SizeAOTInput():
            return SIZE, desc.name
        case d.ViewBaseAOTInput() | d.SyntheticBaseAOTInput():
            raise shared_memory_error()
        case d.TangentAOTInput():
            return TANGENT, name_in_role(TANGENT, result_role(desc.output, signature)[1])
    raise CaptureError(f"unsupported kind of argument: {desc}", "tensor subclasses and effect tokens are not supported")


def result_role(desc: Any, signature: Signature | None) -> tuple[str, str]:
    """The same of a result."""
    match desc:
        case RuntimeResult():
            return desc.role, desc.name
        case d.PlainAOTOutput():
            return OUTPUT, _output_name(desc.idx, signature)
        case d.IntermediateBaseAOTOutput():
            return OUTPUT, name_in_role(BASE, result_role(desc.base_of, signature)[1])
        case d.InputMutationAOTOutput():
            return MUTATION, argument_role(desc.mutated_input, signature)[1]
        case d.GradAOTOutput():
            return GRAD, name_in_role(GRAD, argument_role(desc.grad_of, signature)[1])
    raise CaptureError(f"unsupported kind of result: {desc}", "tensor subclasses and effect tokens are not supported")


def _seed_name(signature: Signature | None) -> str:
    name = SEED
    while signature is not None and name in [s.name for s in (*signature.params, *signature.buffers)]:
        name += "_"
    return name


def _input_name(index: int, signature: Signature | None) -> str:
    return f"arg{index}" if signature is None else [i for i in signature.inputs if i.type is not None][index].name


def _output_name(index: int, signature: Signature | None) -> str:
    return f"output{index}" if signature is None else [o for o in signature.outputs if o.kind != CONSTANT][index].name
