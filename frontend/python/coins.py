# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Numbers that a model draws from Python's generators and compares with bounds that none of them, or all, are beyond.

``random.random() < self.layerdrop`` is such with a ``layerdrop`` of 0: whatever is drawn, the layer runs. Each call of
the compiled program draws the number too, as eager would, and goes by what is the same for all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from retrograd.frontend.python.source_locations import CaptureError

# Each with the bounds of what it draws by default, and whether the upper one may be drawn.
_UNIT = (0.0, 1.0, False)
_UNIFORM = (0.0, 1.0, True)
_COINS: dict[Callable[..., Any], tuple[float, float, bool]] = {
    random.random: _UNIT,
    random.uniform: _UNIFORM,
    np.random.random: _UNIT,
    np.random.random_sample: _UNIT,
    np.random.rand: _UNIT,
    np.random.uniform: _UNIFORM,
}
# What the functions that take bounds call them. Looked up here: modules name stand-ins while a model runs.
_NAMES = {random.uniform: ("a", "b"), np.random.uniform: ("low", "high")}
COINS = frozenset(_COINS)
"""The functions that draw one number between two."""


class Coin:
    """Stands for a number that was drawn from ``least`` to ``most``: it can be compared with what is not between."""

    __slots__ = ("_can_be_most", "_least", "_most")
    __array_ufunc__ = None

    def __init__(self, least: float, most: float, can_be_most: bool) -> None:
        self._least, self._most, self._can_be_most = least, most, can_be_most

    def __lt__(self, bound: Any) -> bool:
        return self._is_below(bound, or_at=False)

    def __le__(self, bound: Any) -> bool:
        return self._is_below(bound, or_at=True)

    def __gt__(self, bound: Any) -> bool:
        return not self._is_below(bound, or_at=True)

    def __ge__(self, bound: Any) -> bool:
        return not self._is_below(bound, or_at=False)

    def _is_below(self, bound: Any, *, or_at: bool) -> bool:
        # Nothing is below NaN, and nothing at or above it.
        if not isinstance(bound, int | float | np.floating) or bound != bound:
            raise self._undecided()
        if bound > self._most or (bound == self._most and (or_at or not self._can_be_most)):
            return True
        if bound < self._least or (bound == self._least and not or_at):
            return False
        raise self._undecided()

    @staticmethod
    def _undecided() -> CaptureError:
        return CaptureError(
            "the model goes by a number that was drawn from Python's random numbers",
            "decide it outside of the model and pass it as an argument",
        )

    def _refuse(self, *_: Any) -> Any:
        raise self._undecided()

    __eq__ = __ne__ = __hash__ = __bool__ = __float__ = __int__ = __index__ = __round__ = __array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __pow__ = __rpow__ = __mod__ = __floordiv__ = __neg__ = __abs__ = __reduce_ex__ = __str__ = __format__ = _refuse


def returned_coin() -> CaptureError:
    """Make the error for a model that returns such a number, which would be the same at each call."""
    return CaptureError(
        "the model returns a number that was drawn from Python's random numbers",
        "draw it outside of the model and pass it as an argument",
    )


def coin_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Coin | None:
    """Give what stands for the number that such a call draws; ``None`` where its bounds are not known."""
    least, most, can_be_most = _COINS[function]
    if args or kwargs:
        names = _NAMES.get(function, ())
        bounds = {**dict(zip(names, (least, most), strict=False)), **dict(zip(names, args, strict=False)), **kwargs}
        if len(args) > len(names) or set(bounds) != set(names) or not all(map(_is_number, bounds.values())):
            return None
        least, most = sorted(bounds.values())
    return Coin(least, most, can_be_most)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
