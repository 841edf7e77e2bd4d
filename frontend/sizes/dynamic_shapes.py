# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``dynamic_shapes=``: which sizes of the arguments a trace leaves open, and what it takes for granted about them.

Sizes become symbols of torch's ``ShapeEnv``, which is told nothing about them but their bounds: torch would take a
size for other than 1 without a word, where it traces for several (``backed_size_oblivious`` is its mode for those who
do not want that). Each decision that the trace takes on a size is then a condition of the program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import _config as shape_config
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext, StrictMinMaxConstraint
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from retrograd.contract.sizes import DynamicSize
from retrograd.frontend.python.source_locations import CaptureError
from retrograd.frontend.sizes.dim_specs import LIMIT, DimSpec, read_dynamic_shapes
from retrograd.frontend.sizes.size_expressions import to_expression


@dataclass(frozen=True)
class OpenSizes:
    """The sizes that a trace left open: ``names`` by symbol, what they are, and ``conditions``, as plain data."""

    names: Mapping[sympy.Symbol, str] = field(default_factory=dict)
    sizes: tuple[DynamicSize, ...] = ()
    conditions: tuple[Any, ...] = ()


class DynamicShapes:
    """The axes that are open, by the number of the tensor argument, and its name to the user."""

    def __init__(self, axes: Sequence[Mapping[int, DimSpec]], names: Sequence[str]) -> None:
        self.axes = axes
        self.names = names
        self.mode: FakeTensorMode | None = None
        self._fakes: list[torch.Tensor] = []

    @classmethod
    def read(
        cls,
        model: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        dynamic_shapes: Any,
        names: Sequence[str],
    ) -> DynamicShapes | None:
        """Read which sizes ``dynamic_shapes`` leaves open; None if it leaves none.

        Raises:
            CaptureError: the notation is wrong, or asks for what there is not.
        """
        axes = read_dynamic_shapes(model, args, kwargs, dynamic_shapes)
        return cls(axes, names) if any(axes) else None

    def make_tensors(self, mode: FakeTensorMode, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Stand-ins for the tensor arguments, with symbols for the open sizes: one for each name."""
        self.mode = mode
        enlarged = _enlarge([tuple(t.shape) for t in tensors], self.axes)
        for tensor, shape, axes, name in zip(tensors, enlarged, self.axes, self.names, strict=True):
            self._fakes.append(_fake(mode, tensor, shape, axes, name))
        self._relate()
        return tuple(self._fakes)

    def _relate(self) -> None:
        """Have the trace know that sizes of one root are the same, or multiples of one another.

        Raises:
            CaptureError: the examples' sizes are not related as they were said to be.
        """
        first: dict[str, tuple[DimSpec, torch.SymInt, str]] = {}
        for spec, size, place in sorted(self._rooted(), key=lambda found: (found[0].factor, abs(found[0].offset))):
            assert spec.root is not None
            known, other, where = first.setdefault(spec.root, (spec, size, place))
            if known is spec:
                # A root that no argument has: its multiples tell it.
                related = not spec.derived or bool((size - spec.offset) % spec.factor == 0)
                message = f"{place} is {size.node.hint}, which is not '{spec.name}' for any '{spec.root}'"
            else:
                # Equal, or proportional, without division.
                related = bool(known.factor * (size - spec.offset) == spec.factor * (other - known.offset))
                message = (
                    f"{place} is {size.node.hint} ('{spec.name}'), and '{known.name}' is {other.node.hint} in {where}"
                )
            if not related:
                raise CaptureError(message, "give sizes that differ names of their own")

    def _rooted(self) -> Iterator[tuple[DimSpec, torch.SymInt, str]]:
        """Each open size that has a root, with what was asked of it, and its place."""
        for fake, axes, name in zip(self._fakes, self.axes, self.names, strict=True):
            for axis, spec in axes.items():
                size: Any = fake.shape[axis]
                if spec.root is not None and isinstance(size, torch.SymInt):
                    yield spec, size, f"{name}.shape[{axis}]"

    def find_sizes(self) -> OpenSizes:
        """Find which sizes the trace, now done, left open, and which conditions it took for granted.

        Raises:
            CaptureError: a size that was asked for was fixed, or two of different names turned out to be one.
        """
        if self.mode is None or self.mode.shape_env is None:
            raise AssertionError("no tensors were made for a trace")
        env = self.mode.shape_env
        places: dict[sympy.Symbol, list[tuple[int, int]]] = {}
        derived: list[tuple[sympy.Expr, DimSpec]] = []
        for number, axes in enumerate(self.axes):
            for axis, spec in axes.items():
                expr = self._expression(number, axis)
                if isinstance(expr, sympy.Integer):
                    self._check_fixed(number, axis, int(expr))
                elif isinstance(expr, sympy.Symbol):
                    places.setdefault(expr, []).append((number, axis))
                else:
                    derived.append((expr, spec))
        names = self._name(places)
        sizes = tuple(self._describe(names[symbol], where, env, symbol) for symbol, where in places.items())
        conditions = [to_expression(expr, names) for expr in find_conditions(env)]
        for expr, spec in derived:
            value = to_expression(expr, names)
            conditions.append(("<=", spec.least, value))
            conditions += [("<=", value, spec.most)] if spec.most is not None else []
        return OpenSizes(names, sizes, tuple(dict.fromkeys(conditions)))

    def _expression(self, number: int, axis: int) -> sympy.Expr:
        size: Any = self._fakes[number].shape[axis]
        return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)

    def _check_fixed(self, number: int, axis: int, size: int) -> None:
        if not self.axes[number][axis].may_be_fixed:
            raise CaptureError(
                f"{self.names[number]}.shape[{axis}] was asked to be dynamic, but the model can only be traced for one "
                f"size of it, {size}: it loops over that axis, or compares it with a fixed size",
                "leave the axis out of dynamic_shapes, or give Dim.AUTO, which lets it be fixed",
            )

    def _name(self, places: Mapping[sympy.Symbol, Sequence[tuple[int, int]]]) -> dict[sympy.Symbol, str]:
        names: dict[sympy.Symbol, str] = {}
        for symbol, where in places.items():
            asked = {name: (i, a) for i, a in where if (name := self.axes[i][a].root) is not None}
            if len(asked) > 1:
                what = " and ".join(f"{self.names[i]}.shape[{a}] ('{name}')" for name, (i, a) in asked.items())
                raise CaptureError(f"the model takes {what} to be equal", "give them one Dim, under one name")
            # What is derived from a root that no argument has stands for itself.
            plain = [name for name, (i, a) in asked.items() if not self.axes[i][a].derived]
            names[symbol] = next(iter(plain), "")
        free = (name for n in range(LIMIT) if (name := f"s{n}") not in names.values())
        return {symbol: name or next(free) for symbol, name in names.items()}

    def _describe(
        self, name: str, where: Sequence[tuple[int, int]], env: ShapeEnv, symbol: sympy.Symbol
    ) -> DynamicSize:
        specs = [self.axes[i][a] for i, a in where]
        most = min((s.most for s in specs if s.most is not None), default=None)
        argument, axis = where[0]
        hint = int(env.backed_var_to_val[symbol])
        return DynamicSize(name, hint, max(s.least for s in specs), most, argument, axis)


@contextlib.contextmanager
def size_oblivious() -> Iterator[None]:
    """While this is open, torch decides nothing about open sizes without a condition."""
    with shape_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        yield


def _fake(
    mode: FakeTensorMode, tensor: torch.Tensor, shape: tuple[int, ...], axes: Mapping[int, DimSpec], name: str
) -> FakeTensor:
    """A stand-in for ``tensor`` whose open sizes are symbols, in this trace of the numbers that ``shape`` has."""
    if not axes:
        return mode.from_tensor(tensor, static_shapes=True)
    for axis, spec in axes.items():
        size = tensor.shape[axis]
        if size < spec.least or (spec.most is not None and size > spec.most):
            bounds = f"{spec.least} or more" if spec.most is None else f"{spec.least} to {spec.most}"
            raise CaptureError(f"{name}.shape[{axis}] is {size}, but dynamic_shapes says {bounds}", "widen the bounds")
    ranges = {a: ValueRanges(s.least, int_oo if s.most is None else s.most) for a, s in axes.items()}
    dims = range(tensor.dim())
    context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC if d in axes else DimDynamic.STATIC for d in dims],
        constraint_sizes=[StrictMinMaxConstraint(vr=ranges[d], warn_only=False) if d in axes else None for d in dims],
    )
    example = tensor
    if shape != tuple(tensor.shape):
        example = torch.empty(shape, dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad)
    return mode.from_tensor(example, symbolic_context=context, source=ConstantSource(name))


def _enlarge(shapes: Sequence[tuple[int, ...]], axes: Sequence[Mapping[int, DimSpec]]) -> list[tuple[int, ...]]:
    """The shapes with open sizes of 2 at the least, since a trace at 1 would be one of broadcasts, and with all that
    have a root in common grown together."""
    small = {spec.root for shape, specs in zip(shapes, axes, strict=True) for a, spec in specs.items() if shape[a] <= 1}

    def grown(size: int, spec: DimSpec) -> int:
        if spec.root in small and spec.root is not None:
            return spec.factor * max((size - spec.offset) // spec.factor, 2) + spec.offset
        return max(size, 2)

    return [
        tuple(grown(size, specs[axis]) if axis in specs else size for axis, size in enumerate(shape))
        for shape, specs in zip(shapes, axes, strict=True)
    ]


def find_conditions(env: ShapeEnv) -> list[sympy.Basic]:
    """List the conditions that the trace took for granted, in terms of the symbols that are left."""
    found = (env.replace(guard.expr) for guard in env.guards)
    return [expr for expr in dict.fromkeys(found) if expr is not sympy.true]
