# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Functions where an approximation has few digits left, compiled, beside PyTorch's in f64."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from iree_tools import RUN_MODULE
from torch import Tensor, nn

import retrograd
from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.pipelines.devices.targets import CPU
from retrograd.pipelines.infra.runner import run_pipeline
from retrograd.pipelines.toolchain.executable import compile_executable

ERF_SIZE = 200_000


class Tangents(nn.Module):
    def forward(self, x: Tensor, wide: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tan(x), torch.tan(wide), torch.tanh(x)


def near_poles() -> Tensor:
    """Numbers about the multiples of pi / 2, from 1e-4 to 0.7 away, in f64 but exact in f32."""
    multiples = torch.arange(-40, 41, dtype=torch.float64).unsqueeze(-1) * (math.pi / 2)
    offsets = torch.tensor([-0.7, -1e-2, -1e-4, 1e-4, 3e-3, 0.5], dtype=torch.float64)
    return (multiples + offsets).flatten().float().double()


@pytest.mark.long
def test_tangents_near_poles_and_hyperbolic_ones_near_one() -> None:
    exact = near_poles().requires_grad_()
    arguments = exact.detach().float().requires_grad_(), exact.detach().clone().requires_grad_()
    *found, hyperbolic = retrograd.compile_backward(Tangents(), arguments)(*arguments)
    expected = torch.tan(exact)
    (slope,) = torch.autograd.grad(expected.sum(), exact)
    gradients = torch.autograd.grad([t.sum() for t in found], arguments, retain_graph=True)
    for ours, gradient, tolerance in zip(found, gradients, (1e-6, 1e-14), strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=0.0)
        torch.testing.assert_close(gradient.double(), slope, rtol=2 * tolerance, atol=0.0)
    # The gradient is as exact as its tanh is: 1 - tanh(x)**2 loses what tanh rounds.
    torch.testing.assert_close(hyperbolic.double(), torch.tanh(exact), rtol=3e-7, atol=0.0)
    assert float((hyperbolic.double() - torch.tanh(exact)).detach().abs().max()) < 1e-7
    (found_slope,) = torch.autograd.grad(hyperbolic.sum(), arguments[0])
    torch.testing.assert_close(found_slope.double(), 1 - torch.tanh(exact).square(), rtol=0.0, atol=2.5e-7)
    # Where next to nothing is left of that, what tanh rounds is most of it: by no more than half a digit here.
    saturated = exact.abs() > 2
    assert float((hyperbolic.double() - torch.tanh(exact)).detach().abs()[saturated].max()) < 1.2 * 2**-25


def waves(x: Tensor, half: Tensor) -> tuple[Tensor, ...]:
    return x.sin(), x.cos(), half.sin(), half.cos()


def test_sines_of_any_size() -> None:
    """Beside the multiples of pi / 2 and of every exponent, the least numbers and the largest among them."""
    generator = torch.Generator().manual_seed(0)
    multiples = torch.arange(1, 4001, dtype=torch.float64) * (math.pi / 2)
    mantissas = 1 + torch.rand(16, 254, generator=generator, dtype=torch.float64)
    sizes = (mantissas * torch.exp2(torch.arange(-126, 128, dtype=torch.float64))).flatten()
    ends = torch.tensor([0.0, 2.0**53, 2.0**81, 2.0**109, math.inf, math.nan], dtype=torch.float64)
    positive = torch.cat([multiples, sizes, ends]).float()
    x = torch.cat([positive, -positive]).requires_grad_()
    half = x.detach().bfloat16().requires_grad_()
    found = retrograd.compile_backward(waves, (x, half), fallback="error")(x, half)
    slopes = torch.autograd.grad([found[0].sum(), found[2].sum()], (x, half))
    for given, ours, slope in ((x, found[:2], slopes[0]), (half, found[2:], slopes[1])):
        exact = given.detach().double()
        for value, expected in zip((*ours, slope), (exact.sin(), exact.cos(), exact.cos()), strict=True):
            # Two units in the last place.
            tolerance = torch.finfo(given.dtype).eps * (2 if given is x else 0.51)
            torch.testing.assert_close(value.double(), expected, rtol=tolerance, atol=1e-44, equal_nan=True)
    assert torch.equal(found[0].signbit()[found[0] == 0], x.signbit()[x == 0])


def inverses(x: Tensor, above: Tensor) -> tuple[Tensor, ...]:
    return x.detach().sinh(), x.asinh(), x.detach().atanh(), above.acosh()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-7), (torch.float64, 2e-15)])
