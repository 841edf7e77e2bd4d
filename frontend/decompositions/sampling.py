# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Random ops as arithmetic on ``retrograd::uniform``, whose numbers are a function of a seed.

Distributions are those of eager, bits are not. An explicit ``generator`` is turned away: the seed comes from torch's
default one. Each call here draws a seed of its own; ``share_seed`` makes one of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch._ops import OpOverload

from retrograd.frontend.decompositions.entry import Decomposition
from retrograd.frontend.layers.random_ops import DRAW_SEED, UNIFORM

aten = torch.ops.aten

# Digits of the significand: a number in [0, 1) with more of them could be rounded up to 1.
_DIGITS = {torch.float16: 11, torch.bfloat16: 8}


def draw(sizes: Sequence[int], device: torch.device | None) -> Tensor:
    """Numbers in [0, 1), float32: multiples of 2**-24; on torch's default device where none is given."""
    numbers: Tensor = UNIFORM(DRAW_SEED(), 0, list(sizes))
    # The seed is one of the CPU's, so that it is drawn alike for every device. Compiled, this moves nothing.
    return numbers.to(device or torch.get_default_device())


def draw_long(sizes: Sequence[int], device: torch.device | None) -> Tensor:
    """Numbers in [0, 1), float64: multiples of 2**-48."""
    return draw(sizes, device).double() + draw(sizes, device).double() * 2.0**-24


