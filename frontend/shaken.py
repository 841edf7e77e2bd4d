# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Eager with every op rounded another way: what a program's result owes to rounding alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# Of each dtype, its own unit in the last place.
UNITS: Mapping[torch.dtype, float] = {}


def move(
    values: Tensor, generator: torch.Generator, places: Tensor | None = None, most: Mapping[torch.dtype, float] = UNITS
) -> Tensor:
    """The numbers, each off by up to half a unit in its last place, at random; ``places`` says which of the random
    numbers is whose, where some are to share theirs. ``most`` has other relative distances than such units, by dtype.
    """
    count = values.numel() if places is None else int(places.max()) + 1 if places.numel() else 0
    noise = torch.rand(count, generator=generator, dtype=torch.float64) - 0.5
    noise = noise.view(values.shape) if places is None else noise[places]
    unit = most.get(values.dtype, torch.finfo(values.dtype).eps)
    return (values.double() * (1 + unit * noise.to(values.device))).to(values.dtype)


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
        taken = [leaf.detach().double().flatten() for leaf in leaves if is_float(leaf)]
        # What is written in place, or is a view, has to stay the memory that it is.
        if not taken or any(r.alias_info is not None for r in func._schema.returns):
            return result
        scalars = torch.tensor([n for n in leaves if isinstance(n, int | float)], dtype=torch.float64)
        exact = torch.cat([*taken, scalars.to(taken[0].device)])
        elementwise = torch.Tag.pointwise in func.tags
        return tree_map(lambda r: self._round(r, exact, elementwise) if is_float(r) else r, result)

    def _round(self, result: Tensor, exact: Tensor, elementwise: bool) -> Tensor:
        values = result.double()
        places = torch.unique(values.cpu(), return_inverse=True)[1] if elementwise else None
        kept = torch.isin(values, exact) | (values == values.round())
        return torch.where(kept, result, move(result, self._generator, places, self._most))


def is_float(value: object) -> bool:
    """Whether this is a tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()
