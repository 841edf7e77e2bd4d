# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Saved values in narrower types, or as hooks pack them, on FX: what ``bwd-narrow-saved`` does to a module, done to the
captured halves. Verification runs this form against the compiled one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retrograd.contract.formats import BLOCK, FLOAT8_MAX, FORMATS, INT8_MAX, TINY, part_name
from retrograd.frontend.doors.deferred_code import recompile_when_called


def pack(tensor: Tensor, format: str) -> tuple[Tensor, ...]:
    """The parts of a floating-point tensor in ``format``: the elements in the narrower type, then their scales
    (float32; of shape (1, ..., 1), or one row for each block of 64 elements, the last of which is filled up)."""
    if format == "bf16":
        return (tensor.to(torch.bfloat16),)
    wide = tensor.to(torch.float32)
    if format == "float8_e4m3":
        scale = wide.abs().amax(list(range(wide.dim())), keepdim=True).clamp_min(TINY) / FLOAT8_MAX
        return (wide / scale).to(torch.float8_e4m3fn), scale
    rows = -(-wide.numel() // BLOCK)
    padded = torch.nn.functional.pad(wide.reshape(-1), (0, rows * BLOCK - wide.numel())).view(rows, BLOCK)
    scales = padded.abs().amax(1, keepdim=True).clamp_min(TINY) / INT8_MAX
    return (padded / scales).round().to(torch.int8), scales


def unpack(parts: Sequence[Tensor], format: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensor that ``parts`` were packed from, rounded."""
    if format == "bf16":
        return parts[0].to(dtype)
    whole = parts[0].to(torch.float32) * parts[1]
    if format == "int8-block":
        whole = whole.reshape(-1)[: torch.Size(shape).numel()].reshape(list(shape))
    return whole.to(dtype)


@dataclass(frozen=True, eq=False)
class Packer:
    """How values are saved: ``parts`` names the tensors that ``pack`` makes of one; ``unpack`` takes these, the shape
    and the dtype of what they were packed from."""

    parts: tuple[str, ...]
    pack: Callable[[Tensor], tuple[Tensor, ...]]
    unpack: Callable[[Sequence[Tensor], Sequence[int], torch.dtype], Tensor]


def narrow_packer(format: str) -> Packer:
    """Saves in one of the narrower types."""

    def pack_narrow(tensor: Tensor) -> tuple[Tensor, ...]:
        return pack(tensor, format)

    def unpack_narrow(parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return unpack(parts, format, shape, dtype)

    return Packer(FORMATS[format].parts, pack_narrow, unpack_narrow)


def part_names(narrowed: Mapping[str, Packer]) -> dict[str, str]:
    """For the name of each part of the narrowed values the name of the value."""
    return {part_name(name, part): name for name, packer in narrowed.items() for part in packer.parts}


def narrow_graphs(
    forward: torch.fx.GraphModule,
    backward: torch.fx.GraphModule,
    narrowed: Mapping[str, Packer],
    num_forward_outputs: int,
) -> None:
    """Have ``forward`` save the parts of the ``narrowed`` values, by name, and ``backward`` take them."""
    (output,) = forward.graph.find_nodes(op="output")
    results: list[Any] = []
    for place, node in enumerate(output.args[0]):
        is_narrowed = place >= num_forward_outputs and isinstance(node, torch.fx.Node) and node.name in narrowed
        with forward.graph.inserting_before(output):
            results += _pack_node(forward.graph, node, narrowed[node.name]) if is_narrowed else [node]
    output.args = (type(output.args[0])(results),)
    recompile_when_called(forward)
    packed = {node.name: node for node in results if isinstance(node, torch.fx.Node)}
    for node in backward.graph.find_nodes(op="placeholder"):
        if node.name in narrowed:
            _unpack_placeholder(backward.graph, node, narrowed[node.name], packed)
    recompile_when_called(backward)


def _pack_node(graph: torch.fx.Graph, node: torch.fx.Node, packer: Packer) -> list[torch.fx.Node]:
    value = node.meta["val"]
    with value.fake_mode:
        parts = packer.pack(value)
    whole = graph.call_function(packer.pack, (node,))
    whole.meta["val"] = parts
    found = []
    for place, (name, part) in enumerate(zip(packer.parts, parts, strict=True)):
        found.append(
            graph.create_node("call_function", operator.getitem, (whole, place), {}, name=part_name(node.name, name))
        )
        found[-1].meta["val"] = part
    return found


def _unpack_placeholder(
    graph: torch.fx.Graph, node: torch.fx.Node, packer: Packer, packed: Mapping[str, torch.fx.Node]
) -> None:
    value, name = node.meta["val"], node.name
    parts = []
    with graph.inserting_before(node):
        for part in packer.parts:
            parts.append(graph.placeholder(part_name(name, part)))
            parts[-1].meta["val"] = packed[part_name(name, part)].meta["val"]
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        # Open sizes are those of the elements that are packed.
        shape = tuple(value.shape) if all(isinstance(n, int) for n in value.shape) else ()
        whole = graph.call_function(packer.unpack, (parts, shape, value.dtype))
    whole.meta["val"] = value
    node.replace_all_uses_with(whole)
    graph.erase_node(node)
