# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Random connected slices of the graphs of real models, forward and backward: programs on the values that the model
computes there."""

from __future__ import annotations

import contextlib
import math
import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from models.case import Entry
from programs import Input, Program
from torch import Tensor, nn
from torch.fx import Graph, Node

from retrograd.frontend.doors.capture import capture_joint
from retrograd.frontend.islands.eager_values import find_primals, record_values

# Ops in a slice, at first; with those between them, it may be three times as many.
LEAST, MOST = 3, 14
# What an argument of a slice that requires grad multiplies: gradients of ops of a backward there need not be.
SCALE = "scale"


@dataclass(frozen=True)
class Recorded(Input):
    """An argument of a slice: what the model computes there."""

    values: Tensor | None = None

    def make(self, generator: torch.Generator, dtype: torch.dtype | None = None, device: str = "cpu") -> Tensor:
        """The recorded tensor, contiguous; floating point in ``dtype`` if that is given."""
        assert self.values is not None
        values = self.values.to(dtype) if dtype is not None and self.values.is_floating_point() else self.values
        return values.to(device).clone(memory_format=torch.contiguous_format).requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class Source:
    """A captured graph and the tensors that its nodes have in eager."""

    name: str
    graph: Graph
    tensors: Mapping[str, Tensor]

    @cached_property
    def nodes(self) -> list[Node]:
        """Those that a slice may hold, in order: ops on tensors that give the same each time."""
        return [node for node in self.graph.nodes if is_plain(node)]


def is_plain(node: Node) -> bool:
    """Whether a node is an op of PyTorch's that can be written as source text and run again."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and is_plain(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in ("aten", "prims"):
        return False
    # PyTorch refuses to trace views of prims that a program calls by itself.
    is_view = node.target.namespace == "prims" and any(r.alias_info for r in node.target._schema.returns)
    is_random = torch.Tag.nondeterministic_seeded in node.target.tags
    return not (is_view or is_random or node.target._schema.is_mutable)


class WithLoss(nn.Module):
    """A model and its loss."""

    def __init__(self, model: Callable[..., Any], loss: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *args: Any) -> Tensor:
        return self.loss(self.model(*args))


def read_source(entry: Entry, seed: int) -> Source:
    """Capture a model with its loss, forward and backward, and run the graph once in eager."""
    case = entry.make("test")
    with contextlib.ExitStack() as stack:
        captured = capture_joint(stack, WithLoss(case.model, case.loss), case.args)
    torch.manual_seed(seed)
    values = record_values(captured.graph_module, find_primals(captured, case.args, {}))
    return Source(entry.name, captured.graph_module.graph, values.tensors)


def draw_slices(source: Source, seed: int, count: int) -> Iterator[Program]:
    """``count`` programs, each a connected slice of the graph."""
    draw = random.Random(seed)
    tries = 0
    while count > 0 and tries < 1000:
        tries += 1
        members = draw_members(source, draw)
        program = write_program(source, members, draw)
        if program is not None:
            count -= 1
            yield program


def draw_members(source: Source, draw: random.Random) -> list[Node]:
    """Nodes that hang together, with whatever lies between them, in order."""
    members = {draw.choice(source.nodes)}
    size = draw.randint(LEAST, MOST)
    while len(members) < size:
        around = {n for node in members for n in (*node.all_input_nodes, *node.users)}
        near = [n for n in source.nodes if n in around and n not in members]
        if not near:
            break
        members.add(draw.choice(near))
    return [node for node in source.graph.nodes if node in close(members)]


def close(members: set[Node]) -> set[Node]:
    """``members`` with all that lies between two of them, and with the parts of what has several."""
    closed = set(members)
    for node in members:
        if node.target is operator.getitem:
            closed.add(node.args[0])  # type: ignore[arg-type]
    for node in list(closed):
        closed.update(user for user in node.users if user.target is operator.getitem)
    return reach(closed, forward=True) & reach(closed, forward=False)


def reach(nodes: set[Node], *, forward: bool) -> set[Node]:
    """``nodes`` and all that comes after them, or before."""
    seen, pending = set(nodes), list(nodes)
    while pending:
        node = pending.pop()
        for other in node.users if forward else node.all_input_nodes:
            if other not in seen:
                seen.add(other)
                pending.append(other)
    return seen


def write_program(source: Source, members: Sequence[Node], draw: random.Random) -> Program | None:
    """The slice as a program; ``None`` where it takes something that is no tensor, or gives nothing that is floating
    point."""
    inside = set(members)
    if not all(is_plain(node) for node in members) or len(members) > 3 * MOST:
        return None
    taken = dict.fromkeys(n for node in members for n in node.all_input_nodes if n not in inside)
    given = [n for n in members if n.name in source.tensors and not (n.users and inside.issuperset(n.users))]
    real = [n for n in given if source.tensors[n.name].is_floating_point()]
    if not real or not all(n.name in source.tensors for n in taken):
        return None
    inputs = [recorded(node.name, source.tensors[node.name]) for node in taken]
    inputs.append(recorded(SCALE, torch.tensor(1.25), requires_grad=True))
    statements = [f"{node.name} = {write_call(node)}" for node in members]
    # Of some of the results, the product with the argument that requires grad; the rest as they are.
    scaled = [n for n in real if draw.random() < 0.5] or real[:1]
    statements += [f"{n.name}_scaled = {n.name} * {SCALE}" for n in scaled]
    outputs = [f"{n.name}_scaled" for n in scaled] + [n.name for n in given if n not in scaled]
    used = [True] * len(scaled) + [False] * (len(given) - len(scaled))
    partition = draw.choice(("min-cut", "default"))
    return Program(
        tuple(inputs), tuple(statements), tuple(outputs), tuple(used), draw.randrange(2**31), partition, source.name
    )


def recorded(name: str, values: Tensor, *, requires_grad: bool = False) -> Recorded:
    """An argument that is a tensor of the graph."""
    dtype = str(values.dtype).removeprefix("torch.")
    return Recorded(name, tuple(values.shape), dtype, requires_grad=requires_grad, values=values.detach())


def write_call(node: Node) -> str:
    """A node's op as an expression."""
    if node.target is operator.getitem:
        return f"{node.args[0]}[{node.args[1]}]"
    arguments = [write(a) for a in node.args] + [f"{name}={write(a)}" for name, a in node.kwargs.items()]
    return f"torch.ops.{node.target}({', '.join(arguments)})"


def write(argument: Any) -> str:
    """An argument of an op as an expression."""
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(map(write, argument))}]"
    if isinstance(argument, torch.device):
        return f"torch.device({str(argument)!r})"
    if isinstance(argument, float) and not math.isfinite(argument):
        return f"float({str(argument)!r})"
    is_text = isinstance(argument, (Node, torch.dtype, torch.layout, torch.memory_format))
    return str(argument) if is_text else repr(argument)
