# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels of our own on the device: against float64, on fresh random inputs, at sizes that no tile divides too."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from iree_tools import RUN_MODULE
from steps import require_device
from torch import Tensor

import retrograd
from retrograd.frontend.layers.random_ops import draw_seed, uniform
from retrograd.runtime.artifact import read_artifact

# Of the norm: eager's own in f32 is 2e-7 to 1e-6 at these sizes, and one rounding to 16 bits more than that.
TOLERANCES = {torch.float32: 5e-7, torch.bfloat16: 3e-3, torch.float16: 5e-4}
# Weights are exponentials of sums, whose errors they have times their size; a bias has a sum of IREE's for a gradient.
FLOORS = {("attention", torch.float32): 1e-6, ("convolutions", torch.float32): 1e-6}


def setup_module() -> None:
    require_device()
    torch.backends.cudnn.allow_tf32 = False


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype).requires_grad_()


def poison() -> None:
    """Leave what is no number in the memory that results and scratch are taken from next."""
    torch.full((1 << 26,), float("nan"), device="cuda")
    torch.cuda.synchronize()


def run(call: Callable[..., Any], args: Sequence[Tensor], tangent: Tensor) -> list[Tensor]:
    output = call(*args)
    return [output.detach(), *torch.autograd.grad(output, [a for a in args if a.requires_grad], tangent)]


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def compile_with(kernels: str, function: Callable[..., Any], args: Sequence[Tensor]) -> Any:
    compiled = retrograd.compile_backward(function, args, kernels=kernels)
    labels = " ".join(compiled.explain().to_dict()["kernels"])
    marks = {"products": "product_", "scatters": "add_rows", "transposes": "transpose_", "convolutions": "convolve_"}
    assert marks.get(kernels, f"{kernels}_") in labels, labels
    return compiled


def check(function: Callable[..., Any], *args: Tensor, kernels: str = "products") -> None:
    """Outputs and gradients near those of float64, the same bits twice, and no further from them than eager's."""
    compiled = compile_with(kernels, function, args)
    wide = [a.detach().double().requires_grad_(a.requires_grad) if a.is_floating_point() else a for a in args]
    shape = function(*args)
    tangent = torch.randn_like(shape)
    exact, eager = run(function, wide, tangent.double()), run(function, args, tangent)
    poison()
    found = run(compiled, args, tangent)
    again = run(compiled, args, tangent)
    for mine, other, theirs, right in zip(found, again, eager, exact, strict=True):
        assert torch.equal(mine, other)
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        error = relative_error(mine, right)
        floor = FLOORS.get((kernels, mine.dtype), TOLERANCES[mine.dtype])
        assert error <= max(floor, 1.2 * relative_error(theirs, right)), (error, mine.shape)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (256, 256, 256),
        (1024, 768, 512),
        (300, 257, 1000),
        (4096, 48, 136),
        (17, 4096, 300),
        (2048, 130, 64),
        (128, 128, 8192),
        (640, 1000, 5003),
    ],
    ids=lambda size: str(size),
)
def test_linear_layers(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Three layouts: the forward's weight is transposed, and what its gradient is of."""
    check(F.linear, random(m, k, dtype=dtype), random(n, k, dtype=dtype, scale=k**-0.5), random(n, dtype=dtype))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_batches(dtype: torch.dtype) -> None:
    check(torch.bmm, random(6, 200, 72, dtype=dtype), random(6, 72, 250, dtype=dtype))
    check(lambda x, y: x @ y.transpose(-1, -2), random(3, 8, 128, 64, dtype=dtype), random(3, 8, 128, 64, dtype=dtype))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_strides_and_slices(dtype: torch.dtype) -> None:
    wide, weight = random(512, 1030, dtype=dtype), random(300, 700, dtype=dtype)
    check(lambda x, w: x[:, 3:303] @ w[:, 1:], wide, weight)
    check(lambda x, w: x.t() @ w, random(700, 512, dtype=dtype).t().contiguous().t(), random(700, 96, dtype=dtype))


@pytest.mark.parametrize(("m", "n", "k"), [(4096, 3072, 768), (4100, 515, 264), (300, 130, 4096)])
def test_gradients_of_weights_that_are_rounded_and_widened(m: int, n: int, k: int) -> None:
    """As under autocast: float32 with the digits of bfloat16."""
    x, w = random(m, k), random(n, k, scale=k**-0.5)

    def narrow(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), w.bfloat16())

    compiled, tangent = compile_with("products", narrow, (x, w)), torch.randn(m, n, device="cuda").bfloat16()
    assert "_rounded" in " ".join(compiled.explain().to_dict()["kernels"])
    exact = tangent.double().t() @ x.bfloat16().double()
    poison()
    first, second = run(compiled, (x, w), tangent)[2], run(compiled, (x, w), tangent)[2]
    assert torch.equal(first, second) and torch.equal(first, first.bfloat16().float())
    assert relative_error(first, exact) < 2.5e-3


