# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sizes and other numbers of a captured backward that are left open: symbols while it is traced, conditions on each
later step.

Sizes that were equal in all samples are one symbol; that they are is checked at each step, as is all else that the
trace took for granted. What they are is read off an input's shape, or is a number that PyTorch gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StrictMinMaxConstraint
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from retrograd.contract.sizes import Size, evaluate_size, find_symbols, holds
from retrograd.frontend.autograd.engine.python_calls import Frame
from retrograd.frontend.autograd.hooks.hook_inlining import Finder
from retrograd.frontend.autograd.sizes.skeleton import Number, Path, Skeleton, leaves_of, put
from retrograd.frontend.autograd.sizes.structure import Sample, Shape, Structure, Vector
from retrograd.frontend.doors.outputs import find_order
from retrograd.frontend.python.source_locations import CaptureError
from retrograd.frontend.sizes.dynamic_shapes import find_conditions
from retrograd.frontend.sizes.size_expressions import to_expression, to_size
from retrograd.frontend.sizes.size_nodes import SYMBOLIC

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
    expected: tuple[Size | float, ...]
    conditions: tuple[Any, ...]
    not_one: tuple[Any, ...]

    def read(self, shapes: Sequence[Shape], numbers: Sequence[Number]) -> dict[str, Any] | None:
        """The open sizes of a step, by name; None where the graph is not for them. What is 1 may have to be tried."""
        given = [*chain.from_iterable(shapes), *numbers]
        if len(given) != len(self.expected):
            return None
        sizes = {name: given[place] for name, place in zip(self.names, self.places, strict=True)}
        if any(isinstance(n, int) and n < 1 for n in sizes.values()):
            return None
        fits = all(_evaluate(size, sizes) == n for size, n in zip(self.expected, given, strict=True))
        conditions = self.conditions if ones_of(sizes) else (*self.conditions, *self.not_one)
        return sizes if fits and all(holds(c, sizes) for c in conditions) else None


def ones_of(sizes: Mapping[str, Number]) -> frozenset[str]:
    """Which of these sizes are 1; other numbers are no sizes."""
    return frozenset([name for name, n in sizes.items() if n == 1 and isinstance(n, int)])


