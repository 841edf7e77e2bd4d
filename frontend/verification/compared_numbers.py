# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The numbers that a comparison, or the choice of an extreme, hangs on: these alone tell whether rounding decides it.

Masks that a ReLU's backward reads, and the places that a pooling took, are results of most compiled forwards. To see
that rounding decides an element of one, the whole graph need not run again with other rounding. The few ops from the
numbers that are compared to the result do, with these numbers moved by what they would be allowed to differ by
themselves, were they results.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import arg_tree_leaves

from retrograd.frontend.doors.deferred_code import make_graph_module
from retrograd.frontend.layers.random_ops import DRAW_SEED
from retrograd.frontend.verification.distances import error_of
from retrograd.frontend.verification.first_comparison import tolerance_of
from retrograd.frontend.verification.judgement import SLACK
from retrograd.frontend.verification.other_roundings import spread
from retrograd.frontend.verification.rounding import find_tolerances

aten = torch.ops.aten
# Ops that compare. Not eq and ne: what is equal by how it is made stays so however it is rounded.
_ORDERS = {op for name in ("lt", "le", "gt", "ge") for op in (getattr(aten, name).Scalar, getattr(aten, name).Tensor)}
_EXTREMES = {
    aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default,
    aten.argmax.default,
    aten.argmin.default,
    aten.max.dim,
    aten.min.dim,
}
# Ops that choose or arrange numbers and compute none: what is zero behind a ReLU is not in front of it.
_EXACT = {
    aten.alias.default,
    aten.detach.default,
    aten.relu.default,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
    aten.hardtanh.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten.clone.default,
}
# How often the numbers are moved at random, after all of them up and all of them down.
_DRAWS = 6

Moves = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Comparison:
    """A result that is no float, by ``run`` from other values of the graph: those at ``places`` of the head's results.

    ``allowed`` are the relative errors that rounding explains of these, 0 of those that are no floats; ``scalars`` are
    numbers that the ops compare with.
    """

    run: GraphModule
    places: tuple[int, ...]
    allowed: tuple[float, ...]
    scalars: tuple[float, ...]

    def move(self, values: Sequence[Any], errors: Sequence[float], moves: Moves) -> Any:
        """The result, where the numbers that it hangs on are moved: all by the same, at the most, and by no more than
        any is allowed of its root mean square, its tolerance or its one of ``errors``, by place. So equal ones stay
        equal; whole ones, and those that are equal to one that they are compared with, stay what they are."""
        given = [values[place] for place in self.places]
        allowed = [a and max(a, errors[place]) for a, place in zip(self.allowed, self.places, strict=True)]
        scales = [a * _root_mean_square(v) for v, a in zip(given, allowed, strict=True) if a and v.numel()]
        amount = min(scales, default=0.0)
        return self.run(*(self._moved(v, amount, moves) if a else v for v, a in zip(given, allowed, strict=True)))

    def extrapolate(self, values: Sequence[Any], others: Sequence[Any], times: float) -> Any:
        """The result, where each number that it hangs on is so many times as far off as it is in ``others``, what
        another run gave: what is equal by how it is made is so there too."""
        given = [(values[place], others[place]) for place in self.places]
        return self.run(*(_beyond(*g, times) if a else g[0] for g, a in zip(given, self.allowed, strict=True)))

    def _moved(self, values: Tensor, amount: float, moves: Moves) -> Tensor:
        wide = values.double()
        kept = wide == wide.round()
        for scalar in self.scalars:
            kept |= values == scalar
        return wide.where(kept, wide + amount * moves(wide)).to(values.dtype)


@dataclass(frozen=True)
class Comparisons:
    """Results of a graph that are no floats, ``None`` for those that are told by no comparison; ``head`` gives the
    values that they are computed from."""

    head: GraphModule
    told: tuple[Comparison | None, ...]

    def run(self, arguments: Sequence[Any], otherwise: Callable[[GraphModule], Sequence[Any]]) -> Iterator[list[Any]]:
        """The results, as they are, then with the numbers moved: by their tolerances, and, if more is asked for, by
        ``SLACK`` times what they differ by, each by itself or all of them, where the head is run ``otherwise``."""
        values = self.head(*arguments)
        none = [0.0] * len(values)
        yield self._run(values, none, _not_at_all)
        generator = torch.Generator().manual_seed(0)
        seeds = [int(torch.randint(1 << 62, (), generator=generator, device="cpu")) for _ in range(_DRAWS)]
        for moves in (_all_up, _all_down, *map(_at_random, seeds)):
            yield self._run(values, none, moves)
        others = otherwise(self.head)
        for times in (SLACK, -SLACK):
            yield [None if c is None else c.extrapolate(values, others, times) for c in self.told]
        pairs = zip(others, values, strict=True)
        own = [error_of(v, o) if isinstance(v, Tensor) and v.is_floating_point() else 0.0 for o, v in pairs]
        # What is infinite says nothing.
        errors = [SLACK * error if error < math.inf else 0.0 for error in own]
        for moves in (_all_up, _all_down, *map(_at_random, seeds)):
            yield self._run(values, errors, moves)

    def _run(self, values: Sequence[Any], errors: Sequence[float], moves: Moves) -> list[Any]:
        return [None if c is None else c.move(values, errors, moves) for c in self.told]


