# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A traced graph without complex numbers: each complex value becomes a pair of real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from retrograd.frontend.complex_numbers import arithmetic, fourier, partwise
from retrograd.frontend.complex_numbers.pair import REAL_DTYPES, Pair
from retrograd.frontend.decompositions.table import decomposition_table
from retrograd.frontend.doors.deferred_code import recompile_when_called
from retrograd.frontend.preparation.graph_writer import GraphWriter

aten = torch.ops.aten
RULES: Mapping[Any, Callable[..., Any]] = {**partwise.RULES, **arithmetic.RULES, **fourier.RULES}
# On a graph module: the complex constants of the user's, of which it has the parts.
CONSTANTS = "retrograd_complex_constants"
# Of those that programs take and give, IREE has no type for pairs of f16.
_PORTABLE = (torch.complex64, torch.complex128)
# A complex value: its parts, or those of each element of a list.
Parts: TypeAlias = "Pair | list[Pair]"


def split_complex(graph_module: GraphModule) -> None:
    """Have the ops of a graph that take or give complex numbers work on their parts, in place.

    What has no rule stays as it is, between ``aten.view_as_complex`` and ``aten.view_as_real``, as do complex arguments
    and results. Nothing else in the graph is complex then.
    """
    values = [node.meta.get("val") for node in graph_module.graph.nodes]
    if not any(is_complex_type(leaf) for leaf in pytree.tree_leaves(values)):
        return
    mode = detect_fake_mode(values)
    if mode is None:
        raise AssertionError("a graph of complex numbers was not traced on fake tensors")
    with torch.no_grad():
        Splitter(graph_module, GraphWriter(graph_module, mode, decomposition_table())).run()
    graph_module.graph.lint()
    recompile_when_called(graph_module)


def is_border(node: Node) -> bool:
    """Whether a node of a graph that was split makes pairs of an argument, or of what is not compiled, or a complex
    tensor for what is not: no work, since elements lie in memory as pairs."""
    if node.target not in (aten.view_as_real.default, aten.view_as_complex.default):
        return False
    return any(n.meta["val"].dtype in _PORTABLE for n in (node, *node.all_input_nodes))


def is_complex_type(value: Any) -> bool:
    """Whether a traced value is a complex tensor."""
    return isinstance(value, Tensor) and value.dtype in REAL_DTYPES


class Splitter:
    """Goes through a graph once and writes, in front of each op on complex numbers, what works on their parts."""

    def __init__(self, graph_module: GraphModule, writer: GraphWriter) -> None:
        self._graph_module, self._writer = graph_module, writer
        self._parts: dict[Node, Parts] = {}
        self._constants: dict[str, Pair] = {}
        self._wholes: dict[Node, Node] = {}
        self._gone: dict[Node, None] = {}

    def run(self) -> None:
        """Write all, and erase what that stands for."""
        for node in [*self._graph_module.graph.nodes]:
            if node.op in ("placeholder", "get_attr") or not self._touches(node):
                continue
            if node.op == "output" or not self._split(node):
                self._join_inputs(node)
        # Of what was written, the parts that nothing takes; of what was there, what that stands for.
        gone = {*self._gone, *self._writer.created}
        for node in reversed(self._graph_module.graph.nodes):
            if not node.users and (node in gone or str(node.target) in self._constants):
                self._graph_module.graph.erase_node(node)

    def _touches(self, node: Node) -> bool:
        values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
        numbers = pytree.tree_leaves((node.args, node.kwargs), is_leaf=lambda x: isinstance(x, Node))
        return any(map(is_complex_type, pytree.tree_leaves(values))) or any(isinstance(n, complex) for n in numbers)

    def _split(self, node: Node) -> bool:
        """Write what a node does on parts; says whether there is a rule for it."""
        source = node.args[0] if node.args else None
        if isinstance(source, Node) and isinstance(found := self._parts.get(source), list):
            self._parts[node], self._gone[node] = found[cast(int, node.args[1])], None
            return True
        rule = RULES.get(node.target)
        if rule is None:
            return False
        with self._writer.at(node):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self._value)
            result = rule(*args, **kwargs)
            if result is not NotImplemented:
                self._settle(node, result)
                return True
        for written in reversed(self._writer.written):
            self._graph_module.graph.erase_node(written)
        self._parts = {n: p for n, p in self._parts.items() if n in self._gone}
        return False

    def _value(self, node: Node) -> Any:
        """Return what a rule takes for a node."""
        if not is_complex_type(node.meta.get("val")):
            return self._writer.value(node)
        if node.op == "get_attr":
            return self._constant(str(node.target))
        if node not in self._parts:
            value = node.meta["val"]
            # A lazy conjugate is an argument like others: whoever calls the program resolves it.
            plain = self._writer.stand_in(node, value.shape, value.dtype, value.device)
            pairs = torch.view_as_real(plain)
            self._parts[node] = Pair(pairs.select(-1, 0), pairs.select(-1, 1))
        return self._parts[node]

    def _constant(self, name: str) -> Pair:
        if name not in self._constants:
            value = getattr(self._graph_module, name)
            with _disable_current_modes():
                plain = value.detach().resolve_conj()
                self._constants[name] = Pair(plain.real.clone(), plain.imag.clone())
            self._graph_module.meta.setdefault(CONSTANTS, []).append(value)
        return self._constants[name]

    def _settle(self, node: Node, result: Any) -> None:
        """Have all that takes what a node gives take what was written instead."""
        expected = node.meta["val"]
        if isinstance(expected, (list, tuple)):
            self._parts[node] = [self._fit(r, e) for r, e in zip(result, expected, strict=True)]
        elif is_complex_type(expected):
            self._parts[node] = pair = self._fit(result, expected)
            self._name(pair.re, f"{node.name}_re")
            self._name(pair.im, f"{node.name}_im")
        else:
            self._name(result, f"{node.name}_real")
            given = self._writer.node(result)
            if given in self._writer.written and not expected.is_neg():
                # The strides that the user's result has.
                given.meta["val"] = expected
            node.replace_all_uses_with(given)
        self._gone[node] = None

    def _name(self, value: Tensor, name: str) -> None:
        node = self._writer.node(value)
        if node in self._writer.written:
            node._rename(name)

    def _fit(self, result: Pair | Tensor, expected: Tensor) -> Pair:
        """A result as a pair of the type and shape that the trace has."""
        pair = result if isinstance(result, Pair) else Pair(result, torch.zeros_like(result))
        return pair.map(lambda part: part.to(REAL_DTYPES[expected.dtype]).expand(expected.shape))

    def _join_inputs(self, node: Node) -> None:
        """Give a node that is left as it is complex tensors for its arguments."""
        for given in node.all_input_nodes:
            if given in self._gone:
                node.replace_input_with(given, self._join(given, node))

    def _join(self, node: Node, user: Node) -> Node:
        if node not in self._wholes:
            pair = self._parts[node]
            assert isinstance(pair, Pair)
            with self._writer.at(user, origin=node):
                pairs = self._writer.node(torch.stack([pair.re, pair.im], -1))
                self._wholes[node] = self._writer.call(aten.view_as_complex.default, pairs, val=node.meta["val"])
        return self._wholes[node]
