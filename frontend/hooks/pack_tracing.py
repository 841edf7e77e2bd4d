# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Pairs of pack and unpack hooks as graphs, one for each type of value that they are to pack."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from retrograd.contract.roles import SAVED
from retrograd.frontend.decompositions.table import decomposition_table
from retrograd.frontend.doors.port_roles import RuntimeInput, describe_results
from retrograd.frontend.hooks.pack_hooks import PACKED_AS, PACKED_BY, HookPair
from retrograd.frontend.layers.random_ops import DRAW_SEED
from retrograd.frontend.preparation.narrowing import Packer
from retrograd.frontend.python.source_locations import CaptureError
from retrograd.frontend.python.trace_errors import capture_error

_REMEDY = "take retrograd.inlineable off the hooks: they are then called in Python, on what the program saves"
_READS_MORE = "they read a tensor other than what they are given"
# Stands for a tensor among what a hook gives.
_PART = object()


@dataclass(frozen=True, eq=False)
class TracedPair:
    """A pair of hooks, traced for values of one shape, dtype and device: graphs from a tensor to the tensors that it is
    packed to, and from these to a tensor."""

    pair: HookPair
    pack: torch.fx.GraphModule
    unpack: torch.fx.GraphModule

    def packer(self) -> Packer:
        """The same for narrowing the captured graph."""
        (output,) = self.pack.graph.find_nodes(op="output")

        def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(self.pack(tensor))

        def unpack(parts: Sequence[torch.Tensor], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            (whole,) = self.unpack(*parts)
            return whole

        return Packer(tuple(f"packed_{i}" for i in range(len(output.args[0]))), pack, unpack)


@dataclass(frozen=True)
class Packings:
    """The hooks of a graph's values: ``traced`` by the name of the body (``pack_0``), and ``refused``, by the name of
    the value, why they cannot pack it, which is an error where it is saved."""

    traced: Mapping[str, TracedPair]
    refused: Mapping[str, CaptureError]

    def bodies(self) -> dict[str, torch.fx.GraphModule]:
        """The graphs, as the private functions ``@pack_N`` and ``@unpack_N``."""
        packs = {name: pair.pack for name, pair in self.traced.items()}
        return packs | {f"un{name}": pair.unpack for name, pair in self.traced.items()}

    def check_saved(self, names: Iterable[str]) -> None:
        """Refuse values that are saved and that the hooks cannot pack.

        Raises:
            CaptureError: says why.
        """
        for name in names:
            if name in self.refused:
                raise self.refused[name]


def trace_pairs(graph_module: torch.fx.GraphModule) -> Packings:
    """Trace the hooks that values of a graph are marked with, once for each type of value; notes on each node the
    names of what packs its tensors."""
    names: dict[Any, str] = {}
    traced: dict[str, TracedPair] = {}
    failed: dict[str, CaptureError] = {}
    refused: dict[str, CaptureError] = {}
    for node in graph_module.graph.nodes:
        pair = node.meta.get(PACKED_BY)
        if pair is None:
            continue
        leaves = pytree.tree_leaves(node.meta["val"])
        packed_as = [""] * len(leaves)
        for place, value in enumerate(leaves):
            if not isinstance(value, torch.Tensor):
                continue
            key = (pair, tuple(value.shape), value.dtype, value.device)
            if key not in names:
                name = names[key] = f"pack_{len(names)}"
                try:
                    traced[name] = trace_pair(pair, value)
                except CaptureError as error:
                    failed[name] = error
            if names[key] in traced:
                packed_as[place] = names[key]
            else:
                refused[node.name] = failed[names[key]]
        node.meta[PACKED_AS] = packed_as
    return Packings(traced, refused)


def trace_pair(pair: HookPair, like: torch.Tensor) -> TracedPair:
    """Trace a pair of hooks for fake tensors of this shape, dtype and device.

    Raises:
        CaptureError: a hook does what no graph of tensors can, or a size differs from call to call.
    """
    if not all(isinstance(size, int) for size in like.shape):
        raise CaptureError(f"{pair} pack a value of shape {list(like.shape)}, which differs from call to call", _REMEDY)
    taken_apart: list[tuple[list[Any], pytree.TreeSpec]] = []

    def pack(tensor: torch.Tensor) -> list[torch.Tensor]:
        leaves, spec = pytree.tree_flatten(pair.pack(tensor))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # What is no tensor is the same each time, and compiled in.
        taken_apart.append(([_PART if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec))
        return tensors

    def unpack(*parts: torch.Tensor) -> list[torch.Tensor]:
        remaining = iter(parts)
        leaves, spec = taken_apart[-1]
        return [pair.unpack(pytree.tree_unflatten([next(remaining) if x is _PART else x for x in leaves], spec))]

    with like.fake_mode:  # type: ignore[attr-defined]
        example = torch.empty(tuple(like.shape), dtype=like.dtype, device=like.device)
    packed = _trace(pair, pack, [example])
    unpacked = _trace(pair, unpack, _results(packed))
    (whole,) = _results(unpacked)
    if (whole.shape, whole.dtype) != (example.shape, example.dtype):
        made = f"a {whole.dtype} of shape {list(whole.shape)} of a {example.dtype} of shape {list(example.shape)}"
        raise CaptureError(f"{pair} make {made}", "unpack to the shape and dtype of what was packed")
    return TracedPair(pair, packed, unpacked)


def _trace(
    pair: HookPair, function: Callable[..., list[torch.Tensor]], examples: Sequence[torch.Tensor]
) -> torch.fx.GraphModule:
    try:
        with torch.no_grad(), detect_fake_mode(examples) or contextlib.nullcontext():
            traced = make_fx(dispatch_functionalize(function), decomposition_table())(*examples)
    except Exception as error:
        reason = error.message if isinstance(error, CaptureError) else capture_error(error).message
        if "convert all Tensors to FakeTensors" in reason:
            reason = _READS_MORE
        raise CaptureError(f"{pair} cannot be compiled in: {reason}", _REMEDY) from error
    graph = traced.graph
    graph.eliminate_dead_code()
    if graph.find_nodes(op="get_attr"):
        raise CaptureError(f"{pair} cannot be compiled in: {_READS_MORE}", _REMEDY)
    if graph.find_nodes(op="call_function", target=DRAW_SEED):
        raise CaptureError(f"{pair} cannot be compiled in: they draw random numbers", _REMEDY)
    for number, node in enumerate(graph.find_nodes(op="placeholder")):
        node.meta["desc"] = RuntimeInput(SAVED, f"taken_{number}")
    describe_results(traced, "given_")
    return traced


def _results(traced: torch.fx.GraphModule) -> list[torch.Tensor]:
    (output,) = traced.graph.find_nodes(op="output")
    return [node.meta["val"] for node in output.args[0]]
