# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Chebyshev series, for functions that have no closed form.

They are fitted, when the module that has the function is imported, to PyTorch's own f64 function on each piece of its
domain: there are no tables of digits here that could hold a mistake.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Series = tuple[float, ...]


def fit(function: Callable[[Tensor], Tensor], terms: int) -> Series:
    """Coefficients of the Chebyshev series of ``function`` on [-1, 1], by interpolation at its nodes in f64."""
    angles = (torch.arange(terms, dtype=torch.float64) + 0.5) * (math.pi / terms)
    values = function(torch.cos(angles))
    waves = torch.cos(torch.arange(terms, dtype=torch.float64).unsqueeze(-1) * angles)
    coefficients = (waves @ values) * (2 / terms)
    coefficients[0] /= 2
    return tuple(coefficients.tolist())


def evaluate(series: Series, x: Tensor) -> Tensor:
    """The series at ``x`` in [-1, 1], by Clenshaw's recurrence; terms below the type's precision are left out."""
    least = torch.finfo(x.dtype).eps / 64 * max(abs(c) for c in series)
    kept = list(series)
    while len(kept) > 2 and abs(kept[-1]) < least:
        kept.pop()
    last, beyond = torch.full_like(x, kept[-1]), torch.zeros_like(x)
    for coefficient in reversed(kept[1:-1]):
        last, beyond = 2 * x * last - beyond + coefficient, last
    return x * last - beyond + kept[0]


def in_full(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Half types are computed in f32, integers as in eager in f32 too."""

    @wraps(function)
    def checked(x: Tensor, *args: Any) -> Any:
        if x.dtype in (torch.float32, torch.float64):
            return function(x, *args)
        half = x.dtype in (torch.bfloat16, torch.float16)
        return function(x.float(), *args).to(x.dtype if half else torch.float32)

    return checked
