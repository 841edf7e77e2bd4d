# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Prepares every traced graph for import, in one order, whichever door it came through."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import sympy
import torch
from torch.fx import GraphModule, Node

from retrograd.frontend.autograd.steps.parameter_reads import finish_reads
from retrograd.frontend.complex_numbers.split import split_complex
from retrograd.frontend.doors.deferred_code import recompile_when_called
from retrograd.frontend.doors.flat_module import state_name
from retrograd.frontend.hooks.pack_hooks import HookPair, mark_values
from retrograd.frontend.layers.class_losses import shorten_class_losses
from retrograd.frontend.layers.streams import share_seed
from retrograd.frontend.libraries.layouts import attach_views
from retrograd.frontend.preparation.empty_tensors import fill_empty_tensors, forget_layouts
from retrograd.frontend.preparation.rounded_constants import fold_rounded_constants, mark_rounded_places
from retrograd.frontend.preparation.scalar_types import match_scalars
from retrograd.frontend.preparation.unsigned_bytes import widen_bytes
from retrograd.frontend.python.source_locations import DENSE_REMEDY, LeftToEagerError, source_place
from retrograd.frontend.sizes.size_nodes import SYMBOLIC, share_sizes
from retrograd.frontend.verification.as_traced import copy_graph, draw_alike


@dataclass(frozen=True)
class Traced:
    """A traced graph of aten ops, and what the steps have to know of it.

    ``sizes`` are the names of its open sizes. Of a joint graph, ``hooks`` are those around the model that pack what is
    saved, and ``is_joint`` says that it is one. ``is_dynamo`` says that Dynamo has put numbers in it. ``written`` are
    placeholders that hooks may write to, but for the hooks of the numbers ``inlined``, which are a part of the graph;
    ``freeing`` are the kinds and numbers of calls that may give back their memory.
    """

    graph_module: GraphModule
    sizes: Mapping[sympy.Symbol, str] = field(default_factory=dict)
    hooks: HookPair | None = None
    is_joint: bool = False
    is_dynamo: bool = False
    written: Collection[Node] = ()
    inlined: Collection[int] = ()
    freeing: Collection[tuple[str, int]] = ()


@dataclass(frozen=True)
class Step:
    """A pass over FX, and why it stands where it stands."""

    run: Callable[[Traced], None]
    why: str


def _number_rest(traced: Traced) -> None:
    """Put numbers in place of what is done on sizes that are fixed by now."""
    if not traced.is_dynamo:
        return
    graph = traced.graph_module.graph
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, SYMBOLIC) and value.node.expr.is_number:
            node.replace_all_uses_with(to_number(value))
    graph.eliminate_dead_code()
    recompile_when_called(traced.graph_module)


def _respell_quotients(traced: Traced) -> None:
    """Quotients of what was a number in Python, such as the 2 / n of a mean squared error's gradient where n is open,
    as the op that all others are.

    AOTAutograd makes tensors of such numbers (``tensorify_python_scalars``) behind the decompositions.
    """
    if traced.is_dynamo:
        for node in traced.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.true_divide.Tensor):
            node.target = torch.ops.aten.div.Tensor


def _fold_rounded_constants(traced: Traced) -> None:
    # Under compiled autograd PyTorch has run the forward, and with it what is decided there.
    if traced.is_joint or traced.is_dynamo:
        fold_rounded_constants(traced.graph_module)
        mark_rounded_places(traced.graph_module)


def _finish_reads(traced: Traced) -> None:
    if traced.written:
        finish_reads(traced.graph_module.graph, traced.written, traced.inlined, traced.freeing)


def _mark_values(traced: Traced) -> None:
    if traced.is_joint:
        mark_values(traced.graph_module, traced.hooks)


PREPARE: tuple[Step, ...] = (
    Step(
        lambda traced: refuse_sparse_layouts(traced.graph_module),
        "before all: what is written takes tensors to be dense",
    ),
    Step(
        lambda traced: fill_empty_tensors(traced.graph_module),
        "before sizes: what only an empty tensor was computed from asks for sizes no more",
    ),
    Step(
        lambda traced: forget_layouts(traced.graph_module),
        "anywhere: no step looks at memory that nobody has written to",
    ),
    Step(_number_rest, "before sizes: those that Dynamo has fixed have no symbol to be worked out from"),
    Step(_respell_quotients, "before sizes: it is these quotients that read them"),
    Step(
        lambda traced: shorten_class_losses(traced.graph_module),
        "before sizes are shared, which the nodes that it writes take part in",
    ),
    Step(
        lambda traced: share_sizes(traced.graph_module, traced.sizes),
        "before ops are written: what is written asks the heads of sizes alone",
    ),
    Step(
        _fold_rounded_constants,
        "behind sizes that are fixed by now, and before ops are written, which PyTorch does not run",
    ),
    Step(
        lambda traced: widen_bytes(traced.graph_module),
        "behind constants, which PyTorch computes; before libraries are asked for anything",
    ),
    Step(
        lambda traced: match_scalars(traced.graph_module),
        "behind all that is computed by PyTorch, which reads numbers as they are",
    ),
    Step(
        _finish_reads,
        "behind sizes, which are no reads of a parameter's values; before complex numbers are split, so that a hook "
        "waits for an op and not for its parts",
    ),
    Step(lambda traced: split_complex(traced.graph_module), "behind all that looks for ops as they were traced"),
    Step(
        lambda traced: attach_views(traced.graph_module),
        "behind complex numbers, which no library is asked for; it copies views, which are then nodes as all others",
    ),
    Step(
        lambda traced: share_seed(traced.graph_module),
        "behind all that leaves out ops: streams are counted over those that stay, and no seed is drawn for none",
    ),
    Step(_mark_values, "last: of all values that the forward computes, those that the steps before wrote too"),
)


def prepare(traced: Traced) -> None:
    """Run all steps, in place.

    Raises:
        CaptureError: a size that is none of an argument's; or the backward draws random numbers.
    """
    for step in PREPARE:
        step.run(traced)


def prepare_copied(traced: Traced) -> GraphModule:
    """Prepare a graph as :func:`prepare` does; returns a copy of the graph as it was traced, with random ops that draw
    the same numbers."""
    copied = copy_graph(traced.graph_module)
    prepare(traced)
    draw_alike(copied, traced.graph_module)
    return copied


def to_number(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> int | float | bool:
    """The number of a symbolic one in this call, with a guard on it."""
    if isinstance(value, torch.SymBool):
        return bool(value)
    return int(value) if isinstance(value, torch.SymInt) else float(value)


# -- Sparse tensors ---------------------------------------------------------------------------------------------------

# Sparse tensors, which executables do not have: neither as arguments nor as gradients.


def refuse_sparse_layouts(graph_module: GraphModule) -> None:
    """Refuse a graph that makes or takes a tensor of another layout than ``torch.strided``; the gradient of an
    ``nn.Embedding(sparse=True)`` is one.

    Raises:
        LeftToEagerError: there is such a tensor; names the op and the line of the user's code, or the parameter or
            buffer.
    """
    for node in graph_module.graph.nodes:
        for value in torch.utils._pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
                place = source_place(node.stack_trace)
                kept = getattr(node.meta.get("desc"), "target", None)
                name = f"{node.target}{f' at {place}' if place else ''}" if kept is None else state_name(kept)
                raise LeftToEagerError(f"{name} is a tensor of layout {value.layout}", DENSE_REMEDY)
