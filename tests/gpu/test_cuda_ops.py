# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What code generators for GPUs find hard, beside eager on the device: types, scatters, random numbers, copies."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from steps import TOLERANCES, relative_error, require_device
from torch import Tensor, nn

import retrograd

ROWS = [3, 1, 3, 0, 6, 3, 1, 7]


def setup_module() -> None:
    require_device()


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to("cuda", dtype).requires_grad_()


def check(function: Callable[..., Any], *args: Tensor) -> None:
    """Outputs and gradients as eager's on the same device."""

    def run(call: Callable[..., Any]) -> list[Tensor]:
        output = call(*args)
        leaves = [t for t in (*args, *getattr(function, "parameters", list)()) if t.requires_grad]
        weights = torch.linspace(-1, 1, output.numel(), device="cuda", dtype=torch.float64).to(output.dtype)
        return [output.detach(), *torch.autograd.grad((output.flatten() * weights).sum(), leaves)]

    expected = run(function)
    for found, wanted in zip(run(retrograd.compile_backward(function, args)), expected, strict=True):
        assert found.device == wanted.device and found.dtype == wanted.dtype
        assert relative_error(found, wanted) <= TOLERANCES[wanted.dtype]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, rows: F.layer_norm(x, (12,)),
        lambda x, rows: F.batch_norm(x, None, None, training=True),
        lambda x, rows: x.softmax(-1),
        lambda x, rows: x.cumsum(0),
        lambda x, rows: x.var(0) + x.sum() / 100,
        lambda x, rows: x[rows].tanh(),
        lambda x, rows: x.new_zeros(10, 12).index_add(0, rows, x * 2),
        lambda x, rows: x.scatter_add(1, rows.expand(8, 8), x[:, :8].tanh()),
        lambda x, rows: F.embedding(rows, x, padding_idx=1),
        lambda x, rows: torch.cat([x[:, :6].tanh() * x[:, 6:], x[:, 6:].exp() - x[:, :6]], -1),
    ],
    ids=[
        "layer_norm",
        "batch_norm",
        "softmax",
        "cumsum",
        "sums",
        "rows",
        "index_add",
        "scatter_add",
        "embedding",
        "halves",
    ],
)
def test_types(function: Callable[..., Any], dtype: torch.dtype) -> None:
    check(function, random(8, 12, dtype=dtype), torch.tensor(ROWS, device="cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_batches_of_products_whose_sizes_matrix_units_do_not_divide(dtype: torch.dtype) -> None:
    check(torch.bmm, random(3, 10, 24, dtype=dtype), random(3, 24, 12, dtype=dtype))
    # The last product ends where the memory of its operand does.
    check(lambda x, y: x.transpose(1, 2) @ y, random(7, 129, 64, dtype=dtype), random(7, 129, 33, dtype=dtype))


def test_gathers_from_what_gathers_give() -> None:
    """The pivots of a factorization are applied one after another, each to what the last one gave."""
    factors, pivots = torch.linalg.lu_factor(torch.randn(4, 7, 7, device="cuda"))

    def solve(factors: Tensor, pivots: Tensor, b: Tensor) -> Tensor:
        solved: Tensor = torch.linalg.lu_solve(factors, pivots, b)
        return solved

    check(solve, factors.requires_grad_(), pivots, torch.randn(4, 7, 3, device="cuda", requires_grad=True))
    rows = torch.randint(0, 64, (64, 32), device="cuda")
    check(lambda x, i: x.gather(0, i).gather(0, i.flip(1)), torch.randn(64, 32, device="cuda").requires_grad_(), rows)


def test_kernels_of_many_results_load() -> None:
    """The gradient of the filter is a sum for each of its 64 elements, in one kernel."""
    check(lambda x, w, b: F.conv3d(x, w, b, stride=2), random(1, 1, 4, 4, 4), random(1, 1, 4, 4, 4), random(1))
    check(lambda x: F.adaptive_max_pool3d(x, (3, 4, 5)), random(2, 3, 5, 6, 7))


def test_constants_made_on_the_device() -> None:
    outside = torch.arange(5.0, device="cuda")

    def function(x: Tensor, mask: Tensor) -> Tensor:
        scaled = x * torch.tensor(3.0, device="cuda") * torch.tensor([1.0, 2.0, 0.0, -1.0, 4.0], device="cuda")
        probabilities: Tensor = torch.masked.softmax(scaled * outside, 0, mask=mask)
        return probabilities.nan_to_num()

    mask = torch.tensor([True, False, True, True, True], device="cuda")
    check(function, torch.randn(5, device="cuda", requires_grad=True), mask)


class Cell(nn.Module):
    """Two steps of a recurrent cell."""

    def __init__(self, cell: nn.LSTMCell | nn.GRUCell) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x, self.cell(x))
        product: Tensor = state[0] * state[1] if isinstance(state, tuple) else state
        return product


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_recurrent_cells(cell: type[nn.LSTMCell] | type[nn.GRUCell]) -> None:
    check(Cell(cell(6, 8).to("cuda")), torch.randn(3, 6, device="cuda", requires_grad=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathers_from_slices_with_gaps(dtype: torch.dtype) -> None:
    """Channels of joined images that were resized, as heads for segmentation do: of an argument and of a result."""

    def resize(x: Tensor, weight: Tensor) -> Tensor:
        parts = F.conv2d(x, weight).chunk(3, 1)
        sizes = ((16, 16), (32, 8), (4, 4))
        resized = [F.interpolate(part, size=size, mode="bilinear") for part, size in zip(parts, sizes, strict=True)]
        return torch.cat([part.flatten(1) for part in resized], 1)

    def join(a: Tensor, b: Tensor, c: Tensor, weight: Tensor) -> Tensor:
        images = [F.interpolate(x, size=(16, 16), mode="bilinear") for x in (a, b, c)]
        # Eager adds up gradients of images in bfloat16 as such: 3 percent off for these.
        return F.conv2d(torch.cat(images, 1).to(dtype), weight)

    check(resize, random(2, 6, 8, 8, dtype=dtype), random(12, 6, 1, 1, dtype=dtype))
    images = [random(2, 8, size, size) for size in (2, 4, 8)]
    check(join, *images, random(5, 24, 1, 1, dtype=dtype))


def test_dropout_follows_the_seed_and_not_the_device() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.25), nn.Tanh())
    x = torch.randn(32, 16)
    ones: dict[str, Tensor] = {}
    for device in ("cpu", "cuda"):
        model.to(device)
        step = retrograd.compile_backward(model, (x.to(device),))
        torch.manual_seed(7)
        y = step(x.to(device))
        model.zero_grad()
        y.sum().backward()
        assert "not verified" not in str(step.explain().to_dict()["verification"])
        gradient = model[0].weight.grad
        assert isinstance(gradient, Tensor)
        ones[device] = torch.cat([y.detach().cpu().flatten(), gradient.cpu().flatten()])
        assert 0.15 < float((y == 0).float().mean()) < 0.35
    assert relative_error(ones["cuda"], ones["cpu"]) < 1e-5


def test_random_numbers_in_half_precision_and_attention() -> None:
    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, F.dropout(q, 0.1), dropout_p=0.2) + torch.randn_like(q)

    q = random(2, 2, 16, 8, dtype=torch.bfloat16)
    retrograd.compile_backward(attend, (q,), verify=True)(q).sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()


