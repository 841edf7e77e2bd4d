# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Permutations of tensors are moved behind what reads them, so that those of two neighbours meet and cancel.

What is computed element by element, a sum along axes, a pad, a slice, a concatenation, a gather or a maximum of windows
is the same on permuted tensors, with its axes permuted. :func:`sink` computes it there, and permutes what it gives.
What has no such rule reads a permutation, which is a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node

from retrograd.frontend.decompositions.convolutions.windows import Window, spread_axes
from retrograd.frontend.layers.convolution_ops import LAST
from retrograd.frontend.layers.pool_ops import (
    MAX_POOL_LAST,
    MAX_POOL_LAST_BACKWARD,
    can_number_taps,
    find_places,
    write_window,
)
from retrograd.frontend.libraries.ops import POOLS
from retrograd.frontend.preparation.graph_writer import GraphWriter

aten = torch.ops.aten

Order = tuple[int, ...]
"""The axes of a tensor in the order in which another one has them."""

# Elementwise ops that PyTorch does not tag as such.
_ELEMENTWISE = (aten._to_copy.default, aten.alias.default, aten.detach.default)
# What takes no more of a tensor than its shape.
_LIKE = {aten.zeros_like.default: 0, aten.ones_like.default: 1}
_SUMS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default)


@dataclass(frozen=True)
class Permuted:
    """A tensor that holds another one's elements: ``tensor`` is that one, permuted by ``order``."""

    tensor: Node
    order: Order


@dataclass(frozen=True)
class PoolCall:
    """A pool of images: its window, as the ops for channels last take it, how many there are along each axis, and the
    size of planes."""

    window: list[int]
    out: list[int]
    size: list[int]


def read_pool(node: Node) -> PoolCall | None:
    """The pool that a node is; ``None`` where no op for channels last is for it."""
    is_forward = node.target is aten.max_pool2d_with_indices.default
    # A backward has all of them.
    given = read_arguments(node, None, None, (), (0,), (1,))[POOLS[read_op(node)] :]
    images, kernel, stride, padding, dilation = given[:5]
    window = Window.of(spread_axes(kernel, 2), stride, padding, dilation)
    out = node.meta["val"][0] if is_forward else read_arguments(node)[0].meta["val"]
    size = images.meta["val"]
    if size.dim() != len(LAST) or not can_number_taps(window.kernel):
        return None
    return PoolCall(write_window(window), [*out.shape[2:]], [*size.shape[2:]])


def sink(graph_module: GraphModule, permutations: Iterable[Node]) -> None:
    """Compute on permuted tensors what reads only them and what costs little to permute, in place.

    ``permutations`` are nodes that permute what an island gives to how the graph had it. What reads one of them is
    computed on what it permutes, if there is a rule for that, and permuted itself, as long as there is such an op.
    Nodes that nobody reads any more stay in the graph.
    """
    wanted = set(permutations)
    mode = next((v.fake_mode for n in wanted if isinstance(v := n.meta["val"], FakeTensor)), None)
    if mode is None:
        return
    sinking = _Sinking(GraphWriter(graph_module, mode, {}))
    for node in list(graph_module.graph.nodes):
        if node in wanted:
            sinking.lies[node] = Permuted(*_read_permutation(node))
        elif node.op == "call_function" and node not in sinking.writer.created:
            sinking.visit(node)