def test_hyperbolic_functions_of_small_and_large_numbers(dtype: torch.dtype, tolerance: float) -> None:
    """What is near zero keeps its digits, and what is negative is not infinite."""
    sizes = torch.logspace(-20, 18, 301, dtype=torch.float64)
    x = torch.cat([sizes, -sizes, torch.tensor([0.0, -0.0])]).to(dtype).requires_grad_()
    above = (1 + sizes).to(dtype)
    found = retrograd.compile_backward(inverses, (x, above), fallback="error")(x, above)
    for value, expected in zip(found, inverses(x.detach().double(), above.double()), strict=True):
        rounded = expected.to(dtype).double()
        torch.testing.assert_close(value.detach().double(), rounded, rtol=tolerance, atol=0.0, equal_nan=True)
    assert all(torch.equal(value.signbit(), x.signbit()) for value in found[:2])
    assert torch.equal(found[2][x == 0].signbit(), x[x == 0].signbit())
    (slope,) = torch.autograd.grad(found[1].sum(), x)
    torch.testing.assert_close(slope.double(), (1 + x.detach().double().square()).rsqrt(), rtol=tolerance, atol=0.0)


def test_erf_as_code_for_cuda_has_it(tmp_path: Path) -> None:
    """Two units in the last place, between the polynomials, beyond them, and of what is no number."""
    text = f"""
#id = affine_map<(i) -> (i)>
func.func @f(%x: tensor<{ERF_SIZE}xf32>) -> tensor<{ERF_SIZE}xf32> {{
  %e = tensor.empty() : tensor<{ERF_SIZE}xf32>
  %r = linalg.generic {{indexing_maps = [#id, #id], iterator_types = ["parallel"]}}
      ins(%x : tensor<{ERF_SIZE}xf32>) outs(%e : tensor<{ERF_SIZE}xf32>) {{
  ^bb0(%a: f32, %c: f32):
    %d = math.erf %a : f32
    linalg.yield %d : f32
  }} -> tensor<{ERF_SIZE}xf32>
  return %r : tensor<{ERF_SIZE}xf32>
}}
"""
    with make_context():
        module = ir.Module.parse(text)
        run_pipeline(module, "builtin.module(bwd-expand-erf)")
        expanded = str(module)
    assert "math.erf" not in expanded
    ends = np.array([0.0, -0.0, 1e-30, -1e-30, 1e30, np.inf, -np.inf, np.nan])
    x = np.concatenate([np.linspace(-5, 5, ERF_SIZE - len(ends)), ends]).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "f.vmfb").write_bytes(compile_executable(expanded, CPU).vmfb)
    command = [*RUN_MODULE, f"--module={tmp_path / 'f.vmfb'}", "--function=f", f"--input=@{tmp_path / 'x.npy'}"]
    subprocess.run([*command, f"--output=@{tmp_path / 'out.npy'}", "--device=local-sync"], check=True)
    found = torch.from_numpy(np.load(tmp_path / "out.npy"))
    expected = torch.special.erf(torch.from_numpy(x).double())
    torch.testing.assert_close(found.double(), expected, rtol=2.5e-7, atol=0.0, equal_nan=True)
    assert float(found.nan_to_num().abs().max()) == 1.0
    assert math.copysign(1.0, float(found[1 - len(ends)])) == -1.0


def powers(x: Tensor, y: Tensor) -> list[Tensor]:
    """As in PyTorch's tutorial of a polynomial, and by numbers, and a mask of what is no number."""
    of_number = 0.0 ** y.abs()
    masked = torch.where(x == x, x, 0.0)
    return [x**y, x[:, None] ** torch.tensor([0, 1, 2, 3]), x**-1, x**-2, x**-3, of_number, x.detach() ** y, masked]


def test_powers_of_what_is_not_above_zero() -> None:
    """IREE takes the logarithm; torch-mlir takes ``x == x`` to be true."""
    bases = torch.tensor([-2.0, -0.5, 0.0, -0.0, 1.0, -1.0, 3.0, math.inf, -math.inf, math.nan])
    exponents = torch.tensor([0.0, 2.0, 3.0, -1.0, -2.0, 0.5, -1.5, math.inf, math.nan])
    grid = [t.flatten() for t in torch.meshgrid(bases, exponents, indexing="ij")]
    results = []
    step = retrograd.compile_backward(
        powers, [t.clone().requires_grad_() for t in grid], verify=False, fallback="error"
    )
    for call in (step, powers):
        x, y = (t.clone().requires_grad_() for t in grid)
        outputs = call(x, y)
        results.append([*outputs, *torch.autograd.grad([t.nansum() for t in outputs], (x, y))])
    torch.testing.assert_close(*results, equal_nan=True)


