# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sizes of a captured backward that are left open: symbols while it is traced, conditions on each later step.

Sizes that were equal in all samples are one symbol; that they are is checked at each step, as is all else that the
trace took for granted. What they are is read off an input's shape, or is a number that PyTorch gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StrictMinMaxConstraint
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from retrograd.dialects.sizes import Size, evaluate_size, find_symbols, holds
from retrograd.frontend.autograd.structure import Sample, Shape, Skeleton, Structure, Vector, leaves_of, put
from retrograd.frontend.dynamic_shapes import find_conditions
from retrograd.frontend.outputs import find_order
from retrograd.frontend.size_expressions import to_expression, to_size
from retrograd.frontend.source import CaptureError

# A condition that holds for these and not for 1 says of a size that it is not 1, and no more.
_OTHERS = range(2, 66)


@dataclass(frozen=True)
class SizeGuard:
    """For which sizes a graph is right.

    ``names`` are the open sizes, each with where it is read: among all numbers of a step, the shapes of the inputs and
    then the slots, the one at ``places``. ``expected`` is what each of these numbers has to be, and ``conditions`` what
    the trace took for granted besides; those in ``not_one`` only say that a size is not 1, which may not matter.
    """

    names: tuple[str, ...]
    places: tuple[int, ...]
    expected: tuple[Size, ...]
    conditions: tuple[Any, ...]
    not_one: tuple[Any, ...]

    def read(self, shapes: Sequence[Shape], numbers: Sequence[int]) -> dict[str, int] | None:
        """The open sizes of a step, by name; None where the graph is not for them. What is 1 may have to be tried."""
        given = [*chain.from_iterable(shapes), *numbers]
        sizes = {name: given[place] for name, place in zip(self.names, self.places, strict=True)}
        if min(sizes.values()) < 1 or len(given) != len(self.expected):
            return None
        fits = all(evaluate_size(size, sizes) == n for size, n in zip(self.expected, given, strict=True))
        conditions = self.conditions if 1 in sizes.values() else (*self.conditions, *self.not_one)
        return sizes if fits and all(holds(c, sizes) for c in conditions) else None


