# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sizes that are known at each call: what they are in this one, and whether the program takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from retrograd.contract.errors import RetrogradError
from retrograd.contract.sizes import Condition, DynamicSize, Size, evaluate_size, find_symbols, format_size, holds


class SizeError(RetrogradError, ValueError):
    """Sizes that a program does not take; the message names the argument, the axis, the bound and the remedy."""


@dataclass(frozen=True)
class SizeChecks:
    """The sizes of a program and the conditions on them, checked on every call. ``shapes`` are what the tensor
    arguments must be, as expressions, under ``names``; ``conditions`` are what the trace took for granted."""

    sizes: tuple[DynamicSize, ...]
    conditions: tuple[Condition, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[Size, ...], ...]

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
                if (value := evaluate_size(wanted, found)) != given:
                    raise SizeError(
                        f"{name}.shape[{axis}] is {given}; expected {value}{self._because(wanted)}; "
                        "pass tensors that agree, or compile again with other dynamic_shapes"
                    )
        for condition in self.conditions:
            if not holds(condition, found):
                raise SizeError(
                    f"{self._values(condition, found)}; the program was traced for {format_size(condition)}; "
                    "pass sizes that fulfil it, or compile for these sizes by themselves"
                )
        return found

    def _place(self, size: DynamicSize) -> str:
        return f"{self.names[size.argument]}.shape[{size.axis}]"

    def _because(self, wanted: Size) -> str:
        if isinstance(wanted, int):
            return ", the size compiled for"
        origins = [f"'{s.name}' is {self._place(s)}" for s in self.sizes if s.name in find_symbols((wanted,))]
        return f" = {format_size(wanted)}, where {' and '.join(origins)}"

    def _values(self, condition: Condition, found: Mapping[str, int]) -> str:
        parts = [
            f"{self._place(s)} ('{s.name}') is {found[s.name]}"
            for s in self.sizes
            if s.name in find_symbols((condition,))
        ]
        return " and ".join(parts)