def test_numbers_below_the_normal_ones_are_zeros_in_compiled_code_alone() -> None:
    """As the guide says; whoever calls it computes with them as before."""
    x = torch.tensor([1e-40, 1e-30], requires_grad=True)
    step = retrograd.compile_backward(lambda x: (x * 2, x.sign() * x), (x,), verify=False)
    for _ in range(2):
        doubled, _ = step(x)
        assert doubled.tolist() == [0.0, 2 * float(x[1])]
        assert float((x.detach() * 2)[0]) > 0


def quotients(x: Tensor, y: Tensor) -> list[Tensor]:
    """Angles, and what whole quotients are and leave."""
    number = x * 1.0
    floors = [torch.div(number, y, rounding_mode="floor"), torch.div(number, 0.3, rounding_mode="floor")]
    return [torch.atan2(x, y), torch.fmod(x, y), torch.fmod(x, 0.3), torch.remainder(x, y), *floors]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.long)])
def test_quotients_of_zeros_and_infinities(dtype: torch.dtype) -> None:
    """IREE computes an angle by a quotient, torch-mlir what is left by a rounded one: 1.5 / 0.3 is less than 5."""
    numbers = [0.0, -0.0, 1.5, -1.5, 0.3, 0.7, -100.0, 5.5, 1e-30, math.inf, -math.inf, math.nan]
    grid = [t.flatten() for t in torch.meshgrid(*[torch.tensor(numbers, dtype=dtype)] * 2, indexing="ij")]
    results = []
    # Of float64 angles are PyTorch's.
    step = retrograd.compile_backward(quotients, [t.clone().requires_grad_() for t in grid], verify=False)
    for call in (step, quotients):
        x, y = (t.clone().requires_grad_() for t in grid)
        outputs = call(x, y)
        results.append([*outputs, *torch.autograd.grad(outputs[0].nansum(), (x, y))])
    torch.testing.assert_close(*results, equal_nan=True)
    assert torch.equal(*[angles[0].nan_to_num().signbit() for angles in results])


def buckets(count: int) -> Tensor:
    """Which bucket of a logarithmic scale each distance is in, as of relative positions; many are on a border."""
    distances = torch.arange(1, count + 1)
    scaled = torch.log(distances.float() / 8) / math.log(128 / 8) * 24
    return scaled.to(torch.long) + 3 * (torch.log(distances.float()) / math.log(2)).floor().to(torch.long)


@pytest.mark.parametrize("door", ["compile_backward", "torch.compile"])
def test_constants_that_are_cut_to_whole_numbers_are_eagers(door: str) -> None:
    """Compiled code rounds two of these logarithms to the other side of a whole number."""

    def model(x: Tensor) -> Tensor:
        return x * buckets(2048)

    x = torch.ones(2048, requires_grad=True)
    step: Callable[[Tensor], Tensor]
    if door == "compile_backward":
        step = retrograd.compile_backward(model, (x,), fallback="error")
    else:
        step = torch.compile(model, backend="retrograd", options={"fallback": "error"})
    (gradient,) = torch.autograd.grad(step(x).sum(), x)
    assert torch.equal(gradient, buckets(2048).float())


class Softmaxes(nn.Module):
    """Along rows that vectors of 16 divide and others, masked and not, along another axis, and in bfloat16."""

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        masked = scores.masked_fill(torch.ones(37, 37, dtype=torch.bool).triu(1), -torch.inf)
        attended = torch.softmax(masked / 3, -1) @ torch.softmax(scores, -2)
        narrow = torch.softmax(x.bfloat16(), -1).float()
        rows = torch.softmax(x, -1).square().sum() + torch.softmax(x[:, :96] * 2, -1).cos().sum()
        return rows + attended.sin().sum() + narrow.square().sum()


def test_softmaxes_of_rows_of_any_length() -> None:
    torch.manual_seed(5)
    model = Softmaxes()
    x, scores = torch.randn(6, 197, requires_grad=True), torch.randn(2, 37, 37, requires_grad=True)
    step = retrograd.compile_backward(model, (x, scores), cache=False)
    expected = torch.autograd.grad(model(x, scores), (x, scores))
    for _ in range(2):
        found = torch.autograd.grad(step(x, scores), (x, scores))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
