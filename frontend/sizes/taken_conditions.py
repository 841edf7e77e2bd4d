# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decides what a trace with open sizes may take for granted: a condition that holds for the sizes of the example, which
then is one of the program."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx.experimental import _config as shape_config
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true

# Says whether a condition on sizes may be gone by.
Judge: TypeAlias = Callable[[Any], bool]


def known(condition: Any) -> bool:
    """Whether a condition holds, of open sizes for all that they may be: nothing is taken for granted."""
    return statically_known_true(condition)


def may_take_conditions() -> bool:
    """Whether the conditions of the trace that is under way are checked at each call: not where Dynamo says what is."""
    return bool(shape_config.backed_size_oblivious)


def make_size(env: ShapeEnv, expr: sympy.Expr) -> int | torch.SymInt:
    """A size that is an expression over the symbols of a trace. Sums and products are computed two by two, as a tracer
    can write them down."""
    if expr.is_number:
        return int(expr)
    if isinstance(expr, (sympy.Add, sympy.Mul)):
        parts = [make_size(env, part) for part in expr.args]
        return reduce(operator.add if isinstance(expr, sympy.Add) else operator.mul, parts)
    return env.create_symintnode(expr, hint=int(expr.xreplace(env.backed_var_to_val)))


class Conditions:
    """Conditions that hold for the sizes of the example, which are the program's once they are taken."""

    def __init__(self) -> None:
        self._found: list[torch.SymBool] = []

    def hold(self, condition: Any) -> bool:
        """Whether a condition holds, for all that open sizes may be or for those of the example."""
        if not isinstance(condition, torch.SymBool) or known(condition):
            return bool(condition)
        if not condition.node.has_hint() or not condition.node.hint:
            return False
        self._found.append(condition)
        return True

    def take(self) -> None:
        """Restrict the program to sizes for which all that was found holds."""
        with disable_proxy_modes_tracing():
            for condition in self._found:
                torch._check(condition)


def take_equal(shape: Sequence[int], expected: Callable[[], Sequence[int]]) -> None:
    """Take it that a shape is as it always is, where a trace that has not found out by itself may."""
    if all(isinstance(size, int) for size in shape) or not may_take_conditions():
        return
    with disable_proxy_modes_tracing():
        conditions = Conditions()
        if all(conditions.hold(size == due) for size, due in zip(shape, expected(), strict=True)):
            conditions.take()


@contextmanager
def deciding() -> Iterator[None]:
    """Within this, ops decide what they ask of open sizes by those of the example, as conditions of the program: an end
    that is known to be within a tensor is then not the lesser of the two."""
    with shape_config.patch(backed_size_oblivious=False):  # type: ignore[attr-defined]
        yield