@dataclass
class _Sinking:
    """The graph that is written to, which of its nodes are permutations of which others, and the taps that places are
    of."""

    writer: GraphWriter
    lies: dict[Node, Permuted] = field(default_factory=dict)
    taps: dict[Node, Node] = field(default_factory=dict)

    def visit(self, node: Node) -> None:
        """Have a node computed on permuted tensors, if it can be."""
        if node.target is aten.permute.default and read_arguments(node)[0] in self.lies:
            self._meet(node)
            return
        if node.target in POOLS:
            self._pool(node)
            return
        rule = find_rule(node)
        given = [n for n in node.all_input_nodes if n in self.lies]
        if rule is None or not given:
            return
        largest = max(given, key=lambda n: n.meta["val"].numel())
        order = self.lies[largest].order
        with self.writer.at(node):
            written = rule(self, node, order)
        if written is None:
            return
        result, order = written
        self._replace(node, result, order)

    def _meet(self, node: Node) -> None:
        """Leave out two permutations that undo each other, and make one of two that do not."""
        source, axes = read_arguments(node)
        lies = self.lies[source]
        back = inverse(lies.order)
        axes = [axis % len(back) for axis in axes]
        order = tuple(back[axis] for axis in axes)
        if order == tuple(range(len(order))):
            node.replace_all_uses_with(lies.tensor)
        else:
            node.args = (lies.tensor, [*order])

    def _pool(self, node: Node) -> None:
        """Have a pool's images lie with channels last, if they or their gradients do."""
        pool = read_pool(node)
        if pool is None:
            return
        first, *_, places = read_arguments(node)
        if node.target is aten.max_pool2d_with_indices.default:
            lies = self.lies.get(first)
            if lies is not None and lies.order == LAST:
                self._pool_forward(node, pool)
        elif places in self.taps:
            with self.writer.at(node):
                grad, taps = self.permuted(first, LAST), self.writer.value(self.taps[places])
                result = MAX_POOL_LAST_BACKWARD(grad, taps, pool.window, pool.size)
            self._replace(node, result, LAST)

    def _pool_forward(self, node: Node, pool: PoolCall) -> None:
        with self.writer.at(node):
            most, taps = MAX_POOL_LAST(self.permuted(read_arguments(node)[0], LAST), pool.window, pool.out)
            results = most, find_places(taps, pool.window, pool.size)
            named = self.writer.node(taps)
        for element in list(node.users):
            number = read_arguments(element)[1]
            given = self._replace(element, results[number], LAST)
            if number == 1:
                self.taps[given] = named

    def _replace(self, node: Node, result: Tensor, order: Order) -> Node:
        """Have what reads a node read a permutation of ``result``; returns that."""
        with self.writer.at(node):
            if is_sorted(order):
                plain = result
            elif is_view(result.shape, order):
                plain = result.view([result.shape[axis] for axis in inverse(order)])
            else:
                plain = result.permute(inverse(order))
        given = self.writer.node(plain)
        node.replace_all_uses_with(given)
        if plain is not result and given.target is aten.permute.default:
            self.lies[given] = Permuted(self.writer.node(result), order)
        return given

    def permuted(self, node: Node, order: Order) -> Tensor:
        """The result of a node, with axes of size 1 in front as far as ``order`` has more, permuted."""
        lies = self.lies.get(node)
        if lies is not None and lies.order == order:
            return self.writer.value(lies.tensor)
        value: Tensor = self.writer.value(node)
        shape = [1] * (len(order) - value.dim()) + [*value.shape]
        moved = [shape[axis] for axis in order]
        if value.numel() == 1 and value.dim() == 0:
            return value
        if is_view(moved, order):
            return value if [*value.shape] == moved else value.view(moved)
        if node.target is aten.expand.default and value.dim() == len(order):
            small = read_arguments(node)[0]
            if small.meta["val"].numel() < value.numel():
                spread: Tensor = aten.expand.default(self.permuted(small, order), moved)
                return spread
        if is_filled(node):
            fill = _LIKE[read_op(node)] if node.target in _LIKE else read_arguments(node)[1]
            return torch.full(moved, fill, dtype=value.dtype, device=value.device)
        if node not in self.lies and is_spread(node) and value.dim() == len(order):
            return self.elementwise(node, order)
        wide = value if value.dim() == len(order) else value.view(shape)
        return wide.permute(order)

    def elementwise(self, node: Node, order: Order) -> Tensor:
        """The result of an elementwise node, from permuted operands."""

        def argument(given: Node) -> Any:
            is_tensor = isinstance(given.meta["val"], Tensor)
            return self.permuted(given, order) if is_tensor else self.writer.value(given)

        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), argument)
        # It says how eager would have the result lie.
        named = {name: value for name, value in kwargs.items() if name != "memory_format"}
        result: Tensor = read_op(node)(*args, **named)
        return result


