# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sizes that are known when a function is called: expressions over symbols, as plain data and as text.

An expression is an integer, a symbol's name, or an operator with its operands: ``("*", 4, "tokens")``, in JSON
``["*", 4, "tokens"]``. A condition is one with a comparison or a connective outermost. In MLIR's attributes a shape is
text, ``batch, 4 * tokens``, in the syntax of Python, with ``+``, ``-``, ``*``, ``//``, ``%``, ``min`` and ``max``.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

# A number, a symbol, or an operator (a key of OPERATORS) with two operands.
Size: TypeAlias = "int | str | tuple[str, Size, Size]"
# An operator of the others with its operands, which are sizes, numbers that are no integers, or conditions.
Condition: TypeAlias = tuple[Any, ...]

OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "min": min,
    "max": max,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
}
_CONNECTIVES: dict[str, Callable[[list[bool]], bool]] = {"and": all, "or": any, "not": lambda terms: not terms[0]}
_HEADS = (*OPERATORS, *_COMPARISONS, *_CONNECTIVES)
_CALLED = ("min", "max", "not")
_SYNTAX: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%"}


@dataclass(frozen=True)
class DynamicSize:
    """A size that may differ from call to call: its name, the one that was traced with, its bounds, and where it is
    read off: axis ``axis`` of argument number ``argument`` (among the tensors)."""

    name: str
    hint: int
    least: int
    most: int | None
    argument: int
    axis: int

    @property
    def bounds(self) -> str:
        """The bounds of the size, in words."""
        if self.most is None:
            return f"{self.least} or more"
        return f"{self.least} to {self.most}"


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


def format_size(size: Size | Condition) -> str:
    """An expression or condition as text; operands that are expressions themselves stand in brackets."""
    if not isinstance(size, tuple):
        return str(size)
    head, *operands = size
    if head in _CALLED:
        return f"{head}({', '.join(format_size(operand) for operand in operands)})"
    return f" {head} ".join(_operand(operand) for operand in operands)


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


def evaluate_shape(shape: Sequence[Size], symbols: Mapping[str, int]) -> tuple[int, ...]:
    """The number of each size.

    Raises:
        KeyError: a symbol has none.
    """
    return tuple(evaluate_size(size, symbols) for size in shape)


def holds(condition: Condition, symbols: Mapping[str, Any]) -> bool:
    """Whether a condition (``("!=", "batch", 1)``) is fulfilled.

    Raises:
        KeyError: a symbol has no number, or the condition an unknown operator.
    """
    head, *operands = condition
    if head in _CONNECTIVES:
        return _CONNECTIVES[head]([holds(operand, symbols) for operand in operands])
    left, right = operands
    return _COMPARISONS[head](evaluate_size(left, symbols), evaluate_size(right, symbols))


def is_fixed(shape: Sequence[Size]) -> bool:
    """Whether a shape is one of numbers alone."""
    return all(isinstance(size, int) for size in shape)


def find_problem(data: Any, *, fractions: bool = False) -> str | None:
    """Says what is wrong with something read from a file, if it is no expression and no condition, which may have
    ``fractions``."""
    if isinstance(data, (int, str)) and not isinstance(data, bool):
        return None
    if isinstance(data, float) and fractions:
        return None
    if not isinstance(data, (list, tuple)):
        return f"expected a number, a name or a list, not {type(data).__name__}"
    if not data or data[0] not in _HEADS or len(data) < 2:
        return f"{list(data)} starts with none of {', '.join(_HEADS)}"
    return next((p for operand in data[1:] if (p := find_problem(operand, fractions=fractions)) is not None), None)


def numbers_of(shape: Sequence[Size]) -> tuple[int, ...]:
    """A shape that is one of numbers alone.

    Raises:
        ValueError: one of its sizes is known when the function is called, and not before.
    """
    numbers = tuple(size for size in shape if isinstance(size, int))
    if len(numbers) != len(shape):
        raise ValueError(f"({format_shape(shape)}) differs from call to call: give its sizes first")
    return numbers


def find_symbols(shape: Sequence[Size | Condition]) -> frozenset[str]:
    """The symbols of a shape, or of conditions."""
    return frozenset(_symbols(tuple(shape)))


def _symbols(sizes: Sequence[Any]) -> Iterator[str]:
    for size in sizes:
        if isinstance(size, tuple):
            yield from _symbols(size[1:])
        elif isinstance(size, str):
            yield size


def _operand(size: Size | Condition) -> str:
    text = format_size(size)
    return f"({text})" if isinstance(size, tuple) and size[0] not in _CALLED else text


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
