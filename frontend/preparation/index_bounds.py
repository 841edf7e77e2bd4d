# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Arguments whose elements are indices, and what these have to be.

Eager raises where an index is out of range. Compiled code has nothing to raise with: ``bwd-bound-indices`` keeps it
within the tensor. What arguments, or slices of them, are indices as they are is found here, and looked at before each
call; indices that a model computes are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from retrograd.contract.indices import IndexBound, Slice

aten = torch.ops.aten
prims = torch.ops.prims

# Ops that raise in eager where an index is out of range. What others make of their arguments in a trace need not be
# what they refuse: ctc_loss, say, ignores what is beyond a target's length.
_STRICT = {
    *(aten.embedding, aten._embedding_bag, aten.nll_loss_forward, aten.nll_loss2d_forward),
    *(aten.index, aten.index_put, aten.index_select, aten.index_add, aten.gather, aten.take, aten.put),
    *(aten.scatter, aten.scatter_add, aten.scatter_reduce),
}
# Their results are all elements of their first argument, in the same places or in others.
_SAME = {aten.clone, aten.alias, aten.detach, prims.convert_element_type, aten._to_copy}
_RESHAPED = {
    *(aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze, prims.squeeze),
    *(aten.expand, aten.permute, aten.transpose),
}
_BY_AXIS = {aten.gather, aten.index_select, aten.scatter, aten.scatter_add, aten.scatter_reduce}
_BY_LIST = {aten.index, aten._unsafe_index, aten.index_put, aten._unsafe_index_put}
_INDEX_TYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class _Path:
    """How a value of the graph comes from an argument: see :class:`IndexBound`. ``added`` is what elements below zero
    may have been raised by, so as to count from the end; ``reshaped`` says that axes are others than the argument's."""

    node: Node
    slices: tuple[Slice, ...] = ()
    exempt: int | None = None
    added: int = 0
    reshaped: bool = False


def find_index_bounds(graph: Graph) -> tuple[IndexBound, ...]:
    """Find the bounds that arguments of a traced graph, by number, have to keep as indices into tensors of fixed
    sizes."""
    found: dict[tuple[Any, ...], IndexBound] = {}
    for number, argument in enumerate(graph.find_nodes(op="placeholder")):
        value = argument.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype not in _INDEX_TYPES:
            continue
        for path, size in _find_uses(_Path(argument)):
            bound = IndexBound(number, -path.added, size - 1, path.exempt, path.slices)
            key = (number, path.exempt, path.slices)
            known = found.get(key, bound)
            found[key] = replace(bound, least=max(bound.least, known.least), most=min(bound.most, known.most))
    return tuple(found.values())


def _find_uses(path: _Path) -> Iterator[tuple[_Path, int]]:
    """Where the elements of a value are indices, and the size of the axis that they are indices of."""
    for user in path.node.users:
        size = _indexed_size(user, path.node)
        if size is not None:
            yield (replace(path, added=path.added + size * (_packet(user) is aten.index)), size)
        following = _follow(user, path)
        if following is not None:
            yield from _find_uses(following)


def _packet(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _indexed_size(user: Node, index: Node) -> int | None:
    """The size of the axis that ``index`` chooses from in ``user``, if that refuses what is out of range."""
    if getattr(user.meta.get("original_aten", user.target), "overloadpacket", None) not in _STRICT:
        return None
    packet, args = _packet(user), user.args
    if packet in (aten.embedding, aten._embedding_bag) and args[1] is index:
        return _size(args[0], 0)
    if packet in _BY_AXIS and args[2] is index and isinstance(args[1], int):
        return _size(args[0], args[1])
    if packet in _BY_LIST and isinstance(args[1], list | tuple) and index in args[1]:
        sizes = [_size(args[0], axis) for axis, other in enumerate(args[1]) if other is index]
        known = [size for size in sizes if size is not None]
        return min(known) if len(known) == len(sizes) else None
    return None


def _size(tensor: Any, axis: int) -> int | None:
    value = tensor.meta.get("val") if isinstance(tensor, Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return None
    size = value.shape[axis]
    return size if isinstance(size, int) else None


def _follow(user: Node, path: _Path) -> _Path | None:
    """How the result of ``user`` comes from the argument, if each element of it is one of ``path``'s."""
    packet, args, value = _packet(user), user.args, user.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype not in _INDEX_TYPES:
        return None
    if packet is aten.where:
        return _follow_choice(user, path)
    if not args or args[0] is not path.node:
        return None
    if packet in _SAME:
        return replace(path, node=user)
    if packet in _RESHAPED:
        return replace(path, node=user, reshaped=True)
    if packet is aten.slice and not path.reshaped and path.exempt is None and not path.added:
        numbers = _read_slice(user)
        return None if numbers is None else replace(path, node=user, slices=(*path.slices, numbers))
    return None


def _read_slice(node: Node) -> Slice | None:
    """Axis, start, end and step of a slice; none where one of them is no number of the trace's."""
    numbers: list[Any] = list(node.args[1:])
    axis, start, end, step = numbers + [0, None, None, 1][len(numbers) :]
    start, end = 0 if start is None else start, 2**63 - 1 if end is None else end
    return (axis, start, end, step) if all(isinstance(n, int) for n in (axis, start, end, step)) else None


def _follow_choice(user: Node, path: _Path) -> _Path | None:
    """``where`` as decompositions write it: another index for the one that is ignored, or those below zero counted from
    the end."""
    condition, chosen, other = user.args
    if not isinstance(condition, Node) or not condition.args or condition.args[0] is not path.node:
        return None
    kind, number = _packet(condition), condition.args[1]
    # `chosen` are the elements that the condition holds for.
    ignored = (kind is aten.ne and chosen is path.node) or (kind is aten.eq and other is path.node)
    if ignored and not path.added and path.exempt in (None, number) and isinstance(number, int):
        filling = other if chosen is path.node else chosen
        is_zero = isinstance(filling, Node) and filling.target is aten.scalar_tensor.default and filling.args[0] == 0
        return replace(path, node=user, exempt=number) if is_zero else None
    if kind is aten.lt and number == 0 and other is path.node and isinstance(chosen, Node):
        added = chosen.args[1] if _packet(chosen) is aten.add and chosen.args[0] is path.node else None
        if isinstance(added, int) and added > 0 and not chosen.kwargs:
            return replace(path, node=user, added=path.added + added)
    return None