def test_one_row_is_right_too() -> None:
    """Nothing that a kernel does not take is wrong."""
    x, w = random(1, 512), random(700, 512)
    compiled = retrograd.compile_backward(F.linear, (x, w), kernels="products")
    tangent = torch.randn(1, 700, device="cuda")
    for mine, theirs in zip(run(compiled, (x, w), tangent), run(F.linear, (x, w), tangent), strict=True):
        assert relative_error(mine, theirs.double()) < 1e-6


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_infinities_and_what_is_no_number(dtype: torch.dtype) -> None:
    x, y = random(300, 512, dtype=dtype), random(512, 200, dtype=dtype)
    largest = torch.finfo(dtype).max
    with torch.no_grad():
        x[3, 5], x[7, 9], x[9, 3], x[20, 20] = float("inf"), float("nan"), -float("inf"), largest
        y[1, 1], y[5, 7] = largest, 0
        # One term of a sum is too large, not two: what becomes of these depends on their order.
        x[[3, 7, 9, 20], 1], y[20, 1] = 0.5, 0.25
    compiled, tangent = compile_with("products", torch.mm, (x, y)), torch.ones(300, 200, device="cuda", dtype=dtype)
    found, eager = run(compiled, (x, y), tangent)[0], run(torch.mm, (x, y), tangent)[0]
    assert torch.equal(found.isnan(), eager.isnan())
    assert torch.equal(found.isinf(), eager.isinf())
    assert torch.equal(found[found.isinf()], eager[eager.isinf()])


