# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Symbolic sizes of a trace (sympy, in torch) as plain expressions, and as ops of its graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import sympy
import torch
from torch.utils._sympy import functions as sizes

from retrograd.contract.sizes import Size
from retrograd.frontend.python.source_locations import CaptureError

_BINARY: dict[type[sympy.Basic], str] = {
    sizes.FloorDiv: "//",
    sizes.Mod: "%",
    sizes.PythonMod: "%",
    sympy.Eq: "==",
    sympy.Ne: "!=",
    sympy.Lt: "<",
    sympy.Le: "<=",
}
_FLIPPED: dict[type[sympy.Basic], str] = {sympy.Gt: "<", sympy.Ge: "<="}
_CHAINS: dict[type[sympy.Basic], str] = {
    sympy.Add: "+",
    sympy.Mul: "*",
    sizes.Max: "max",
    sizes.Min: "min",
    sympy.And: "and",
    sympy.Or: "or",
}


# Ops that torch-mlir imports, and what they come to where sizes are symbols.
_EXTREMES: dict[type[sympy.Basic], Callable[..., Any]] = {
    sizes.Max: torch.ops.prim.max.int,
    sizes.Min: torch.ops.prim.min.int,
}
_OF_SYMBOLS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.prim.max.int: torch.sym_max,
    torch.ops.prim.min.int: torch.sym_min,
}


def to_size(value: int | torch.SymInt, names: Mapping[sympy.Symbol, str]) -> Size:
    """A size of a traced tensor as an expression over the symbols that ``names`` names.

    Raises:
        CaptureError: it depends on the data, or has an operation that no expression has.
    """
    return value if isinstance(value, int) else to_expression(value.node.expr, names)


def to_shape(tensor: torch.Tensor, names: Mapping[sympy.Symbol, str]) -> tuple[Size, ...]:
    """The shape of a traced tensor, size by size."""
    return tuple(to_size(size, names) for size in tensor.shape)


def to_expression(expr: sympy.Basic, names: Mapping[sympy.Symbol, str]) -> Any:
    """A sympy expression, or a condition, as plain data.

    Raises:
        CaptureError: a symbol without a name, or a function that there is no operator for.
    """
    kind = type(expr)
    if isinstance(expr, sympy.Integer):
        return int(expr)
    if isinstance(expr, sympy.Float):
        return float(expr)
    if isinstance(expr, sympy.Symbol):
        if expr in names:
            return names[expr]
        raise _unsupported(expr, "depends on the data, or on no axis of an argument alone")
    if kind in _BINARY:
        return (_BINARY[kind], *(to_expression(a, names) for a in expr.args))
    if kind in _FLIPPED:
        return (_FLIPPED[kind], *(to_expression(a, names) for a in reversed(expr.args)))
    if kind in _CHAINS:
        terms = [to_expression(a, names) for a in sorted(expr.args, key=sympy.default_sort_key)]
        return reduce(lambda a, b: (_CHAINS[kind], a, b), terms)
    if isinstance(expr, sympy.Not):
        return ("not", to_expression(expr.args[0], names))
    if isinstance(expr, (sympy.Pow, sizes.PowByNatural)) and isinstance(expr.args[1], sympy.Integer):
        base, power = to_expression(expr.args[0], names), int(expr.args[1])
        if power > 0:
            return reduce(lambda a, b: ("*", a, b), [base] * power)
    raise _unsupported(expr, f"has a {kind.__name__}, which no size expression has")


def emit(
    graph: torch.fx.Graph, expr: sympy.Basic, values: Mapping[sympy.Symbol, torch.fx.Node]
) -> torch.fx.Node | int | float:
    """Ops of ``graph``, at its insertion point, that work out a number: an integer, or (of a division) a float.

    Only operators that torch-mlir imports are used.

    Raises:
        CaptureError: as for :func:`to_expression`.
    """
    kind = type(expr)
    if isinstance(expr, sympy.Symbol) and expr in values:
        return values[expr]
    if isinstance(expr, sympy.Integer):
        return int(expr)
    if isinstance(expr, sympy.Float):
        return float(expr)
    if isinstance(expr, sizes.ToFloat):
        return _call(graph, operator.truediv, emit(graph, expr.args[0], values), 1)
    operands = [emit(graph, a, values) for a in _in_order(expr)]
    if kind in (sympy.Add, sympy.Mul):
        function = operator.add if kind is sympy.Add else operator.mul
        return reduce(lambda a, b: _call(graph, function, a, b), operands)
    if kind in _EXTREMES:
        return reduce(lambda a, b: _call(graph, _EXTREMES[kind], a, b), operands)
    if kind is sizes.FloorDiv:
        return _call(graph, operator.floordiv, *operands)
    if kind in (sizes.Mod, sizes.PythonMod):
        whole = _call(graph, operator.mul, _call(graph, operator.floordiv, *operands), operands[1])
        return _call(graph, operator.sub, operands[0], whole)
    if kind in (sizes.IntTrueDiv, sizes.FloatTrueDiv):
        return _call(graph, operator.truediv, *operands)
    if isinstance(expr, (sympy.Pow, sizes.PowByNatural)) and isinstance(operands[1], int) and operands[1] > 0:
        return reduce(lambda a, b: _call(graph, operator.mul, a, b), [operands[0]] * operands[1])
    raise _unsupported(expr, f"has a {kind.__name__}, which the compiled program cannot work out")


def _in_order(expr: sympy.Basic) -> tuple[sympy.Basic, ...]:
    chain = type(expr) in (sympy.Add, sympy.Mul, *_EXTREMES)
    return tuple(sorted(expr.args, key=sympy.default_sort_key)) if chain else expr.args


def _call(graph: torch.fx.Graph, function: Callable[..., Any], *operands: Any) -> Any:
    if not any(isinstance(o, torch.fx.Node) for o in operands):
        return function(*operands)
    node = graph.call_function(function, tuple(operands))
    # What the number is for the sizes of the trace, as torch has it.
    node.meta["val"] = _OF_SYMBOLS.get(function, function)(
        *(o.meta["val"] if isinstance(o, torch.fx.Node) else o for o in operands)
    )
    return node


def _unsupported(expr: sympy.Basic, why: str) -> CaptureError:
    return CaptureError(
        f"the dynamic size or condition {expr} {why}",
        "give that size as a number: leave its axis out of dynamic_shapes",
    )
