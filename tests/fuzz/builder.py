# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A program as it is drawn, statement by statement: it runs in eager meanwhile, which is where the shapes of its
values come from."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from programs import Input
from torch import Tensor

T = TypeVar("T")
LARGEST = 600
"""Elements of a value: the code that compiles is the same for more."""


class NoOperand(Exception):
    """No value so far fits an op."""


class Builder:
    """A program as it is drawn: its statements, and the value of each name in eager."""

    def __init__(self, draw: st.DrawFn, inputs: Sequence[Input], arguments: Sequence[Tensor]) -> None:
        self.draw = draw
        self.inputs = inputs
        self.scope: dict[str, Any] = {"torch": torch, "F": F}
        self.values: dict[str, Tensor] = {}
        self.statements: list[str] = []
        for spec, tensor in zip(inputs, arguments, strict=True):
            self.scope[spec.name] = tensor
            if not spec.indices:
                self.values[spec.name] = tensor

    def choose(self, options: Sequence[T]) -> T:
        """One of ``options``."""
        return self.draw(st.sampled_from(list(options)))

    def number(self, low: int, high: int) -> int:
        """An integer of ``low`` to ``high``."""
        return self.draw(st.integers(low, high))

    def pick(self, fits: Callable[[Tensor], bool] = lambda _: True) -> str:
        """The name of a value that ``fits``, rather a late one."""
        names = [name for name, value in self.values.items() if fits(value)]
        if not names:
            raise NoOperand
        return names[-1 - min(self.number(0, len(names) - 1), self.number(0, len(names) - 1))]

    def axis(self, name: str, *, least: int = 1) -> int:
        """An axis of a value that has at least ``least`` elements along it."""
        axes = [d for d, size in enumerate(self.values[name].shape) if size >= least]
        if not axes:
            raise NoOperand
        axis = self.choose(axes)
        return axis - self.values[name].dim() if self.draw(st.booleans()) else axis

    def weight(self, *shape: int) -> str:
        """An expression of that shape, out of the elements of some value, scaled so that sums over it stay small."""
        count = math.prod(shape)
        name = self.pick(lambda v: v.numel() >= count)
        return f"({name}.reshape(-1)[:{count}].reshape({list(shape)}) * {round(1 / math.sqrt(count), 3)})"

    def uses(self, name: str) -> int:
        """In how many assignments a value is named, its own included; what is written to in place is to return."""
        return sum(re.search(rf"\b{name}\b", s) is not None for s in self.statements if " = " in s)

    def run(self, statement: str) -> None:
        """Add a statement, and what it does in eager."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(statement, self.scope)
        self.statements.append(statement)

    def assign(self, expression: str) -> str:
        """Add ``name = expression``; the name of the new value.

        Raises:
            NoOperand: the value would be too large, or empty.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = eval(expression, self.scope)
        if not 0 < value.numel() <= LARGEST:
            raise NoOperand
        name = f"v{sum(' = ' in s for s in self.statements)}"
        self.scope[name] = self.values[name] = value
        self.statements.append(f"{name} = {expression}")
        return name
