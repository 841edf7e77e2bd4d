# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Python floats that a traced graph takes: tensors of one element, in double precision.

The tracer has a symbol for each, and works out numbers of it in Python. A compiled function takes tensors and sizes,
so what is done with such a number becomes what is done with a tensor: the same op, in the overload that takes one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from retrograd.frontend.doors.deferred_code import recompile_when_called
from retrograd.frontend.python.source_locations import CaptureError, source_place

_ATEN = torch.ops.aten
# Arithmetic of numbers, as ops of tensors.
_ARITHMETIC: Mapping[Callable[..., Any], OpOverload] = {
    operator.add: _ATEN.add.Tensor,
    operator.sub: _ATEN.sub.Tensor,
    operator.mul: _ATEN.mul.Tensor,
    operator.truediv: _ATEN.div.Tensor,
    operator.pow: _ATEN.pow.Tensor_Tensor,
    operator.neg: _ATEN.neg.default,
    torch.sym_sqrt: _ATEN.sqrt.default,
}
# What gives a tensor of one number, and where the number stands.
_FILLED = {_ATEN.full.default: 1, _ATEN.full_like.default: 1, _ATEN.scalar_tensor.default: 0}


def take_floats(graph_module: GraphModule, mode: FakeTensorMode) -> None:
    """Have the graph take tensors in the place of floats, in place; their types are worked out in ``mode``.

    Raises:
        CaptureError: an op takes a number that no overload of it takes as a tensor; names it.
    """
    graph = graph_module.graph
    floats = _Floats(graph, mode)
    for node in list(graph.nodes):
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.SymFloat):
            with mode:
                node.meta["val"] = torch.empty((), dtype=torch.float64, device="cpu")
            floats.tensors[node] = node
        elif node.op == "call_function" and any(n in floats.tensors for n in node.all_input_nodes):
            with graph.inserting_before(node):
                floats.convert(node)
        elif node.op == "output" and any(n in floats.tensors for n in node.all_input_nodes):
            raise CaptureError("a result of the backward is a number", "report it")
    graph.eliminate_dead_code()
    recompile_when_called(graph_module)


class _Floats:
    """The numbers of a graph that are tensors by now: ``tensors`` are these, by the node of the number."""

    def __init__(self, graph: Graph, mode: FakeTensorMode) -> None:
        self._graph, self._mode = graph, mode
        self.tensors: dict[Node, Node] = {}

    def convert(self, node: Node) -> None:
        """Put ops of tensors in the place of a node that takes a number."""
        target: Any = node.target
        value = node.meta["val"]
        if target in _ARITHMETIC and isinstance(value, torch.SymFloat):
            self.tensors[node] = self._call(_ARITHMETIC[target], [self._number(a) for a in node.args])
            return
        if not isinstance(value, torch.Tensor):
            if not node.users:
                return
            raise _refusal(node)
        made = self._fill(node, _FILLED[target]) if target in _FILLED else self._overload(node)
        made.meta = {**node.meta, "val": made.meta["val"]}
        node.replace_all_uses_with(made)

    def _fill(self, node: Node, place: int) -> Node:
        like = node.meta["val"]
        element = self._cast(self._number(node.args[place]), like.dtype)
        shape = [] if place == 0 else node.args[0]
        if isinstance(shape, Node):
            shape = list(shape.meta["val"].shape)
        return self._call(_ATEN.expand.default, [element, shape]) if shape else element

    def _overload(self, node: Node) -> Node:
        """The same op on tensors; what it gives has the type that it had."""
        dtype, (target, args) = node.meta["val"].dtype, _without_factor(node)
        if "alpha" in node.kwargs:
            factor = self._number(node.kwargs["alpha"])
            args[1] = self._call(_ATEN.mul.Tensor, [args[1], self._cast(factor, dtype)])
        open_places = [n for n, a in enumerate(args) if isinstance(a, Node) and a in self.tensors]
        found = _find_overload(target, open_places, len(args))
        if found is None or (node.kwargs and "alpha" not in node.kwargs):
            raise _refusal(node)
        types = [argument.type for argument in found._schema.arguments]
        numbers = [n for n, a in enumerate(args) if _takes_tensor(types[n]) and _is_number(a, self.tensors)]
        taken = [self._number(a) if n in numbers else a for n, a in enumerate(args)]
        if self._value(found, taken).dtype != dtype:
            taken = [self._cast(a, dtype) if n in numbers else a for n, a in enumerate(taken)]
        return self._call(found, taken)

    def _number(self, value: Any) -> Any:
        """A number as a tensor; sizes stay what they are where ops take them."""
        if isinstance(value, Node):
            return self.tensors.get(value, value)
        return self._call(_ATEN.full.default, [[], value], {"dtype": torch.float64})

    def _cast(self, node: Any, dtype: torch.dtype) -> Any:
        if node.meta["val"].dtype == dtype:
            return node
        return self._call(_ATEN._to_copy.default, [node], {"dtype": dtype})

    def _call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Node:
        made = self._graph.call_function(target, tuple(args), dict(kwargs or {}))
        made.meta["val"] = self._value(target, args, kwargs)
        return made

    def _value(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> torch.Tensor:
        plain = torch.fx.node.map_arg(tuple(args), lambda n: n.meta["val"])
        with self._mode:
            made: torch.Tensor = target(*plain, **(kwargs or {}))
        return made


def _without_factor(node: Node) -> tuple[Any, list[Any]]:
    """A call with its arguments by place; ``a - b`` in the place of the op that subtracts from its second."""
    args = list(node.args)
    if node.target is _ATEN.rsub.Scalar and len(args) == 2:
        return _ATEN.sub.Tensor, args[::-1]
    return node.target, args


def _find_overload(target: Any, places: Sequence[int], count: int) -> OpOverload | None:
    """The overload of an op that takes tensors at these places, and at others what it took or tensors."""
    packet, before = target.overloadpacket, target._schema.arguments
    for overload in (target, *[getattr(packet, name) for name in packet.overloads()]):
        after = overload._schema.arguments
        if len(after) != len(before) or "out" in overload._overloadname:
            continue
        fits = all(_takes_tensor(after[n].type) for n in places) and all(
            _takes_tensor(b.type) if _takes_tensor(a.type) else _takes_tensor(b.type) or str(a.type) == str(b.type)
            for a, b in zip(before[:count], after[:count], strict=True)
        )
        if fits:
            return overload
    return None


def _takes_tensor(kind: Any) -> bool:
    return str(kind) in ("Tensor", "Optional[Tensor]")


def _is_number(argument: Any, tensors: Mapping[Node, Node]) -> bool:
    return argument in tensors if isinstance(argument, Node) else isinstance(argument, (int, float))


def _refusal(node: Node) -> CaptureError:
    place = source_place(node.stack_trace)
    return CaptureError(f"{node.target}{f' at {place}' if place else ''} takes a number as such", "keep it the same")