class OpenSizes:
    """The symbols of one trace.

    Raises:
        CaptureError: nothing is open, or there is no sample to trace with.
    """

    def __init__(self, structure: Structure) -> None:
        example = structure.example()
        if example is None:
            raise CaptureError("in no step so far were all sizes that differ 2 or more", "begin with greater sizes")
        self._index = structure.samples.index(example)
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self.env)
        self._symbols: dict[Vector, Any] = {}
        # The inputs' shapes and the slots, then what calls give: a symbol is first made for what can be read.
        self.shapes: tuple[tuple[int | torch.SymInt, ...], ...] = self._fill(structure.vectors(_shapes))
        self.numbers: tuple[Any, ...] = self._fill(structure.vectors(_numbers))
        self._read = tuple(self._symbols.values())
        self.results: tuple[tuple[Any, ...], ...] = self._fill(structure.vectors(_results))

    @property
    def floats(self) -> tuple[torch.SymFloat, ...]:
        """All that a graph takes as floats, in the order of :meth:`finders`."""
        return tuple([symbol for symbol in self._read if isinstance(symbol, torch.SymFloat)])

    @property
    def integers(self) -> tuple[torch.SymInt, ...]:
        """All that a graph takes as sizes."""
        return tuple([symbol for symbol in self._read if isinstance(symbol, torch.SymInt)])

    def _fill(self, joined: Any) -> Any:
        if isinstance(joined, tuple):
            return tuple([self._fill(part) for part in joined])
        return self._symbol(joined) if isinstance(joined, Vector) else joined

    def _symbol(self, vector: Vector) -> torch.SymInt | torch.SymFloat:
        if vector not in self._symbols:
            source, number = ConstantSource(f"size_{len(self._symbols)}"), vector.values[self._index]
            made: Any
            if isinstance(number, float):
                symbol = self.env.create_unspecified_symbol(number, source, DimDynamic.DYNAMIC)
                made = self.env.create_symfloatnode(symbol, hint=number, source=source)
            else:
                bounds = StrictMinMaxConstraint(vr=ValueRanges(1, int_oo), warn_only=False)
                symbol = self.env.create_symbol(
                    number, source, DimDynamic.DYNAMIC, constraint_dim=bounds, do_not_specialize_zero_one=True
                )
                made = self.env.create_symintnode(symbol, hint=number, source=source)
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

    def closed(self) -> int:
        """How many of the symbols the trace knows the numbers of by now, having asked for them."""
        return sum(symbol.node.expr.is_number is True for symbol in self._symbols.values())

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
                what = "number" if vector.kind is float else "size"
                raise CaptureError(
                    f"a {what} that was {values} is traced as the number {expr}: what is computed depends on it",
                    f"keep that {what} fixed",
                )
            if isinstance(expr, sympy.Symbol):
                names.setdefault(expr, f"s{number}")
        return names

    def finders(self) -> tuple[Finder, ...]:
        """Where a step finds the floats, as tensors."""
        read = enumerate(self._read)
        return tuple([_float_finder(f"s{n}") for n, symbol in read if isinstance(symbol, torch.SymFloat)])

    def describe(self, names: Sequence[str], tensors: Sequence[str], skeleton: Skeleton) -> list[str]:
        """Name the open sizes of these names, by inputs that have names too, and say what they were so far."""
        pairs = list(zip(tensors, self.shapes, strict=True))
        axes = [(n, f"axis {axis} of {tensor}") for tensor, shape in pairs for axis, n in enumerate(shape)]
        axes += [(n, f"number of {s.node}") for n, s in zip(self.numbers, skeleton.slots, strict=True)]
        texts = []
        for number, (vector, symbol) in enumerate(self._symbols.items()):
            if f"s{number}" in names:
                where = next((text for n, text in axes if n is symbol), "size of what a hook gives")
                texts.append(f"{where} (so far {', '.join(map(str, dict.fromkeys(vector.values)))})")
        return texts

    def guard(self, names: Mapping[sympy.Symbol, str]) -> SizeGuard:
        """Collect the conditions on a step's sizes.

        Raises:
            CaptureError: a size is known from no input and no number.
        """
        numbers = [*chain.from_iterable(self.shapes), *self.numbers]
        expected = tuple(n if isinstance(n, float) else to_size(n, names) for n in numbers)
        places = {name: expected.index(name) for name in names.values() if name in expected}
        lost = find_symbols([n for n in expected if not isinstance(n, float)]) - places.keys()
        if lost:
            raise CaptureError(f"no input and no number tells the open size {sorted(lost)[0]}", "report it")
        conditions = [to_expression(expr, names) for expr in find_conditions(self.env)]
        floats = {symbol.node.expr for symbol in self.floats}
        whole = [name for symbol, name in names.items() if symbol not in floats]
        not_one = tuple(c for c in conditions if _only_excludes_one(c, whole))
        rest = tuple(c for c in conditions if c not in not_one)
        return SizeGuard(tuple(places), tuple(places.values()), expected, rest, not_one)


@dataclass(frozen=True)
class OpenPlaces:
    """The open sizes of a trace, and where they are in one capture."""

    sizes: OpenSizes
    skeleton: Skeleton

    def fill(self, node: torch.fx.Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A node's arguments, with symbols in the place of numbers that are open."""
        for path, number in self._open.get(node.name, ()):
            args, kwargs = put((args, kwargs), path, number)
        return args, kwargs

    def open_slots(self, node: torch.fx.Node) -> dict[Path, int]:
        """The numbers among a node's arguments that are open: where they stand, and which of the structure's they
        are."""
        slots = enumerate(zip(self.skeleton.slots, self.sizes.numbers, strict=True))
        return {s.path: place for place, (s, n) in slots if s.node == node.name and isinstance(n, SYMBOLIC)}

    @cached_property
    def _open(self) -> dict[str, list[tuple[Path, Any]]]:
        found: dict[str, list[tuple[Path, Any]]] = {}
        for slot, number in zip(self.skeleton.slots, self.sizes.numbers, strict=True):
            if isinstance(number, SYMBOLIC):
                found.setdefault(slot.node, []).append((slot.path, number))
        return found

    def declare(self, recorded: Mapping[str, Any]) -> dict[str, list[torch.Tensor]]:
        """Give the tracer the results of each call, by its node, from those of the recorded run."""
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


def _evaluate(size: Size | float, sizes: Mapping[str, Any]) -> Number:
    return size if isinstance(size, float) else evaluate_size(size, sizes)


def _float_finder(name: str) -> Finder:
    def find(frame: Frame) -> torch.Tensor:
        return torch.tensor(frame.sizes[name], dtype=torch.float64, device=frame.inputs[0].device)

    return find


def _only_excludes_one(condition: Any, names: Sequence[str]) -> bool:
    """Whether a condition holds whatever the sizes are, if they are greater than 1; one on other numbers does not."""
    if not find_symbols([condition]) <= set(names):
        return False
    return all(holds(condition, dict.fromkeys(names, n)) for n in _OTHERS) and all(
        holds(condition, dict.fromkeys(names, 64) | {name: n}) for name in names for n in _OTHERS
    )
