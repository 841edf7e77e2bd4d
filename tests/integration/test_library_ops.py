# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What PyTorch's libraries compute between compiled stages, convolutions, products, attention: `kernels="library"`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograd


class Convolutions(nn.Module):
    """Images [N, 3, 16, 16] to a loss: a strided, a grouped, a transposed convolution, and batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4)
        self.up = nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        return self.up(F.gelu(self.grouped(x)) + x).square().mean()  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Rows [B, T, 24] to rows: queries, keys and values are parts of one projection; ``groups`` heads share a key."""

    def __init__(self, groups: int = 1, is_causal: bool = True, masked: bool = False) -> None:
        super().__init__()
        self.projection, self.out = nn.Linear(24, 24 + 2 * 24 // groups), nn.Linear(24, 24)
        self.groups, self.is_causal, self.masked = groups, is_causal, masked

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, width = x.shape
        q, *kv = self.projection(x).split([width, width // self.groups, width // self.groups], -1)
        q, k, v = (t.view(batch, rows, -1, 4).transpose(1, 2) for t in (q, *kv))
        mask = (torch.arange(rows) < rows - 2).unsqueeze(0) if self.masked else None
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.is_causal, enable_gqa=self.groups > 1)
        return x + self.out(y.transpose(1, 2).reshape(batch, rows, width))  # type: ignore[no-any-return]


class Projected(nn.Module):
    """Rows [B, T, 8] to rows of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, width = x.shape
        q, k, v = (t.view(batch, rows, 2, 4).transpose(1, 2) for t in self.projection(x).split(width, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, rows, width)


def convolutions() -> tuple[nn.Module, Tensor]:
    return Convolutions(), torch.randn(2, 3, 16, 16)


def attention(**how: Any) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(Attention(**how), Attention(**how)), torch.randn(2, 10, 24, requires_grad=True)


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "convolutions": convolutions,
    "causal": attention,
    "grouped": lambda: attention(groups=2, is_causal=False),
    "masked": lambda: attention(is_causal=False, masked=True),
}


def step(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    """The loss of one step and all gradients."""
    model.zero_grad()
    x.grad = None
    loss = call(x).square().mean()
    loss.backward()
    grads = [p.grad for p in [*model.parameters(), x] if p.grad is not None]
    return [loss.detach(), *(grad.clone() for grad in grads)]


def islands(compiled: retrograd.CompiledBackward) -> list[str]:
    return [island["what"] for island in compiled.explain().to_dict().get("islands", [])]


@pytest.mark.short_cases("convolutions")
@pytest.mark.parametrize("name", CASES)
def test_ahead_of_time(name: str) -> None:
    model, x = CASES[name]()
    expected = step(model, model, x)
    compiled = retrograd.compile_backward(model, (x,), kernels="library")
    torch.testing.assert_close(step(compiled, model, x), expected)
    found = islands(compiled)
    # Of attention's models the products too: 10 of their 12, as two stand beside attention and are part of its step.
    assert len(found) == (6 if name == "convolutions" else 14)
    assert sum("attention_for_cpu" in text for text in found) == (0 if name == "convolutions" else 4)
    assert all("is faster" in text for text in islands(compiled))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_filter_of_many_taps_for_each_channel(dtype: torch.dtype) -> None:
    """Of their strides some leave a part of the image over, and are not those of their taps."""
    model = nn.Sequential(
        nn.Conv2d(4, 4, 5, stride=2, padding=2, groups=4),
        nn.GELU(),
        nn.Conv2d(4, 4, (4, 3), stride=(3, 1), padding=(1, 2), dilation=(1, 2), groups=4, bias=False),
    ).to(dtype)
    x = torch.randn(3, 4, 18, 15, dtype=dtype, requires_grad=True)
    expected = step(model, model, x)
    compiled = retrograd.compile_backward(model, (x,), kernels="library")
    for ours, eagers in zip(step(compiled, model, x), expected, strict=True):
        assert (ours - eagers).norm() <= (1e-6 if dtype is torch.float32 else 5e-3) * eagers.norm()
    # Forward, the gradient of images and that of filters, of both.
    assert len(islands(compiled)) == 6


@pytest.mark.short_cases("causal")
@pytest.mark.parametrize("name", CASES)
def test_under_torch_compile(name: str) -> None:
    model, x = CASES[name]()
    expected = step(model, model, x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="retrograd", options={"kernels": "library"})
    torch.testing.assert_close(step(compiled, model, x), expected)


def test_under_enable() -> None:
    model, x = CASES["convolutions"]()
    expected = step(model, model, x)
    with retrograd.enable(kernels="library"):
        for _ in range(3):
            torch.testing.assert_close(step(model, model, x), expected)
    assert any("aten.convolution_backward" in str(entry) for entry in retrograd.explain_recompiles())


def test_nothing_is_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    """A library's op is no op that could not be compiled."""
    model, x = CASES["causal"]()
    retrograd.compile_backward(model, (x,), kernels="library")
    assert not [w for w in recwarn if issubclass(w.category, retrograd.EagerIslandWarning)]


@pytest.mark.short_cases("grouped")
@pytest.mark.parametrize("name", ["convolutions", "grouped"])
def test_a_file_holds_them_compiled(name: str, tmp_path: Path) -> None:
    model, x = CASES[name]()
    # One layer of two alike is as much to see.
    model = model[0] if isinstance(model, nn.Sequential) else model
    compiled = retrograd.compile_backward(model, (x,), kernels="library")
    expected = step(compiled, model, x)
    compiled.save(tmp_path / "model.rgb")
    loaded = retrograd.load(tmp_path / "model.rgb").bind(model)
    torch.testing.assert_close(step(loaded, model, x), expected)
    assert not islands(loaded)


def test_views_are_part_of_the_step() -> None:
    """The parts of a projection are no results of a compiled function: the library takes them out of it as they lie."""
    model, x = CASES["causal"]()
    compiled = retrograd.compile_backward(model, (x,), kernels="library")
    lines = compiled.mlir("imported").splitlines()
    # Those that give or take log-sum-exps.
    calls = [line for line in lines if "retrograd.island" in line and "[2,6,10]" in line]
    assert len(calls) == 4
    assert sum(line.count("[2,10,72]") + line.count("[20,72]") for line in calls) >= 4


def test_fallback_error_takes_them_too() -> None:
    model, x = CASES["causal"]()
    expected = step(model, model, x)
    compiled = retrograd.compile_backward(model, (x,), kernels="library", fallback="error")
    torch.testing.assert_close(step(compiled, model, x), expected)


@pytest.mark.long
def test_open_sizes() -> None:
    model, x = CASES["convolutions"]()
    sizes = ({0: torch.export.Dim("batch")},)
    compiled = retrograd.compile_backward(model, (x,), kernels="library", dynamic_shapes=sizes)
    for batch in (2, 5):
        other = torch.randn(batch, 3, 16, 16)
        torch.testing.assert_close(step(compiled, model, other), step(model, model, other))


@pytest.mark.long
def test_open_sizes_in_a_file(tmp_path: Path) -> None:
    # A projection and attention alone: of open sizes each kernel that is written out takes seconds.
    model, x = Projected(), torch.randn(2, 10, 8, requires_grad=True)
    sizes = ({0: torch.export.Dim("batch")},)
    compiled = retrograd.compile_backward(model, (x,), kernels="library", dynamic_shapes=sizes)
    compiled.save(tmp_path / "model.rgb")
    loaded = retrograd.load(tmp_path / "model.rgb").bind(model)
    for batch in (2, 4):
        other = torch.randn(batch, 10, 8, requires_grad=True)
        torch.testing.assert_close(step(loaded, model, other), step(model, model, other))


@pytest.mark.long
def test_bisect_runs_them_as_they_run() -> None:
    model, x = CASES["causal"]()
    compiled = retrograd.compile_backward(model, (x,), kernels="library", verify=True)
    torch.testing.assert_close(step(compiled, model, x), step(model, model, x))
    assert not compiled.bisect(x)


@pytest.mark.long
def test_a_checkpointed_block_is_computed_again() -> None:
    """A library's op gives the same again: what the user wants recomputed is."""
    block, x = CASES["causal"]()

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x.sin(), use_reentrant=False)  # type: ignore[no-any-return]

    model = Checkpointed()
    expected = step(model, model, x)
    compiled = retrograd.compile_backward(model, (x,), kernels="library", partition="default")
    torch.testing.assert_close(step(compiled, model, x), expected)
    assert compiled.mlir("scheduled").count("retrograd.island") == 0
    ran = [entry for entry in compiled.mlir("partitioned").splitlines() if "retrograd.island" in entry]
    # Six of attention and thirteen of products, the backward's own among them.
    assert len(ran) == 19


@pytest.mark.long
def test_channels_last() -> None:
    model, x = CASES["convolutions"]()
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    x = x.to(memory_format=torch.channels_last)
    expected = step(model, model, x)
    compiled = retrograd.compile_backward(model, (x,), kernels="library")
    torch.testing.assert_close(step(compiled, model, x), expected)


@pytest.mark.long
def test_a_complex_convolution_is_four_of_numbers() -> None:
    weight = torch.randn(2, 2, 3, dtype=torch.complex64)

    def convolve(x: Tensor) -> Tensor:
        return F.conv1d(x, weight).abs().sum()

    x = torch.randn(1, 2, 8, dtype=torch.complex64, requires_grad=True)
    convolve(x).backward()
    expected, x.grad = x.grad, None
    compiled = retrograd.compile_backward(convolve, (x,), kernels="library")
    compiled(x).backward()
    torch.testing.assert_close(x.grad, expected)
    assert all("complex" not in text for text in islands(compiled))


def test_buckets_of_positions_are_eagers(tmp_path: Path) -> None:
    """A logarithm, cut to a whole number, chooses rows of a table: PyTorch computes it, where islands are refused too,
    and a file has it compiled."""

    def weighted(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        buckets = 8 + (torch.log(positions.float() / 8) * (8 / 2.772588722239781)).to(torch.long)
        return (F.embedding(buckets.clamp(0, 15), table) * x).sum()

    positions = torch.arange(1, 200)
    arguments = (torch.randn(199, 4, requires_grad=True), positions, torch.randn(16, 4, requires_grad=True))
    step = retrograd.compile_backward(weighted, arguments, fallback="error", cache=False)
    assert "aten.log" in str(step.explain())
    leaves = (arguments[0], arguments[2])
    found, expected = (torch.autograd.grad(call(*arguments), leaves) for call in (step, weighted))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    step.save(tmp_path / "weighted.vmfb")
    loaded = retrograd.load(tmp_path / "weighted.vmfb")
    torch.testing.assert_close(loaded(*arguments), weighted(*arguments), rtol=1e-2, atol=1e-2)


class Router(nn.Module):
    """Rows to the sum of two experts' rows; the gate begins with zeros, so that all experts are liked as much."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 16, bias=False)
        nn.init.zeros_(self.gate.weight)
        self.experts = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        rows: Tensor = (self.experts[chosen] * weights.unsqueeze(-1)).sum(1)
        return (rows * x).sum()


def test_of_equal_values_eagers_are_chosen() -> None:
    model, x = Router(), torch.randn(12, 8)
    step = retrograd.compile_backward(model, (x,), fallback="error", cache=False)
    found, expected = (torch.autograd.grad(call(x), tuple(model.parameters())) for call in (step, model))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_long_running_sums_are_pytorchs(tmp_path: Path) -> None:
    """Written out, as those of short rows are, each element reads all before it; a file has them so. Running products
    are compiled."""

    def summed(short: Tensor, long: Tensor) -> Tensor:
        return sum(((100 * x).logcumsumexp(1) * x.cumprod(1)).square().mean() for x in (short, long))  # type: ignore[return-value]

    given = tuple(torch.rand(16, length).mul(2).sub(1).requires_grad_() for length in (8, 80))
    step = retrograd.compile_backward(summed, given, fallback="error", cache=False)
    # Those of the long rows: their sums, and two of the gradient.
    assert sum(text.count("aten.logcumsumexp") for text in islands(step)) == 3
    found, expected = (torch.autograd.grad(call(*given), given) for call in (step, summed))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    step.save(tmp_path / "summed.vmfb")
    torch.testing.assert_close(retrograd.load(tmp_path / "summed.vmfb")(*given), summed(*given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "views"])
def test_attention_of_an_eager_forward_gets_gradients_by_pytorchs_kernel(kind: str) -> None:
    """From fewer multiplications on than where its forward is compiled; parts of one projection among what it reads."""
    torch.manual_seed(0)
    packed = torch.randn(2, 128, 12, 32, requires_grad=True)
    mask = torch.randn(128, 128) if kind == "mask" else None
    before = len(retrograd.explain_recompiles())

    def step() -> torch.Tensor:
        parts = (packed[:, :, start : start + 4].transpose(1, 2) for start in (0, 4, 8))
        q, k, v = parts if kind == "views" else (part.contiguous() for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=kind == "causal")
        return torch.autograd.grad(y.transpose(1, 2).sin().sum(), packed)[0]

    expected = step()
    with retrograd.enable():
        for _ in range(3):
            torch.testing.assert_close(step(), expected, rtol=2e-5, atol=1e-6)
    (entry,) = retrograd.explain_recompiles()[before:]
    assert "PyTorch's attention is faster" in str(entry)