def find_comparisons(graph_module: GraphModule, places: Sequence[int]) -> Comparisons | None:
    """The comparisons that give the results at ``places`` of a graph whose nodes have ``val`` metadata; ``None`` where
    none tells anything."""
    graph = graph_module.graph
    (output,) = graph.find_nodes(op="output")
    results = arg_tree_leaves(*output.args)
    found = [_find_inside(results[place]) for place in places]
    needed = dict.fromkeys(value for inside in found for value in _find_given(graph, inside))
    if not needed:
        return None
    tolerances = find_tolerances(graph, tolerance_of)
    numbers = {node: number for number, node in enumerate(needed)}
    told: list[Comparison | None] = []
    for place, inside in zip(places, found, strict=True):
        given = _find_given(graph, inside)
        allowed = tuple(tolerances[node] if _is_float(node) else 0.0 for node in given)
        # Arguments are exact: what equals one need not stay equal where it is moved.
        if not any(allowed) or any(_is_float(n) and not a for n, a in zip(given, allowed, strict=True)):
            told.append(None)
            continue
        tail, copied = Graph(), dict[Node, Node]()
        for node in given:
            copied[node] = tail.placeholder(node.name)
        for node in graph.nodes:
            if node in inside:
                copied[node] = tail.node_copy(node, copied.__getitem__)
        tail.output(copied[results[place]])
        run = make_graph_module(graph_module, tail)
        told.append(Comparison(run, tuple(numbers[node] for node in given), allowed, _find_scalars(inside)))
    if not any(told):
        return None
    head, made = Graph(), dict[Node, Node]()
    head.graph_copy(graph, cast(Any, made))
    head.output(tuple(made[node] for node in needed))
    head.eliminate_dead_code()
    return Comparisons(make_graph_module(graph_module, head), tuple(told))


def _find_inside(result: Any) -> set[Node]:
    """The ops from the numbers that are compared to a result; none where there is something else among them."""
    inside: set[Node] = set()
    pending = [result]
    while pending:
        node = pending.pop()
        if not isinstance(node, Node):
            return set()
        if node in inside or node.op != "call_function":
            continue
        is_known = _compares(node) or node.target in _EXACT or not any(map(_is_float, node.all_input_nodes))
        if not is_known or not _is_pure(node):
            return set()
        inside.add(node)
        pending += [taken for taken in node.all_input_nodes if not _is_float(taken) or taken.target in _EXACT]
    return inside


def _find_given(graph: Graph, inside: set[Node]) -> list[Node]:
    """Finds the values that the ops take from outside."""
    taken = dict.fromkeys(given for node in graph.nodes if node in inside for given in node.all_input_nodes)
    return [node for node in taken if node not in inside]


def _compares(node: Node) -> bool:
    is_infinity = node.target is aten.eq.Scalar and node.args[1] in (math.inf, -math.inf)
    return node.target in _ORDERS or node.target in _EXTREMES or is_infinity


def _is_pure(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    drawn = target is DRAW_SEED or torch.Tag.nondeterministic_seeded in target.tags
    return not drawn and not target._schema.is_mutable


def _find_scalars(inside: set[Node]) -> tuple[float, ...]:
    taken = (a for node in inside if node.target in _ORDERS | _EXACT for a in node.args)
    return tuple({float(a) for a in taken if isinstance(a, int | float)})


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def _beyond(values: Tensor, others: Tensor, times: float) -> Tensor:
    wide = values.double()
    moved = wide + times * (others.double() - wide)
    return moved.where(moved.isfinite(), wide).to(values.dtype)


def _root_mean_square(values: Tensor) -> float:
    wide = values.double()
    return float(wide.where(wide.isfinite(), 0.0).square().mean().sqrt())


def _not_at_all(_: Tensor) -> Any:
    return 0.0


def _all_up(_: Tensor) -> Any:
    return 1.0


def _all_down(_: Tensor) -> Any:
    return -1.0


def _at_random(seed: int) -> Moves:
    return lambda wide: 2 * spread(wide.contiguous().view(torch.int64), seed) - 1