def test_results_that_are_arguments_constants_or_pieces() -> None:
    def pieces(x: Tensor) -> tuple[Tensor, ...]:
        return x, torch.cat([x * 2, x[:2]]), torch.zeros(3, device=x.device), x.sum()

    x = random(4, 5)
    found, expected = retrograd.compile_backward(pieces, (x,))(x), pieces(x)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs) and ours.device == theirs.device
    (gradient,) = torch.autograd.grad(found[1].sum() + found[3], x)
    assert torch.equal(gradient, torch.tensor([4.0, 4, 3, 3], device="cuda")[:, None].expand(4, 5))


def test_a_causal_mask_of_the_cpus_is_not_read() -> None:
    """PyTorch's layers find that it is causal, and leave it out; a trace applies it, on the device."""
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.TransformerDecoder(layer, 1).cuda()

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            decoded: Tensor = self.layers(x, memory, tgt_mask=mask)
            return decoded

    model = Decoder()
    x, memory = (torch.randn(2, 7, 32, device="cuda", requires_grad=True) for _ in range(2))
    step = retrograd.compile_backward(model, (x, memory), cache=False)
    weights = [x, memory, *model.parameters()]
    # The squares of what a norm gives have a sum that is always the same.
    tangent = torch.randn_like(x)
    found, expected = (torch.autograd.grad(call(x, memory), weights, tangent) for call in (step, model))
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs.double()) < 1e-5


def test_angles_quotients_and_places_of_nan() -> None:
    """As eager has them on the device: signs of zeros, quotients that are rounded once, NaN that is found."""
    some = torch.tensor([0.0, -0.0, 1.5, -1.5, 3.0, -2.0, 0.3, 7.0], device="cuda")
    y, x = (t.flatten().requires_grad_() for t in torch.meshgrid(some, some.flip(0), indexing="ij"))
    divided = x.detach() + (x.detach() == 0)
    holed = torch.tensor([[1.0, float("nan"), 3.0], [2.0, 5.0, float("nan")], [4.0, 1.0, 2.0]], device="cuda")

    def function(y: Tensor, x: Tensor, by: Tensor, holed: Tensor) -> tuple[Tensor, ...]:
        places = holed.max(1).indices, holed.min(0).indices, holed.argmax()
        whole = (y // by).detach(), torch.div(y, by, rounding_mode="trunc")
        quotients = torch.fmod(y, by), torch.remainder(y, by), *whole
        pooled = F.max_pool2d(holed[None, None], 2, 1)
        extremes = torch.maximum(holed, holed.flip(0)), holed.clamp(1.5, 3.5), holed.amax(1)
        return torch.atan2(y, x), *quotients, pooled, *extremes, *places

    args = y, x, divided, holed.requires_grad_()
    found, expected = retrograd.compile_backward(function, args, cache=False)(*args), function(*args)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7, equal_nan=True)
        if ours.is_floating_point():
            assert torch.equal(ours.signbit() | ours.isnan(), theirs.signbit() | theirs.isnan())
    # At zero and zero the angle has no gradient.
    away = (y != 0) | (x != 0)
    weights = [away.to(y.dtype), *(torch.ones_like(t) for t in expected[1:3])]
    gradients = [torch.autograd.grad(outputs[:3], (y, x), weights) for outputs in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours[away], theirs[away])
