# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Dtypes and layouts of arguments: gradients against eager's, in the precision of the dtype."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrograd

# Relative, of the norm of each gradient. That of f64 no computation in f32 would reach.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=dtype)


def check(function: Callable[..., Tensor], *args: Tensor, tolerance: float | None = None) -> None:
    """Output and gradients: dtype, shape and value; the arguments stay as they were."""
    leaves = [a for a in args if a.requires_grad]
    if isinstance(function, nn.Module):
        leaves += function.parameters()
    step = retrograd.compile_backward(function, args)
    before = [a.detach().clone() for a in args]
    found, expected = step(*args), function(*args)
    tangent = random(*expected.shape, dtype=expected.dtype)
    results = [found.detach(), *torch.autograd.grad(found, leaves, tangent)]
    references = [expected.detach(), *torch.autograd.grad(expected, leaves, tangent)]
    for result, reference in zip(results, references, strict=True):
        assert (result.dtype, result.shape) == (reference.dtype, reference.shape)
        limit = tolerance or TOLERANCES[reference.dtype]
        error = (result.double() - reference.double()).norm()
        assert error <= limit * reference.double().norm(), f"error {error:.2e}"
    for argument, copy in zip(args, before, strict=True):
        assert torch.equal(argument, copy)


@pytest.mark.long_cases("torch.float32")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_floating_point(dtype: torch.dtype) -> None:
    def block(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        y = F.layer_norm(F.silu(x @ weight), (weight.shape[1],), scale)
        return torch.softmax(y, dim=-1) + y.exp().mean(0) + torch.log1p(y * y).sqrt().sum(1, keepdim=True)

    check(block, *(random(*s, dtype=dtype).requires_grad_() for s in ((5, 6), (6, 7), (7,))))


def test_integers() -> None:
    """All types in one program, a row for each."""
    types = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)

    def mix(x: Tensor, numbers: Tensor) -> Tensor:
        chosen = torch.where(numbers > 0, x, x * 2)
        return chosen * numbers + x[numbers.long() % len(x)].sum(1)

    def mix_all(x: Tensor, *numbers: Tensor) -> Tensor:
        return torch.stack([mix(x * row, typed) for row, typed in enumerate(numbers, 1)])

    numbers = torch.tensor([0, 1, 3, 2, 1])
    check(mix_all, random(5, 5).requires_grad_(), *(numbers.to(dtype) for dtype in types))


