# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sizes that are known when a function is called: expressions over symbols, as text in attributes and as plain data.

A shape is written ``batch, 4 * tokens``, in the syntax of Python, with ``+``, ``-``, ``*``, ``//``, ``%``, ``min`` and
``max`` of integers and symbols. As data (JSON, in a manifest) an expression is an integer, a symbol's name, or a list
of an operator and its two operands: ``["*", 4, "tokens"]``.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

# A number, a symbol, or an operator (a key of OPERATORS) with two operands.
Size: TypeAlias = "int | str | tuple[str, Size, Size]"

OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "min": min,
    "max": max,
}
# Of conditions, which are expressions with one of these outermost; the last three take conditions.
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
}
_CONNECTIVES: dict[str, Callable[[list[bool]], bool]] = {"and": all, "or": any, "not": lambda terms: not terms[0]}
_SYNTAX: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.Mod: "%",
}


def format_shape(shape: Sequence[Size]) -> str:
    """``("batch", ("*", 4, "tokens"))`` -> ``batch, 4 * tokens``."""
    return ", ".join(format_size(size) for size in shape)


def parse_shape(text: str) -> tuple[Size, ...]:
    """Read what :func:`format_shape` wrote.

    Raises:
        ValueError: the text holds anything but expressions of sizes; says what.
    """
    try:
        tree = ast.parse(f"({text},)" if text.strip() else "()", mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"'{text}' is no shape: {error.msg}") from error
    if not isinstance(tree, ast.Tuple):
        raise ValueError(f"'{text}' is no shape")
    return tuple(_read(node) for node in tree.elts)


def format_size(size: Size) -> str:
    """An expression as text; operands that are expressions themselves stand in brackets."""
    if not isinstance(size, tuple):
        return str(size)
    head, left, right = size
    if head in ("min", "max"):
        return f"{head}({format_size(left)}, {format_size(right)})"
    return f"{_operand(left)} {head} {_operand(right)}"


def evaluate_size(size: Size, symbols: Mapping[str, int]) -> int:
    """The number that an expression is, once each symbol has one.

    Raises:
        KeyError: a symbol has none.
    """
    if isinstance(size, str):
        return symbols[size]
    # Conditions compare with other numbers too.
    if not isinstance(size, tuple):
        return size
    head, left, right = size
    return OPERATORS[head](evaluate_size(left, symbols), evaluate_size(right, symbols))


def holds(condition: Any, symbols: Mapping[str, Any]) -> bool:
    """Whether a condition (``("!=", "batch", 1)``) is fulfilled.

    Raises:
        KeyError: a symbol has no number, or the condition an unknown operator.
    """
    head, *operands = condition
    if head in _CONNECTIVES:
        return _CONNECTIVES[head]([holds(operand, symbols) for operand in operands])
    left, right = operands
    return _COMPARISONS[head](evaluate_size(left, symbols), evaluate_size(right, symbols))


def find_symbols(shape: Sequence[Size]) -> frozenset[str]:
    """The symbols of a shape."""
    return frozenset(_symbols(tuple(shape)))


def _symbols(sizes: Sequence[Size]) -> Iterator[str]:
    for size in sizes:
        if isinstance(size, tuple):
            yield from _symbols(size[1:])
        elif isinstance(size, str):
            yield size


def _operand(size: Size) -> str:
    text = format_size(size)
    return f"({text})" if isinstance(size, tuple) and size[0] not in ("min", "max") else text


def _read(node: ast.expr) -> Size:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)):
            return -number
        case ast.Name(id=name):
            return name
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SYNTAX:
            return (_SYNTAX[type(op)], _read(left), _read(right))
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=[left, right], keywords=[]):
            return (name, _read(left), _read(right))
    raise ValueError(f"'{ast.unparse(node)}' is no size: it may have numbers, symbols, + - * // %, min and max")