def test_numbers_of_all_sizes() -> None:
    """A row of large numbers beside rows of small ones, whose lower parts are smaller still."""
    scales = torch.logspace(-30, 15, 256, device="cuda")[:, None]
    x, y = (random(256, 512).detach() * scales).requires_grad_(), random(512, 256)
    compiled = compile_with("products", torch.mm, (x, y))
    exact = x.detach().double() @ y.detach().double()
    error = (compiled(x, y).detach().double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert float(error.max()) < 5e-7


@pytest.mark.parametrize("call", [F.linear, torch.mm, torch.bmm], ids=["nt", "nn", "batches"])
def test_a_first_matrix_is_divided_as_it_is_read(call: Callable[..., Tensor]) -> None:
    """It is of the size of a vocabulary's logits: the forward reads it, and a gradient, which reads it transposed, or,
    of a linear layer, as a second matrix that is never divided so."""
    (*many, m, k), n = (3, 2600, 2901) if call is torch.bmm else (5003, 4501), 77
    x, w = random(*many, m, k), random(*many, *((n, k) if call is F.linear else (k, n)), scale=k**-0.5)
    compiled = compile_with("products", call, (x, w))
    lines = [line for line in compiled.explain().to_dict()["kernels"] if ": product_" in line]
    assert len([line for line in lines if "_divided" in line]) == (1 if call is F.linear else 2), lines
    check(call, x, w, kernels="products")
    with torch.no_grad():
        x.flatten()[[5, 70_000]] = torch.tensor([float("inf"), float("nan")], device="cuda")
    tangent = torch.ones(*many, m, n, device="cuda")
    found, eager = run(compiled, (x, w), tangent)[0], run(call, (x, w), tangent)[0]
    assert torch.equal(found.isnan(), eager.isnan()) and torch.equal(found.isinf(), eager.isinf())


@pytest.mark.parametrize("rows", ["random", "same", "few"])
@pytest.mark.parametrize(("count", "width"), [(4096, 96), (777, 33), (2, 300), (262_144, 12), (70_001, 65)])
def test_embeddings(rows: str, count: int, width: int) -> None:
    most = {"random": 1000, "same": 1, "few": 7}[rows]
    places = torch.randint(0, most, (count,), device="cuda")
    check(F.embedding, places, random(1000, width), kernels="scatters")


def test_sums_of_edges_into_nodes() -> None:
    """Places of three digits, half of which are one node's."""

    def gather(messages: Tensor, places: Tensor) -> Tensor:
        return messages.new_zeros(100_000, 24).index_add(0, places, messages)

    places = torch.randint(0, 100_000, (300_000,), device="cuda")
    places[::2] = 77_777
    check(gather, random(300_000, 24), places, kernels="scatters")


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(300, 1001), (7, 50257), (1024, 513)])
def test_long_rows(rows: int, columns: int, dtype: torch.dtype) -> None:
    def entropy(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets, ignore_index=3)

    def scaled(x: Tensor, y: Tensor) -> Tensor:
        return (x * y[:, None] - 1).exp() + x.amax(1, keepdim=True) / 2

    targets = torch.randint(0, columns, (rows,), device="cuda")
    targets[::3] = 3
    check(entropy, random(rows, columns, dtype=dtype), targets, kernels="rows")
    check(lambda x: x.log_softmax(1), random(rows, columns, dtype=dtype), kernels="rows")
    check(scaled, random(rows, columns, dtype=dtype, scale=0.1), random(rows, dtype=dtype, scale=0.1), kernels="rows")


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(4096, 768), (70001, 48), (5003, 65), (300, 1024), (16384, 16)])
def test_sums_down_columns(rows: int, columns: int, dtype: torch.dtype) -> None:
    """A bias's gradient, a batch norm's statistics and gradients, and what is read by all rows or by one column."""

    def normalized(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, weight, bias, training=True).relu()

    def scaled(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.where(x > 0, x * weight, x * 0.5) + bias

    x, weight, bias = (random(*shape, dtype=dtype) for shape in ((rows, columns), (columns,), (columns,)))
    check(scaled, x, weight, bias, kernels="columns")
    check(normalized, x, weight, bias, kernels="columns")


def test_columns_of_images_with_means_of_their_own() -> None:
    """What is read by the image and the channel, as the gradient of a mean over places is."""

    def pooled(x: Tensor, bias: Tensor) -> Tensor:
        return (x + bias).relu().mean((1, 2))

    check(pooled, random(32, 14, 15, 64, dtype=torch.bfloat16), random(64, dtype=torch.bfloat16), kernels="columns")


def test_columns_with_infinities_and_what_is_no_number() -> None:
    x, bias = random(3000, 100), random(100)
    with torch.no_grad():
        x[7, 1], x[2999, 2], x[0, 3], x[1, 3] = float("inf"), float("nan"), float("inf"), -float("inf")
    compiled = compile_with("columns", lambda x, b: (x * b).sum(0), (x, bias))
    found, eager = compiled(x, bias).detach(), (x * bias).sum(0).detach()
    assert torch.equal(found.isnan(), eager.isnan()) and torch.equal(found.isinf(), eager.isinf())


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(64, 48, 3, 3), (5, 3, 61, 67), (1, 7, 40, 100)])
def test_transposes_with_a_short_side(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def turned(x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1).float().contiguous()

    x = random(*shape, dtype=dtype)
    tangent = torch.randn(turned(x).shape, device="cuda")
    compiled = compile_with("transposes", turned, (x,))
    poison()
    for mine, eager in zip(run(compiled, (x,), tangent), run(turned, (x,), tangent), strict=True):
        assert torch.equal(mine, eager)


def test_rows_with_infinities_and_what_is_no_number() -> None:
    x = random(512, 1001)
    with torch.no_grad():
        x[1, 7], x[2, 1000], x[3, 0], x[4] = float("inf"), float("nan"), -float("inf"), -float("inf")
    functions: list[Callable[[Tensor], Tensor]] = [lambda x: x.log_softmax(1), lambda x: x.amax(1)]
    for function in functions:
        compiled = compile_with("rows", function, (x,))
        found, eager = compiled(x).detach(), function(x).detach()
        assert torch.equal(found.isnan(), eager.isnan()) and torch.equal(found.isinf(), eager.isinf())


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
@pytest.mark.parametrize(
    ("batch", "heads", "shared", "rows", "columns", "width"),
    [(2, 4, 4, 1024, 1024, 64), (2, 4, 2, 333, 517, 80), (1, 6, 1, 77, 300, 128), (3, 2, 2, 130, 129, 17)],
    ids=str,
)
def test_attention(
    batch: int, heads: int, shared: int, rows: int, columns: int, width: int, causal: bool, dtype: torch.dtype
) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != shared)

    keys = [random(batch, shared, columns, width, dtype=dtype) for _ in range(2)]
    check(attend, random(batch, heads, rows, width, dtype=dtype), *keys, kernels="attention")


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_attention_with_masks(dtype: torch.dtype) -> None:
    """A bias, columns that do not count with a batch of none at all, and the least number in the place of infinity."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    q, k, v = random(2, 4, 200, 64, dtype=dtype), random(2, 4, 333, 64, dtype=dtype), random(2, 4, 333, 64, dtype=dtype)
    bias = torch.randn(4, 200, 333, device="cuda", dtype=dtype)
    counts = torch.rand(2, 1, 1, 333, device="cuda") < 0.7
    counts[0] = False
    least = torch.zeros(2, 1, 200, 333, device="cuda", dtype=dtype)
    least[:, :, :, 100:] = torch.finfo(dtype).min
    for mask in (bias, counts, torch.zeros_like(bias).masked_fill(bias > 1, -float("inf")), least):
        check(attend, q, k, v, mask, kernels="attention")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_of_wide_heads(dtype: torch.dtype) -> None:
    attend = F.scaled_dot_product_attention
    check(attend, *(random(1, 2, 300, 256, dtype=dtype) for _ in range(3)), kernels="attention")


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", ["whole", "causal", "biased"])
def test_attention_with_dropout(kind: str, dtype: torch.dtype) -> None:
    """Against the formula in float64 with the mask read out, which is a function of the seed: both halves have it."""
    causal = kind == "causal"

    def attend(q: Tensor, k: Tensor, v: Tensor, *bias: Tensor) -> Tensor:
        mask = bias[0] if bias else None
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, dropout_p=0.2, enable_gqa=True)

    args = random(2, 4, 333, 80, dtype=dtype), *(random(2, 2, 517, 80, dtype=dtype) for _ in range(2))
    args += (random(1, 4, 333, 517, dtype=dtype),) if kind == "biased" else ()
    tangent, compiled = torch.randn_like(args[0]), compile_with("attention", attend, args)
    assert all("_dropped" in line for line in compiled.explain().to_dict()["kernels"] if "attention_key" in line)
    poison()
    torch.manual_seed(7)
    found = run(compiled, args, tangent)
    torch.manual_seed(7)
    kept = uniform(draw_seed().cuda(), 0, (2, 4, 333, 517)) >= 0.2
    wide = [a.detach().double().requires_grad_() for a in args]
    q, (k, v) = wide[0], (t.repeat_interleave(2, 1) for t in wide[1:3])
    scores = q @ k.transpose(-1, -2) / 80**0.5 + sum(wide[3:])
    if causal:
        scores = scores.masked_fill(torch.ones(333, 517, device="cuda", dtype=torch.bool).triu(1), float("-inf"))
    output = scores.softmax(-1) * kept / 0.8 @ v
    exact = [output.detach(), *torch.autograd.grad(output, wide, tangent.double())]
    for mine, right in zip(found, exact, strict=True):
        assert relative_error(mine, right) <= {torch.float32: 1e-6}.get(dtype, 1.5 * TOLERANCES[dtype])
    again = run(compiled, args, tangent)
    assert not torch.equal(again[0], found[0])


def test_attention_that_no_kernel_takes_is_right_too() -> None:
    x = random(1, 2, 64, 160)
    compiled = retrograd.compile_backward(F.scaled_dot_product_attention, (x, x, x), kernels="attention")
    tangent = torch.randn_like(x)
    mine, theirs = (run(call, (x, x, x), tangent) for call in (compiled, F.scaled_dot_product_attention))
    assert not [line for line in compiled.explain().to_dict()["kernels"] if "attention_" in line]
    for found, right in zip(mine, theirs, strict=True):
        assert relative_error(found, right.double()) < 2e-6


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("images", "filters", "how"),
    [
        ((4, 64, 28, 28), (128, 64, 3, 3), {"padding": 1}),
        ((2, 3, 61, 67), (40, 3, 7, 7), {"stride": 2, "padding": 3}),
        ((3, 33, 17, 19), (65, 33, 3, 3), {"stride": 3, "padding": 2}),
        ((2, 48, 20, 31), (96, 16, 3, 5), {"padding": (2, 4), "dilation": 2, "groups": 3}),
        ((5, 128, 9, 9), (256, 128, 1, 1), {"stride": 2}),
        ((8, 64, 14, 14), (64, 4, 3, 3), {"padding": 1, "groups": 16}),
        ((1, 256, 1, 300), (200, 256, 1, 3), {"padding": (0, 1)}),
        ((300, 64, 1, 1), (128, 64, 1, 1), {}),
        ((2, 16, 50, 20), (24, 16, 2, 4), {"stride": (1, 2), "dilation": (3, 1), "padding": (4, 1)}),
    ],
    ids=str,
)
def test_convolutions(
    images: tuple[int, ...], filters: tuple[int, ...], how: dict[str, Any], dtype: torch.dtype
) -> None:
    def convolve(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.conv2d(x, w, b, **how)

    scale = (filters[1] * filters[2] * filters[3]) ** -0.5
    args = random(*images, dtype=dtype), random(*filters, dtype=dtype, scale=scale), random(filters[0], dtype=dtype)
    check(convolve, *args, kernels="convolutions")


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_transposed_convolutions(dtype: torch.dtype) -> None:
    def convolve(x: Tensor, w: Tensor) -> Tensor:
        return F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1, groups=2)

    check(
        convolve,
        random(4, 32, 13, 15, dtype=dtype),
        random(32, 20, 3, 3, dtype=dtype, scale=0.1),
        kernels="convolutions",
    )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_convolution_that_is_sliced_and_joined(dtype: torch.dtype) -> None:
    """What begins at no multiple of 16 bytes, and what is written into a larger tensor."""

    def convolve(x: Tensor, w: Tensor) -> Tensor:
        y = F.conv2d(x[1:, :, 1:], w, padding=1)
        return torch.cat([y, x[1:, :, 1:].sum(1, keepdim=True)], 1)

    check(
        convolve,
        random(5, 36, 20, 21, dtype=dtype),
        random(37, 36, 3, 3, dtype=dtype, scale=0.1),
        kernels="convolutions",
    )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_convolutions_of_infinities_and_of_what_is_no_number(dtype: torch.dtype) -> None:
    x, w = random(2, 64, 20, 20, dtype=dtype), random(70, 64, 3, 3, dtype=dtype)
    with torch.no_grad():
        x[0, 3, 4, 5], x[1, 7, 0, 9], x[1, 9, 19, 19] = float("inf"), float("nan"), -float("inf")
    compiled = compile_with("convolutions", lambda x, w: F.conv2d(x, w, padding=1), (x, w))
    found = compiled(x, w).detach()
    exact = F.conv2d(x.detach().double(), w.detach().double(), padding=1)
    assert torch.equal(found.isnan(), exact.isnan()) and torch.equal(found.isinf(), exact.isinf())
    assert torch.equal(found[found.isinf()].double(), exact[exact.isinf()])


class Block(torch.nn.Module):
    """A bottleneck of ResNet behind its stem."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 32, 7, 2, 3, bias=False)
        self.narrow, self.wide = torch.nn.Conv2d(32, 16, 1, bias=False), torch.nn.Conv2d(16, 32, 1, bias=False)
        self.middle = torch.nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(n) for n in (32, 16, 16, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.norms[0](self.stem(x)).relu(), 3, 2, 1)
        y = self.norms[1](self.narrow(x)).relu()
        y = self.norms[2](self.middle(y)).relu()
        y = self.norms[3](self.wide(y)) + x
        return F.relu(y).mean((2, 3))


