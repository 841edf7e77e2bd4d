# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Eager with every op rounded another way: what a program's result owes to rounding alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# Of each dtype, its own unit in the last place.
UNITS: Mapping[torch.dtype, float] = {}


# Tensors of more elements are not compared element by element with all that an op takes.
_LARGE = 1 << 20
_SAMPLES = 16
# Numbers after which their turns begin anew: a prime, so that no axis has as many.
_TURNS = 65_521
_ALL_BITS = (1 << 64) - 1


def move(
    values: Tensor, generator: torch.Generator, by_value: bool = False, most: Mapping[torch.dtype, float] = UNITS
) -> Tensor:
    """The numbers, each off by up to half a unit in its last place, at random; with ``by_value`` equal numbers by the
    same. ``most`` has other relative distances than such units, by dtype.
    """
    wide = values.double()
    unit = most.get(values.dtype, torch.finfo(values.dtype).eps)
    return (wide * (1 + unit * _noise(wide, generator, by_value))).to(values.dtype)


def _noise(wide: Tensor, generator: torch.Generator, by_value: bool) -> Tensor:
    """Numbers from -0.5 to 0.5 for each of ``wide``; with ``by_value`` the same for equal ones."""
    if not by_value and wide.device.type == "cpu":
        # A tenth of the time that spreading whole numbers takes.
        return torch.rand(wide.shape, generator=generator, dtype=torch.float32, device="cpu").double() - 0.5
    keys = wide.view(torch.int64) if by_value else torch.arange(wide.numel(), device=wide.device).view(wide.shape)
    return spread(keys, int(torch.randint(1 << 62, (), generator=generator, device="cpu"))) - 0.5


def spread(keys: Tensor, seed: int) -> Tensor:
    """Numbers from 0 to 1 that whole numbers are spread to, others for another seed.

    Source: G. L. Steele, D. Lea, C. H. Flood, Fast splittable pseudorandom number generators, OOPSLA 2014 (the mixing
    of SplitMix64).
    """
    mixed = keys + seed
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    return _shifted(mixed ^ _shifted(mixed, 31), 11).double() / (1 << 53)


def _shifted(numbers: Tensor, places: int) -> Tensor:
    """Bits moved to the right, with zeros behind them."""
    return (numbers >> places) & (_ALL_BITS >> places)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def move_all(values: Sequence[Any]) -> list[Any]:
    """The values, of which the numbers in floating point are off by a unit in their last place, up or down, or as they
    are, at random; whole ones are exact. Costs less than a copy in float64 of them would."""
    generator = torch.Generator().manual_seed(0)
    turns = torch.randint(-1, 2, (_TURNS,), generator=generator, device="cpu")
    return [_move_in_turns(v, turns) if is_float(v) else v for v in values]


def _move_in_turns(values: Tensor, turns: Tensor) -> Tensor:
    factors = (1 + torch.finfo(values.dtype).eps * turns).to(values.device, values.dtype)
    moved = values.detach().clone()
    # A copy has no gaps, whichever axis is the innermost.
    flat = moved.as_strided((moved.numel(),), (1,))
    whole = flat.numel() // _TURNS * _TURNS
    for part, by in ((flat[:whole].view(-1, _TURNS), factors), (flat[whole:], factors[: flat.numel() - whole])):
        part.copy_(part.where(part == part.round(), part * by))
    return moved


class Rounded(TorchDispatchMode):
    """Makes what each op computes in floating point off by as much as rounding to its dtype may be, at random, forward
    and backward; or by up to half of the relative distances ``most``, by dtype.

    Exact are the numbers that an op takes over from its arguments (so that copies, choices and extremes of equal
    arguments stay what they are) and whole numbers. Elementwise ops round equal numbers in the same way, wherever these
    stand; others, sums first of all, do not: the order of their terms may depend on the place.

    Source: D. S. Parker, Monte Carlo Arithmetic, UCLA CSD-970002, 1997.
    """

    def __init__(self, seed: int, most: Mapping[torch.dtype, float] = UNITS) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._most = most
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        taken = [leaf.detach() for leaf in leaves if is_float(leaf)]
        # What is written in place, or is a view, has to stay the memory that it is.
        if not taken or any(r.alias_info is not None for r in func._schema.returns):
            return result
        taken.append(torch.tensor([n for n in leaves if isinstance(n, int | float)], dtype=torch.float64, device="cpu"))
        elementwise = torch.Tag.pointwise in func.tags
        return tree_map(lambda r: self._round(r, taken, elementwise) if is_float(r) else r, result)

    def _round(self, result: Tensor, taken: Sequence[Tensor], elementwise: bool) -> Tensor:
        values = result.double()
        # Some may be scalars on the CPU, or copied to another device here.
        taken = [tensor.to(values.device) for tensor in taken]
        kept = (values == values.round()) | _find_taken_over(values, taken, elementwise)
        return torch.where(kept, result, move(result, self._generator, elementwise, self._most))


def _find_taken_over(values: Tensor, taken: Sequence[Tensor], elementwise: bool) -> Tensor:
    """Which numbers are among those that an op took."""
    if values.numel() <= _LARGE and sum(t.numel() for t in taken) <= _LARGE:
        return torch.isin(values, torch.cat([t.double().flatten() for t in taken]))
    *tensors, scalars = taken
    if elementwise:
        found = torch.zeros_like(values, dtype=torch.bool)
        # One comparison after the other: torch.isin takes each number of the first by itself.
        for given in (*scalars, *(tensor.double() for tensor in tensors)):
            found |= values == given
        return found
    flat = values.flatten()
    sample = flat[torch.arange(_SAMPLES, device=flat.device) * (flat.numel() - 1) // (_SAMPLES - 1)]
    # Whole numbers are kept in any case, and say nothing.
    telling = sample[sample != sample.round()]
    is_over = [any(bool((t.double() == number).any()) for t in tensors) for number in telling]
    return torch.full_like(values, bool(is_over) and 2 * sum(is_over) > len(is_over), dtype=torch.bool)


def is_float(value: object) -> TypeGuard[Tensor]:
    """Whether this is a tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()
