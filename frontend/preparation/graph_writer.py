# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Ops on traced values, written into a graph as they are called."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from retrograd.frontend.sizes.size_expressions import emit
from retrograd.frontend.sizes.size_nodes import SYMBOLIC, find_heads

# On a node: what it gives, what it is to the user as an argument; all else says where it is from.
_OWN = ("val", "tensor_meta", "desc")


class GraphWriter(TorchDispatchMode):
    """While it is active, each op on values of the graph becomes a node, at a place in the graph that is chosen before.
    Ops that ``table`` decomposes are decomposed. Tensors that are no values of the graph become constants of it."""

    def __init__(
        self, graph_module: GraphModule, mode: FakeTensorMode, table: Mapping[OpOverload, Callable[..., Any]]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph_module, self._mode, self._table = graph_module, mode, table
        # With the tensors themselves, which must not give up their ids.
        self._nodes: dict[int, tuple[Tensor, Node]] = {}
        self._constants: dict[int, tuple[Tensor, FakeTensor, Node]] = {}
        self._heads = {n.meta["val"].node.expr: n for n in find_heads(graph_module.graph)}
        self._origin: Node | None = None
        # Since the last call of `at`, and of all nodes.
        self.written: list[Node] = []
        self.created: set[Node] = set()

    def value(self, node: Node) -> Any:
        """Return a node's value, for ops to be called on."""
        for leaf in pytree.tree_leaves(node.meta["val"]):
            if isinstance(leaf, Tensor):
                self._nodes[id(leaf)] = (leaf, node)
        return node.meta["val"]

    def node(self, tensor: Tensor) -> Node:
        """The node that gives a tensor."""
        if id(tensor) not in self._nodes and isinstance(tensor, FakeTensor):
            raise AssertionError("an op takes a traced tensor that no node of the graph gives")
        return self._nodes[id(tensor)][1] if id(tensor) in self._nodes else self._constant(tensor)[2]

    def stand_in(self, node: Node, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A plain tensor that stands for what a node gives."""
        with _disable_current_modes(), self._mode:
            tensor = torch.empty(shape, dtype=dtype, device=device)
        self._nodes[id(tensor)] = (tensor, node)
        return tensor

    @contextmanager
    def at(self, node: Node, origin: Node | None = None) -> Iterator[None]:
        """Write in front of ``node`` from here on, with the place in the user's code of ``origin``, or its own;
        ``written`` starts anew."""
        self.written, self._origin = [], origin or node
        with self._graph_module.graph.inserting_before(node), self:
            yield

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._table:
            with self:
                result = self._table[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        given, named = pytree.tree_map(self._as_argument, (args, kwargs))
        with self._mode:
            result = func(*pytree.tree_map_only(Tensor, self._as_fake, args), **pytree.tree_map(self._as_fake, kwargs))
        if not any(isinstance(leaf, (Tensor, *SYMBOLIC)) for leaf in pytree.tree_leaves(result)):
            # The device of a tensor, say: known by now.
            return result
        node = self._create(func, given, named, result)
        if isinstance(result, (tuple, list)):
            for index, element in enumerate(result):
                self._remember(element, self._create(operator.getitem, (node, index), {}, element))
        else:
            self._remember(result, node)
        return result

    def call(self, target: OpOverload, *args: Any, val: Any) -> Node:
        """Write a node as it is; ``val`` is what it gives."""
        return self._create(target, args, {}, val)

    def _create(self, target: Any, args: Any, kwargs: Any, val: Any) -> Node:
        node = self._graph_module.graph.call_function(target, tuple(args), dict(kwargs))
        if self._origin is not None:
            node.meta = {k: v for k, v in self._origin.meta.items() if k not in _OWN}
        node.meta["val"] = val
        self.written.append(node)
        self.created.add(node)
        return node

    def _remember(self, value: Any, node: Node) -> None:
        if isinstance(value, Tensor):
            self._nodes[id(value)] = (value, node)

    def _as_argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.node(value)
        if isinstance(value, SYMBOLIC):
            return emit(self._graph_module.graph, value.node.expr, self._heads)
        return value

    def _as_fake(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        return self._constant(value)[1]

    def _constant(self, tensor: Tensor) -> tuple[Tensor, FakeTensor, Node]:
        """A tensor among the attributes of the module, and the node that reads it, in front of all else."""
        if id(tensor) not in self._constants:
            name = self._new_name()
            self._graph_module.register_buffer(name, tensor, persistent=False)
            graph = self._graph_module.graph
            with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
                node = graph.get_attr(name)
            node.meta["val"] = fake = self._mode.from_tensor(tensor, static_shapes=True)
            self._constants[id(tensor)] = (tensor, fake, node)
        return self._constants[id(tensor)]

    def _new_name(self) -> str:
        number = 0
        while hasattr(self._graph_module, f"_complex_constant{number}"):
            number += 1
        return f"_complex_constant{number}"