def draw_as(sizes: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Numbers in [0, 1) of a floating-point type."""
    if dtype is torch.float64:
        return draw_long(sizes, device)
    numbers = draw(sizes, device)
    if dtype in _DIGITS:
        numbers = torch.floor(numbers * 2.0 ** _DIGITS[dtype]) * 2.0 ** -_DIGITS[dtype]
    return numbers.to(dtype)


def draw_normal(sizes: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Numbers of the standard normal distribution (Box and Muller's method)."""
    # 1 - u is in (0, 1], so that the logarithm is finite. In f32 for every type: IREE has no cosine in f64.
    radius = torch.sqrt(-2.0 * torch.log(1.0 - draw(sizes, device)))
    return (radius * torch.cos(2.0 * math.pi * draw(sizes, device))).to(dtype)


def _is_taken(dtype: torch.dtype | None) -> bool:
    return (dtype or torch.get_default_dtype()).is_floating_point


def _default_generator(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def checked(*args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Any:
        return NotImplemented if generator is not None else function(*args, **kwargs)

    return checked


def native_dropout(x: Tensor, p: float, train: bool | None) -> Any:
    """``x`` over ``1 - p`` where it stays, else 0, and where it stays (bool)."""
    if train is False or p == 0:
        return x, torch.ones_like(x, dtype=torch.bool)
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    mask = draw(x.shape, x.device) >= _on_grid(p)
    return mask * x * (1.0 / (1.0 - p)), mask


def _on_grid(p: float) -> float:
    """``p`` as a multiple of 2**-24, exact in f32, so that the comparison is one of f32."""
    return round(p * 2**24) / 2**24


@_default_generator
def bernoulli_p(x: Tensor, p: float = 0.5) -> Any:
    """1 with probability ``p``, else 0, like ``x``."""
    if not 0 <= p <= 1:
        raise ValueError(f"bernoulli expects p to be in [0, 1], but got p={p}")
    return (draw(x.shape, x.device) < _on_grid(p)).to(x.dtype)


@_default_generator
def bernoulli_tensor(x: Tensor, p: Tensor) -> Any:
    """1 with the probabilities ``p``, else 0, like ``x``."""
    numbers = draw_long(x.shape, x.device) if p.dtype is torch.float64 else draw(x.shape, x.device)
    return (numbers < p).to(x.dtype)


@_default_generator
def bernoulli(p: Tensor) -> Any:
    """1 with the probabilities ``p``, else 0, of their type."""
    return bernoulli_tensor(p, p)


@_default_generator
def rand(
    sizes: Sequence[int], *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_options: Any
) -> Any:
    """``aten.rand``: uniform in [0, 1)."""
    return draw_as(sizes, dtype or torch.get_default_dtype(), device) if _is_taken(dtype) else NotImplemented


@_default_generator
def randn(
    sizes: Sequence[int], *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_options: Any
) -> Any:
    """``aten.randn``: standard normal."""
    return draw_normal(sizes, dtype or torch.get_default_dtype(), device) if _is_taken(dtype) else NotImplemented


@_default_generator
def rand_like(x: Tensor, *, dtype: torch.dtype | None = None, **_options: Any) -> Any:
    """``aten.rand_like``: uniform in [0, 1)."""
    return draw_as(x.shape, dtype or x.dtype, x.device) if _is_taken(dtype or x.dtype) else NotImplemented


@_default_generator
def randn_like(x: Tensor, *, dtype: torch.dtype | None = None, **_options: Any) -> Any:
    """``aten.randn_like``: standard normal."""
    return draw_normal(x.shape, dtype or x.dtype, x.device) if _is_taken(dtype or x.dtype) else NotImplemented


def uniform(x: Tensor, low: float = 0.0, high: float = 1.0, generator: torch.Generator | None = None) -> Any:
    """``x.uniform_(low, high)`` as a function."""
    if generator is not None or not _is_taken(x.dtype):
        return NotImplemented
    return draw_as(x.shape, x.dtype, x.device) * (high - low) + low


def normal(x: Tensor, mean: float = 0.0, std: float = 1.0, generator: torch.Generator | None = None) -> Any:
    """``x.normal_(mean, std)`` as a function."""
    if generator is not None or not _is_taken(x.dtype):
        return NotImplemented
    return draw_normal(x.shape, x.dtype, x.device) * std + mean


@_default_generator
def normal_of(mean: Any, std: Any) -> Any:
    """``torch.normal`` with a tensor for the mean, the standard deviation, or both."""
    like = mean if isinstance(mean, Tensor) else std
    sizes = torch.broadcast_shapes(*[t.shape for t in (mean, std) if isinstance(t, Tensor)])
    return draw_normal(sizes, like.dtype, like.device) * std + mean


@_default_generator
def normal_sized(
    mean: float,
    std: float,
    sizes: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_options: Any,
) -> Any:
    """``torch.normal`` of a size."""
    if not _is_taken(dtype):
        return NotImplemented
    return draw_normal(sizes, dtype or torch.get_default_dtype(), device) * std + mean


def exponential(x: Tensor, rate: float = 1.0, generator: torch.Generator | None = None) -> Any:
    """``x.exponential_(rate)`` as a function; never 0, as in eager, since what follows may take its logarithm."""
    if generator is not None or not _is_taken(x.dtype):
        return NotImplemented
    numbers = torch.clamp_min(-torch.log(1.0 - draw(x.shape, x.device)), 2.0**-24)
    return (numbers * (1.0 / rate)).to(x.dtype)


def rrelu_with_noise(
    x: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Any:
    """Leaky ReLU with a random slope for each element, and the slopes (1 where ``x`` is positive); when not training,
    with the mean slope, and ``noise`` as it was."""
    if generator is not None:
        return NotImplemented
    if not training:
        return torch.where(x <= 0, x * ((lower + upper) / 2), x), noise.clone()
    slopes = torch.where(x <= 0, draw_as(x.shape, x.dtype, x.device) * (upper - lower) + lower, 1.0)
    return x * slopes, slopes.to(noise.dtype)


@_default_generator
def randint(high: int, sizes: Sequence[int], **options: Any) -> Any:
    """``aten.randint``: whole numbers in [0, high)."""
    return randint_low(0, high, sizes, **options)


@_default_generator
def randint_low(
    low: int,
    high: int,
    sizes: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_options: Any,
) -> Any:
    """``aten.randint.low``: whole numbers in [low, high)."""
    return integers(low, high, sizes, dtype or torch.int64, device)


@_default_generator
def randint_like(x: Tensor, high: int, *, dtype: torch.dtype | None = None, **_options: Any) -> Any:
    """``aten.randint_like``: whole numbers in [0, high)."""
    return integers(0, high, x.shape, dtype or x.dtype, x.device)


@_default_generator
def randint_like_low(x: Tensor, low: int, high: int, *, dtype: torch.dtype | None = None, **_options: Any) -> Any:
    """``aten.randint_like.low_dtype``: whole numbers in [low, high)."""
    return integers(low, high, x.shape, dtype or x.dtype, x.device)


@_default_generator
def random_from(x: Tensor, low: int, high: int | None) -> Any:
    """``x.random_(low, high)`` as a function."""
    return NotImplemented if high is None else integers(low, high, x.shape, x.dtype, x.device)


@_default_generator
def random_to(x: Tensor, high: int) -> Any:
    """``x.random_(high)`` as a function."""
    return integers(0, high, x.shape, x.dtype, x.device)


def integers(low: int, high: int, sizes: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> Any:
    """Whole numbers in [low, high); ranges of more than 2**32 are turned away, where 48 bits would show."""
    if high <= low:
        raise ValueError(f"randint expects from < to, but got from={low} >= to={high}")
    if high - low > 2**32:
        return NotImplemented
    return (torch.floor(draw_long(sizes, device) * float(high - low)).to(torch.int64) + low).to(dtype)


_REASON = "a second run would draw other numbers; these are a function of a seed"
_FUNCTIONS: dict[OpOverload, Callable[..., Any]] = {
    aten.native_dropout.default: native_dropout,
    aten.bernoulli.default: bernoulli,
    aten.bernoulli.p: bernoulli_p,
    aten.bernoulli.Tensor: bernoulli_tensor,
    aten.rand.default: rand,
    aten.rand.generator: rand,
    aten.rand_like.default: rand_like,
    aten.randn.default: randn,
    aten.randn.generator: randn,
    aten.randn_like.default: randn_like,
    aten.uniform.default: uniform,
    aten.normal_functional.default: normal,
    aten.normal.Tensor_Tensor: normal_of,
    aten.normal.Tensor_float: normal_of,
    aten.normal.float_Tensor: normal_of,
    aten.normal.float_float: normal_sized,
    aten.exponential.default: exponential,
    aten.randint.default: randint,
    aten.randint.low: randint_low,
    aten.randint_like.default: randint_like,
    aten.randint_like.low_dtype: randint_like_low,
    aten.rrelu_with_noise_functional.default: rrelu_with_noise,
    getattr(aten.random, "from"): random_from,
    aten.random.to: random_to,
}

ENTRIES = (
    *(Decomposition(op, function, _REASON) for op, function in _FUNCTIONS.items()),
    *(
        Decomposition(op, get_decompositions([op])[op], "torch-mlir's table leaves it out")
        for op in (aten.rrelu_with_noise_backward.default, aten.native_dropout_backward.default)
    ),
)