def gradients_of(call: Callable[..., Any], model: torch.nn.Module, x: Tensor, tangent: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(call(x), [x, *model.parameters()], tangent))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_file_has_the_gradients_of_a_network_of_convolutions(dtype: torch.dtype, tmp_path: Path) -> None:
    """With kernels for all of them, in the place of the library that computes the larger ones in this process."""
    model, x = Block().cuda().to(dtype), random(16, 3, 64, 64, dtype=dtype)
    path = tmp_path / "block.rgd"
    retrograd.compile_backward(model, (x,)).save(path)
    loaded = retrograd.load(path, model)
    tangent = torch.randn(16, 32, device="cuda", dtype=dtype)
    found, again = (gradients_of(loaded, model, x, tangent) for _ in range(2))
    eager = gradients_of(model, model, x, tangent)
    wide = Block().cuda().double()
    wide.load_state_dict(model.state_dict())
    exact = gradients_of(wide, wide, x.detach().double().requires_grad_(), tangent.double())
    for mine, other, theirs, right in zip(found, again, eager, exact, strict=True):
        assert torch.equal(mine, other)
        error = relative_error(mine, right)
        assert error <= max(20 * TOLERANCES[dtype], 1.5 * relative_error(theirs, right)), (error, mine.shape)


def test_iree_run_module_runs_a_network_of_convolutions(tmp_path: Path) -> None:
    """Without Python: what the forward saves is given to the backward."""
    model, x = Block().cuda(), random(16, 3, 64, 64)
    step = retrograd.compile_backward(model, (x,))
    step.save(tmp_path / "block.vmfb")
    tangent = torch.randn(16, 32, device="cuda")
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {**state, "args[0]": x, "tangent.output": tangent}
    files = {name: tmp_path / f"{number}.npy" for number, name in enumerate(values)}
    for name, value in values.items():
        np.save(files[name], value.detach().cpu().numpy())
    manifest = read_artifact(tmp_path / "block.vmfb").manifest
    for function in ("forward", "backward"):
        spec = manifest.function(function)
        results = {r.name: tmp_path / f"{function}_{number}.npy" for number, r in enumerate(spec.results)}
        done = subprocess.run(
            [
                *RUN_MODULE,
                f"--module={tmp_path / 'block.vmfb'}",
                "--device=cuda",
                f"--function={function}",
                *(f"--input=@{files[argument.name]}" for argument in spec.arguments),
                *(f"--output=@{path}" for path in results.values()),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        files |= {name: path for name, path in results.items() if name not in files}
    exact = gradients_of(model, model, x, tangent)
    for name, right in zip(["args[0]", *dict(model.named_parameters())], exact, strict=True):
        mine = torch.from_numpy(np.load(files[f"grad.{name}"]))
        assert relative_error(mine, right.cpu().double()) < 1e-4, name


def attend_to_parts(x: Tensor, weight: Tensor) -> Tensor:
    """Attention of the parts of one projection."""
    q, k, v = (part.unflatten(-1, (4, 64)).transpose(1, 2) for part in (x @ weight).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_attention_of_the_parts_of_a_projection(dtype: torch.dtype) -> None:
    check(
        attend_to_parts, random(2, 300, 96, dtype=dtype), random(96, 768, dtype=dtype, scale=0.1), kernels="attention"
    )


def test_attention_in_a_file_takes_memory_linear_in_rows(tmp_path: Path) -> None:
    """Its kernels are in the file, though in this process a library computes attention."""
    x, weight = random(2, 2048, 256, dtype=torch.bfloat16), random(256, 768, dtype=torch.bfloat16, scale=0.1)
    compiled = retrograd.compile_backward(attend_to_parts, (x, weight))
    path = tmp_path / "attention.rgd"
    compiled.save(path)
    loaded = retrograd.load(path)
    tangent = torch.randn(2, 2048, 256, device="cuda", dtype=torch.bfloat16)
    exact = run(attend_to_parts, [t.detach().double().requires_grad_() for t in (x, weight)], tangent.double())
    run(loaded, (x, weight), tangent)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = run(loaded, (x, weight), tangent)
    # The scores are 2 x 4 x 2048 x 2048: 64 MiB of bf16 once.
    assert torch.cuda.max_memory_allocated() - before < 64 << 20
    for mine, right in zip(found, exact, strict=True):
        assert relative_error(mine, right) < 1e-2


def test_a_file_needs_no_triton(tmp_path: Path) -> None:
    x, w = random(512, 512), random(512, 512)
    compiled = compile_with("products", F.linear, (x, w))
    path = tmp_path / "linear.rgd"
    compiled.save(path)
    code = f"""
import sys
sys.modules["triton"] = None
import torch, retrograd
x, w = (torch.randn(512, 512, device="cuda").requires_grad_() for _ in range(2))
y = retrograd.load({str(path)!r})(x, w)
y.sum().backward()
assert (y - torch.nn.functional.linear(x, w)).abs().max() < 1e-3 and x.grad is not None
"""
    subprocess.run([sys.executable, "-c", code], check=True)