@pytest.mark.long
def test_autocast() -> None:
    """The forward and its backward are compiled with the casts that were on when it was traced."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 3))
    x = random(5, 6).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype is torch.bfloat16
        check(model, x, tolerance=2e-2)


def test_layouts() -> None:
    """All in one program: transposed, sliced, channels last, expanded along the first axis and along the last."""
    x = random(4, 4, 4, 4)
    given = (
        x.transpose(0, 3),
        x[:, 1:, ::2, :],
        x.contiguous(memory_format=torch.channels_last),
        x[:1].expand(4, 4, 4, 4),
        x[..., 0].unsqueeze(-1).expand(4, 4, 4, 4),
    )
    leaves = [layout.detach().requires_grad_() for layout in given]
    weights = [random(3, layout.shape[1], 3, 3).requires_grad_() for layout in given]

    def convolve(*tensors: Tensor) -> Tensor:
        pairs = zip(tensors[: len(given)], tensors[len(given) :], strict=True)
        return torch.cat([(F.conv2d(x, weight, padding=1).tanh() * x.mean()).flatten() for x, weight in pairs])

    check(convolve, *leaves, *weights)


def test_channels_last_stays() -> None:
    """Strides of outputs and gradients are eager's."""
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 3, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = random(2, 4, 5, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    check(layer, x)
    step = retrograd.compile_backward(layer, (x,))
    assert step(x).stride() == layer(x).stride()


def test_scalars() -> None:
    def formula(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sin() + y.exp()

    check(formula, torch.tensor(0.3, requires_grad=True), torch.tensor(-1.2, requires_grad=True))


def test_scalar_and_vector() -> None:
    check(lambda x, s: x * s + s, random(5).requires_grad_(), torch.tensor(0.3, requires_grad=True))


def test_empty() -> None:
    def model(x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(x @ weight) + x.sum()

    check(model, torch.randn(0, 4).requires_grad_(), random(4, 5).requires_grad_())


def test_the_gradient_of_an_empty_row_is_compiled() -> None:
    def model(x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(x @ weight) + x.sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error", retrograd.EagerIslandWarning)
        check(model, torch.randn(3, 0).requires_grad_(), random(0, 5).requires_grad_())


def test_sums_of_half_types_are_added_up_in_float32() -> None:
    """In bfloat16 a running sum of positive numbers stands still once it is 256 times as large as they are."""

    def add_up(x: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        table = x.new_zeros(2, 2).index_add(0, rows, x)
        return x.sum(0), x.mean(), x.cumsum(0), table, F.avg_pool1d(x.T[None], len(x)), x[rows]

    x = (random(2048, 2).abs() + 0.5).bfloat16().requires_grad_()
    rows = torch.arange(2048) % 2
    step = retrograd.compile_backward(add_up, (x, rows))

    def run(call: Callable[..., tuple[Tensor, ...]], x: Tensor) -> list[Tensor]:
        outputs = call(x, rows)
        return [*outputs, *torch.autograd.grad([y.sum() for y in outputs], x)]

    exact = run(add_up, x.detach().float().requires_grad_())
    for found, expected in zip(run(step, x), exact, strict=True):
        assert found.dtype is torch.bfloat16
        assert (found.float() - expected).norm() <= 5e-3 * expected.norm()


@pytest.mark.short_cases("default")
@pytest.mark.parametrize("partition", ["default", "min-cut"])
def test_a_maximum_of_bfloat16_is_found_again_in_the_backward(partition: Literal["default", "min-cut"]) -> None:
    """Its gradient asks which elements equal it: with other roundings in another kernel none does, which gives NaN."""

    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        fourth = (x * x) * (x * x)
        stacked = torch.stack([F.log_softmax(y, 1), torch.erf(y), y * 0.3], -2)
        return fourth.to(torch.float32).max(), stacked.amin(-2).amax(0)

    def inputs() -> tuple[Tensor, Tensor]:
        shapes = ((5, 4), (4, 3, 3))
        x, y = (torch.randn(shape).to(torch.bfloat16).requires_grad_() for shape in shapes)
        return x, y

    step = retrograd.compile_backward(model, inputs(), partition=partition, fallback="error")
    for seed in range(10):
        torch.manual_seed(seed)
        found: list[Tensor] = []
        wanted: list[Tensor] = []
        given = inputs()
        for call, grads in ((step, found), (model, wanted)):
            most, least = call(*given)
            grads += torch.autograd.grad([most, least], given, [torch.ones(()), torch.ones_like(least)])
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_the_place_of_the_greatest_of_what_bfloat16_rounds_to_the_same() -> None:
    """Eager takes the first; in more digits another one is the greatest."""

    def model(x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
        spread = torch.zeros_like(y).index_add(0, ids, torch.index_select(y, 0, ids).tanh())
        angles = torch.atan2(x.mean(), spread.abs() + 1).flatten()
        return angles * torch.argmax(angles, -1, keepdim=True)

    for seed in range(4):
        torch.manual_seed(seed)
        x, y = (torch.randn(4, 1, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        arguments = (x, y, torch.tensor([0, 1, 1]))
        step = retrograd.compile_backward(model, arguments)
        found, expected = (torch.autograd.grad(call(*arguments).sum(), (x, y)) for call in (step, model))
        torch.testing.assert_close(found, expected)


def test_unsigned_bytes_are_unsigned() -> None:
    """torch-mlir took those from 128 on for negative numbers, which a first call of small ones did not show."""

    def model(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        kept = torch.where(x > 0, x, b) + b.sum(1, keepdim=True)
        return (x * b + x * (b / 255) + x * (b // 3) + kept).square().mean() + (x * b.max()).mean()

    x = torch.randn(4, 5, requires_grad=True)
    step = retrograd.compile_backward(model, (x, torch.zeros(4, 5, dtype=torch.uint8)), fallback="error")
    for highest in (128, 256):
        b = torch.randint(highest, (4, 5), dtype=torch.uint8)
        found, expected = step(x, b), model(x, b)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, x), torch.autograd.grad(expected, x))


def test_numbers_beside_constants_are_read_as_what_they_are() -> None:
    """torch-mlir folded ``-1 * ones`` to 2^64 - 1 and ``full(3.0) <= 0`` to true, and the gamma function of a constant
    was infinite."""

    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ones, halves = torch.ones_like(x), torch.full((3,), -2.5)
        return (
            -1 * ones * x + torch.add(ones, ones, alpha=-2),
            x * (torch.tensor(3.0) <= 0) + (torch.ones(3, dtype=torch.long) <= 0.5),
            x * (halves % 2) + ((ones > 0) + (ones > 0)),
            x + torch.lgamma(torch.tensor(3.0)),
        )

    x = torch.randn(2, 3, requires_grad=True)
    step = retrograd.compile_backward(model, (x,), verify=False, fallback="error")
    found, expected = step(x), model(x)
    torch.testing.assert_close(found, expected)
    total = [torch.autograd.grad(torch.cat(values).sum(), x) for values in (found, expected)]
    torch.testing.assert_close(*total)