Rule = Callable[[_Sinking, Node, Order], tuple[Tensor, Order] | None]


def _compute_elementwise(sinking: _Sinking, node: Node, order: Order) -> tuple[Tensor, Order] | None:
    if node.meta["val"].dim() != len(order):
        return None
    return sinking.elementwise(node, order), order


def _compute_sum(sinking: _Sinking, node: Node, order: Order) -> tuple[Tensor, Order] | None:
    """A sum, mean or extreme along axes."""
    given, axes, keeps, *rest = read_arguments(node, None, None, False)
    if not axes:
        return None
    summed = {axis % len(order) for axis in axes}
    x = sinking.permuted(given, order)
    places = [place for place, axis in enumerate(order) if axis in summed]
    result = read_op(node)(x, places, bool(keeps), *rest, **node.kwargs)
    if keeps:
        return result, order
    left = [axis for axis in range(len(order)) if axis not in summed]
    return result, tuple(left.index(axis) for axis in order if axis not in summed)


def _compute_pad(sinking: _Sinking, node: Node, order: Order) -> tuple[Tensor, Order] | None:
    x, pairs, *rest = read_arguments(node)
    # From the last axis on, two for each.
    of_axis = {len(order) - 1 - n: pairs[2 * n : 2 * n + 2] for n in range(len(pairs) // 2)}
    moved = [amount for axis in reversed(order) for amount in of_axis.get(axis, [0, 0])]
    return read_op(node)(sinking.permuted(x, order), moved, *rest, **node.kwargs), order


def _compute_slice(sinking: _Sinking, node: Node, order: Order) -> tuple[Tensor, Order] | None:
    x, axis, *rest = read_arguments(node, None, 0)
    return read_op(node)(sinking.permuted(x, order), order.index(axis % len(order)), *rest), order


def _compute_slice_scatter(sinking: _Sinking, node: Node, order: Order) -> tuple[Tensor, Order] | None:
    x, part, axis, *rest = read_arguments(node, None, None, 0)
    given = sinking.permuted(x, order), sinking.permuted(part, order)
    return read_op(node)(*given, order.index(axis % len(order)), *rest), order


def _compute_cat(sinking: _Sinking, node: Node, order: Order) -> tuple[Tensor, Order] | None:
    parts, axis = read_arguments(node, None, 0)
    if any(part.meta["val"].dim() != len(order) for part in parts):
        return None
    return read_op(node)([sinking.permuted(part, order) for part in parts], order.index(axis % len(order))), order


def _compute_gather(sinking: _Sinking, node: Node, order: Order) -> tuple[Tensor, Order] | None:
    """Elements by their places along axes that stay side by side and in their order."""
    x, indices = read_arguments(node)
    taken = [axis for axis, index in enumerate(indices) if index is not None]
    places = [order.index(axis) for axis in taken]
    given = torch.broadcast_shapes(*(indices[axis].meta["val"].shape for axis in taken))
    if len(given) != len(taken) or not (_are_adjacent(taken) and _are_adjacent(places)):
        return None
    moved: list[Any] = [None] * (places[-1] + 1)
    for axis, place in zip(taken, places, strict=True):
        moved[place] = sinking.writer.value(indices[axis])
    return read_op(node)(sinking.permuted(x, order), moved), order


def _are_adjacent(axes: Sequence[int]) -> bool:
    return [*axes] == [*range(axes[0], axes[0] + len(axes))]


RULES: Mapping[Any, Rule] = {
    **dict.fromkeys(_SUMS, _compute_sum),
    aten.constant_pad_nd.default: _compute_pad,
    aten.slice.Tensor: _compute_slice,
    aten.slice_scatter.default: _compute_slice_scatter,
    aten.cat.default: _compute_cat,
    aten.index.Tensor: _compute_gather,
}
"""How ops that are not elementwise are computed on a permuted first argument."""


def find_rule(node: Node) -> Rule | None:
    """How a node is computed on permuted tensors; ``None`` where it is not."""
    if not isinstance(node.meta.get("val"), Tensor):
        return None
    return _compute_elementwise if is_elementwise(node) or is_filled(node) else RULES.get(read_op(node))


def read_arguments(node: Node, *defaults: Any) -> list[Any]:
    """The arguments of a call by their places, those that were left out as in ``defaults``."""
    given: list[Any] = [*node.args]
    return given + list(defaults[len(given) :])


def read_op(node: Node) -> Any:
    """The op that a node calls."""
    return node.target


def _read_permutation(node: Node) -> tuple[Node, Order]:
    """Reads the value that a node permutes, and in which order that has the axes of what it gives."""
    source, axes = node.args
    return source, inverse(axes)  # type: ignore[return-value, arg-type]


def is_elementwise(node: Node) -> bool:
    """Whether a node computes each element of one tensor from those at the same place."""
    op = node.target
    if node.op != "call_function" or not isinstance(op, torch._ops.OpOverload) or not node.all_input_nodes:
        return False
    random = torch.Tag.nondeterministic_seeded in op.tags
    return not random and (torch.Tag.pointwise in op.tags or op in _ELEMENTWISE)


def is_filled(node: Node) -> bool:
    """Whether a node gives one number in the shape of another tensor."""
    return node.target in _LIKE or node.target is aten.full_like.default


def is_spread(node: Node) -> bool:
    """Whether a node is computed element by element of what is no tensor of its size in memory."""
    if not is_elementwise(node):
        return node.target is aten.expand.default or is_filled(node)
    size = node.meta["val"].numel()
    return all(n.meta["val"].numel() < size or is_spread(n) for n in node.all_input_nodes)


def keeps_axes(node: Node) -> bool:
    """Whether what a node with a rule gives has the axes of what it takes."""
    return node.target not in _SUMS


def inverse(order: Sequence[int]) -> Order:
    """The order that undoes another."""
    return tuple(order.index(axis) for axis in range(len(order)))


def is_sorted(order: Order) -> bool:
    """Whether an order leaves all axes where they are."""
    return list(order) == sorted(order)


def is_view(shape: Sequence[int], order: Order) -> bool:
    """Whether a tensor of ``shape``, whose axes are in ``order``, has its elements in the order that it has them
    without: all that moves are axes of size 1."""
    return is_sorted(tuple(axis for axis, size in zip(order, shape, strict=True) if size != 1))


def join_permutations(graph: Graph) -> None:
    """Make one permutation of those that follow each other, and none where they undo each other, as a weight's turn for
    a product and the turn back of its gradient do. In compiled code each would be a copy."""
    for node in graph.nodes:
        order, source = _permutation(node), node
        if order is None:
            continue
        while (inner := _permutation(source.args[0])) is not None:
            source = source.args[0]
            order = [inner[axis] for axis in order]
        if order == sorted(order):
            # What is returned is no argument: it has memory of its own.
            is_argument = source.args[0].op == "placeholder"
            node.replace_all_uses_with(source.args[0], lambda user, own=is_argument: not (own and user.op == "output"))
        elif source is not node:
            node.target, node.args, node.kwargs = aten.permute.default, (source.args[0], order), {}


def _permutation(node: Any) -> list[int] | None:
    """The axes of what a node permutes, in its order; none of a node that does something else."""
    if not isinstance(node, Node) or not isinstance(node.meta.get("val"), Tensor):
        return None
    axes = [*range(node.meta["val"].dim())]
    if node.target is aten.permute.default:
        order: Any = node.args[1]
        return [axis % len(axes) for axis in order]
    if node.target is aten.t.default:
        return axes[::-1]
    if node.target is aten.transpose.int and axes:
        first, second = node.args[1:]
        axes[first], axes[second] = axes[second], axes[first]  # type: ignore[index]
        return axes
    return None
