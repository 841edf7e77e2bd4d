# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sizes that are known at each call: what they are in this one, and whether the program takes them.

Expressions are plain data, as a manifest holds them: an integer, the name of a size, or a list of an operator and its
operands, ``["*", 4, "tokens"]``. Nothing else is ever run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrograd.contract.errors import RetrogradError

# A number, a name, or [operator, operand, ...].
Expression = Any

_OPERATORS: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "min": min,
    "max": max,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    "and": lambda *terms: all(terms),
    "or": lambda *terms: any(terms),
    "not": operator.not_,
}
_UNLIMITED = "any size"


def evaluate(expression: Expression, sizes: Mapping[str, int]) -> int:
    """The value of an expression; that of a condition is true or false.

    Raises:
        KeyError: a size that ``sizes`` has no number for, or an unknown operator.
    """
    if isinstance(expression, int):
        return expression
    if isinstance(expression, str):
        return sizes[expression]
    head, *operands = expression
    return int(_OPERATORS[head](*[evaluate(operand, sizes) for operand in operands]))


def evaluate_shape(shape: Sequence[Expression], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The value of each expression."""
    return tuple(evaluate(expression, sizes) for expression in shape)


def find_problem(expression: Expression) -> str | None:
    """What is wrong with something read from a file, if it is no expression."""
    if isinstance(expression, bool) or not isinstance(expression, (int, str, list, tuple)):
        return f"expected a number, a name or a list, not {type(expression).__name__}"
    if isinstance(expression, (int, str)):
        return None
    if not expression or expression[0] not in _OPERATORS or len(expression) < 2:
        return f"{list(expression)} starts with none of {', '.join(_OPERATORS)}"
    return next((p for operand in expression[1:] if (p := find_problem(operand)) is not None), None)


def show(expression: Expression) -> str:
    """An expression as text, for messages."""
    if not isinstance(expression, (list, tuple)):
        return str(expression)
    head, *operands = expression
    texts = [f"({show(o)})" if isinstance(o, (list, tuple)) else show(o) for o in operands]
    if head in ("min", "max", "not"):
        return f"{head}({', '.join(show(o) for o in operands)})"
    return f" {head} ".join(texts)


def is_fixed(shape: Sequence[Expression]) -> bool:
    """Whether a shape is one of numbers alone."""
    return all(isinstance(size, int) for size in shape)


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

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DynamicSize:
        """Read one entry of a signature's ``sizes``."""
        return cls(data["name"], data["hint"], data["least"], data["most"], data["argument"], data["axis"])

    @property
    def bounds(self) -> str:
        """Its bounds, in words."""
        if self.most is None:
            return f"{self.least} or more" if self.least > 1 else _UNLIMITED
        return f"{self.least} to {self.most}"


class SizeError(RetrogradError, ValueError):
    """Sizes that a program does not take; the message names the argument, the axis, the bound and the remedy."""


@dataclass(frozen=True)
class SizeChecks:
    """The sizes of a program and the conditions on them, checked on every call.

    ``shapes`` are what the tensor arguments must be, as expressions, under ``names``; ``conditions`` are what the trace
    took for granted.
    """

    sizes: tuple[DynamicSize, ...]
    conditions: tuple[Expression, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[Expression, ...], ...]

    def read(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """The sizes of this call, by name, from the shapes of the tensor arguments (whose ranks are right).

        Raises:
            SizeError: they are none that the program was compiled for.
        """
        found = {size.name: shapes[size.argument][size.axis] for size in self.sizes}
        for size in self.sizes:
            if found[size.name] < size.least or (size.most is not None and found[size.name] > size.most):
                raise SizeError(
                    f"{self._place(size)} is {found[size.name]}; '{size.name}' is {size.bounds}; "
                    "pass such a size, or compile again with other dynamic_shapes"
                )
        for name, expected, shape in zip(self.names, self.shapes, shapes, strict=True):
            for axis, (wanted, given) in enumerate(zip(expected, shape, strict=True)):
                if (value := evaluate(wanted, found)) != given:
                    raise SizeError(
                        f"{name}.shape[{axis}] is {given}; expected {value}{self._because(wanted)}; "
                        "pass tensors that agree, or compile again with other dynamic_shapes"
                    )
        for condition in self.conditions:
            if not evaluate(condition, found):
                raise SizeError(
                    f"{self._values(condition, found)}; the program was traced for {show(condition)}; "
                    "pass sizes that fulfil it, or compile for these sizes by themselves"
                )
        return found

    def _place(self, size: DynamicSize) -> str:
        return f"{self.names[size.argument]}.shape[{size.axis}]"

    def _because(self, wanted: Expression) -> str:
        if isinstance(wanted, int):
            return ", the size compiled for"
        origins = [f"'{s.name}' is {self._place(s)}" for s in self.sizes if s.name in _names(wanted)]
        return f" = {show(wanted)}, where {' and '.join(origins)}"

    def _values(self, condition: Expression, found: Mapping[str, int]) -> str:
        parts = [f"{self._place(s)} ('{s.name}') is {found[s.name]}" for s in self.sizes if s.name in _names(condition)]
        return " and ".join(parts)


def _names(expression: Expression) -> set[str]:
    if isinstance(expression, str):
        return {expression}
    if isinstance(expression, (list, tuple)):
        return set().union(*(_names(operand) for operand in expression[1:]))
    return set()