class OpenSizes:
    """The symbols of one trace.

    Raises:
        CaptureError: nothing is open, or there is no sample to trace with.
    """

    def __init__(self, structure: Structure) -> None:
        example = structure.example()
        if example is None:
            raise CaptureError("its sizes were 0 or 1 whenever they were others", "begin with greater sizes")
        self._index = structure.samples.index(example)
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self.env)
        self._symbols: dict[Vector, torch.SymInt] = {}
        # The inputs' shapes and the slots, then what calls give: a symbol is first made for what can be read.
        self.shapes: tuple[tuple[int | torch.SymInt, ...], ...] = self._fill(structure.vectors(_shapes))
        self.numbers: tuple[int | torch.SymInt, ...] = self._fill(structure.vectors(_numbers))
        self._read = tuple(self._symbols.values())
        self.results: tuple[tuple[Any, ...], ...] = self._fill(structure.vectors(_results))

    @property
    def symbols(self) -> tuple[torch.SymInt, ...]:
        """All that a graph takes as numbers."""
        return self._read

    def _fill(self, joined: Any) -> Any:
        if isinstance(joined, tuple):
            return tuple([self._fill(part) for part in joined])
        return self._symbol(joined) if isinstance(joined, Vector) else joined

    def _symbol(self, vector: Vector) -> torch.SymInt:
        if vector not in self._symbols:
            source, number = ConstantSource(f"size_{len(self._symbols)}"), vector.values[self._index]
            bounds = StrictMinMaxConstraint(vr=ValueRanges(1, int_oo), warn_only=False)
            symbol = self.env.create_symbol(
                number, source, DimDynamic.DYNAMIC, constraint_dim=bounds, do_not_specialize_zero_one=True
            )
            made: Any = self.env.create_symintnode(symbol, hint=number, source=source)
            self._symbols[vector] = made
        return self._symbols[vector]

    def like(self, tensor: torch.Tensor, shape: Sequence[int | torch.SymInt]) -> torch.Tensor:
        """A stand-in for a tensor, of another shape, whose elements lie in the same order, with none in between; to be
        made in ``mode``."""
        if all(isinstance(n, int) for n in shape):
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        if tensor.is_contiguous():
            return torch.empty(tuple(shape), dtype=tensor.dtype, device=tensor.device)
        order = find_order(tensor.stride())
        once = [1 if axis in order.expanded else n for axis, n in enumerate(shape)]
        inverse = [order.outer_to_inner.index(axis) for axis in range(tensor.dim())]
        made = torch.empty([once[a] for a in order.outer_to_inner], dtype=tensor.dtype, device=tensor.device)
        return made.permute(inverse).expand(tuple(shape))

    def names(self) -> dict[sympy.Symbol, str]:
        """Names of what is open, now that the trace is done, by the symbols that are left.

        Raises:
            CaptureError: the trace went by the number that a size is.
        """
        names: dict[sympy.Symbol, str] = {}
        for number, vector in enumerate(self._symbols):
            expr = self._symbols[vector].node.expr
            if expr.is_number:
                values = " and ".join(str(n) for n in dict.fromkeys(vector.values))
                raise CaptureError(
                    f"a size that was {values} is traced as the number {expr}: what is computed depends on it",
                    "keep that size fixed",
                )
            if isinstance(expr, sympy.Symbol):
                names.setdefault(expr, f"s{number}")
        return names

    def describe(self, names: Sequence[str], tensors: Sequence[str]) -> list[str]:
        """What the open sizes of these names are, of inputs that have names too, and what they were so far."""
        pairs = list(zip(tensors, self.shapes, strict=True))
        axes = [(n, f"axis {axis} of {tensor}") for tensor, shape in pairs for axis, n in enumerate(shape)]
        texts = []
        for number, (vector, symbol) in enumerate(self._symbols.items()):
            if f"s{number}" in names:
                where = next((text for n, text in axes if n is symbol), "number of the backward")
                texts.append(f"{where} (so far {', '.join(map(str, dict.fromkeys(vector.values)))})")
        return texts

    def guard(self, names: Mapping[sympy.Symbol, str]) -> SizeGuard:
        """What a step's sizes have to be.

        Raises:
            CaptureError: a size is known from no input and no number.
        """
        expected = tuple(to_size(n, names) for n in (*chain.from_iterable(self.shapes), *self.numbers))
        places = {name: expected.index(name) for name in names.values() if name in expected}
        lost = find_symbols(expected) - places.keys()
        if lost:
            raise CaptureError(f"nothing tells the size {sorted(lost)[0]}", "report it")
        conditions = [to_expression(expr, names) for expr in find_conditions(self.env)]
        not_one = tuple(c for c in conditions if _only_excludes_one(c, tuple(places)))
        rest = tuple(c for c in conditions if c not in not_one)
        return SizeGuard(tuple(places), tuple(places.values()), expected, rest, not_one)


@dataclass(frozen=True)
class OpenLayout:
    """The open sizes of a trace, and where they are in one capture."""

    sizes: OpenSizes
    skeleton: Skeleton

    def fill(self, node: torch.fx.Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A node's arguments, with symbols in the place of numbers that are open."""
        for slot, number in zip(self.skeleton.slots, self.sizes.numbers, strict=True):
            if slot.node == node.name and isinstance(number, torch.SymInt):
                args, kwargs = put((args, kwargs), slot.path, number)
        return args, kwargs

    def declare(self, recorded: Mapping[str, Any]) -> dict[str, list[torch.Tensor]]:
        """What each call gives, for the tracer, by its node, from what it gave in the recorded run."""
        return {
            name: [
                self.sizes.like(leaf, shape)
                for leaf, shape in zip(leaves_of(recorded[name]), shapes, strict=True)
                if isinstance(leaf, torch.Tensor) and shape is not None
            ]
            for name, shapes in zip(self.skeleton.calls, self.sizes.results, strict=True)
        }


def _shapes(sample: Sample) -> Any:
    return sample.shapes


def _numbers(sample: Sample) -> Any:
    return sample.numbers


def _results(sample: Sample) -> Any:
    return sample.results


def _only_excludes_one(condition: Any, names: Sequence[str]) -> bool:
    """Whether a condition holds whatever the sizes are, if they are greater than 1."""
    return all(holds(condition, dict.fromkeys(names, n)) for n in _OTHERS) and all(
        holds(condition, dict.fromkeys(names, 64) | {name: n}) for name in names for n in _OTHERS
    )
