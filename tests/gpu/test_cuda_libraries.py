# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Convolutions and attention as PyTorch's libraries compute them on CUDA: as near to float64 as eager, and no matrix of
scores in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models.case import Case
from models.precision import Precision, convert, mean_square
from steps import gradients, relative_error, require_device
from torch import Tensor, nn

import retrograd
from retrograd.frontend.libraries.attention import (
    attention,
    attention_backward,
    biased_attention,
    biased_attention_backward,
)

# Eager is off by its own rounding; ours may be off by so many times that.
SLACK = 3.0
# Of a gradient whose rounding is next to nothing.
FLOOR = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}


def setup_module() -> None:
    require_device()


class Attend(nn.Module):
    """Attention of [B, H, L, D] on keys and values [B, H / groups, S, D]."""

    def __init__(self, is_causal: bool, mask: Tensor | None = None, groups: int = 1) -> None:
        super().__init__()
        self.is_causal, self.mask, self.groups = is_causal, mask, groups

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = None if self.mask is None else self.mask if self.mask.dtype == torch.bool else self.mask.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.is_causal, enable_gqa=self.groups > 1)


def attention_case(dtype: torch.dtype, rows: int, columns: int, width: int, attend: Attend) -> Case:
    shapes = [(2, 4, rows, width), *[(2, 4 // attend.groups, columns, width)] * 2]
    args = tuple(torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes)
    return Case(attend, args, mean_square)


def assert_as_near_as_eager(case: Case, call: Any) -> None:
    """Gradients against float64: ours are as far off as eager's, but for a factor."""
    dtype = case.args[0].dtype
    found = {name: grad.clone() for name, grad in gradients(case, call).items()}
    eager = {name: grad.clone() for name, grad in gradients(case, case.model).items()}
    assert isinstance(case.model, nn.Module)
    case.model.double()
    wide = tuple(a.detach().double().requires_grad_(a.requires_grad) for a in case.args)
    precise = gradients(Case(case.model, wide, mean_square), case.model)
    for name, expected in precise.items():
        allowed = max(FLOOR[dtype], SLACK * relative_error(eager[name], expected))
        assert relative_error(found[name], expected) <= allowed, name


ATTENTIONS = {
    "causal": (128, 128, 64, True, 1),
    "odd rows": (77, 77, 64, True, 1),
    "causal of other keys": (64, 128, 32, True, 1),
    "wide heads": (96, 160, 128, False, 1),
    "a head of 5": (64, 64, 5, False, 1),
    "grouped": (128, 128, 64, True, 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name: str, dtype: torch.dtype) -> None:
    rows, columns, width, is_causal, groups = ATTENTIONS[name]
    case = attention_case(dtype, rows, columns, width, Attend(is_causal, groups=groups))
    compiled = retrograd.compile_backward(case.model, case.args, kernels="library", cache=False)
    assert len(compiled.explain().to_dict()["islands"]) == 2
    assert_as_near_as_eager(case, compiled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [64, 61])
def test_masked_attention(dtype: torch.dtype, columns: int) -> None:
    for mask in (torch.rand(2, 1, 48, columns, device="cuda") < 0.7, torch.randn(48, columns, device="cuda")):
        case = attention_case(dtype, 48, columns, 32, Attend(False, mask))
        compiled = retrograd.compile_backward(case.model, case.args, kernels="library", cache=False)
        assert_as_near_as_eager(case, compiled)


class Biased(nn.Module):
    """Attention of [2, 4, L, D] with a bias of its own, which has a gradient."""

    def __init__(self, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(shape, device="cuda"))
        self.scale = width**-0.5

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.bias.to(q.dtype), scale=self.scale)


BIASES = {
    "for each head": (1, 4, 196, 196),
    "for each batch, of odd rows": (2, 4, 151, 49),
    "for all": (128, 160),
    "of each column": (4, 1, 192),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [64, 12])
@pytest.mark.parametrize("name", BIASES)
def test_attention_with_a_bias_that_has_a_gradient(name: str, width: int, dtype: torch.dtype) -> None:
    shape = BIASES[name]
    rows, columns = (224, shape[-1]) if shape[-2] == 1 else shape[-2:]
    shapes = [(2, 4, rows, width), *[(2, 4, columns, width)] * 2]
    args = tuple(torch.randn(size, device="cuda", dtype=dtype, requires_grad=True) for size in shapes)
    case = Case(Biased(shape, width), args, mean_square)
    compiled = retrograd.compile_backward(case.model, case.args, kernels="library", cache=False)
    # Eager multiplies heads of other widths in float32.
    assert len(compiled.explain().to_dict().get("islands", ())) == (2 if width == 64 else 0)
    assert_as_near_as_eager(case, compiled)


def test_attention_with_a_bias_in_a_file(tmp_path: Path) -> None:
    args = tuple(torch.randn(2, 4, 32, 16, device="cuda", requires_grad=True) for _ in range(3))
    model = Biased((1, 4, 32, 32), 16)
    case = Case(model, args, mean_square)
    compiled = retrograd.compile_backward(case.model, case.args, kernels="library", cache=False)
    compiled.save(tmp_path / "biased.rgd")
    assert_as_near_as_eager(case, retrograd.load(tmp_path / "biased.rgd", model))


@pytest.mark.parametrize("columns", [64, 61])
def test_a_bias_may_lie_with_its_heads_innermost(columns: int) -> None:
    q, grad = (torch.randn(2, 4, 48, 32, device="cuda") for _ in range(2))
    k, v = (torch.randn(2, 4, columns, 32, device="cuda") for _ in range(2))
    bias = torch.randn(48, columns, 4, device="cuda").permute(2, 0, 1).unsqueeze(0)
    found = []
    for laid in (bias, bias.contiguous()):
        out, sums = biased_attention(q, k, v, laid, False, None)
        found.append((out, *biased_attention_backward(grad, q, k, v, laid, out, sums, False, None)))
    torch.testing.assert_close(*found)


def test_an_output_may_lie_otherwise_than_kernels_give_it() -> None:
    q, k, v, grad = (torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    mask = torch.randn(1, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
    out, sums = biased_attention(q, k, v, mask, False, None)
    found = [
        biased_attention_backward(grad, q, k, v, mask, laid, sums, False, None) for laid in (out, out.contiguous())
    ]
    torch.testing.assert_close(*found)
    out, sums = attention(q, k, v, attn_mask=mask)
    plain = [
        attention_backward(grad, q, k, v, laid, sums, 0.0, False, attn_mask=mask)
        for laid in (out, out.contiguous(), out.transpose(1, 2).contiguous().transpose(1, 2))
    ]
    torch.testing.assert_close(plain[0], plain[1])
    torch.testing.assert_close(plain[0], plain[2])


def test_under_autocast_attention_is_in_its_type() -> None:
    """Of queries that a norm has made float32, as eager casts them."""
    q, k, v = (torch.randn(2, 4, 64, 32, device="cuda", requires_grad=True) for _ in range(3))

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return F.scaled_dot_product_attention(F.layer_norm(q, (32,)), k, v)

    compiled = retrograd.compile_backward(model, (q, k, v), kernels="library", cache=False)
    assert compiled(q, k, v).dtype is model(q, k, v).dtype is torch.bfloat16


def test_attention_keeps_no_scores() -> None:
    """At 4096 rows scores alone would take 512 MiB in bfloat16; ours take what eager takes."""
    q, k, v = (torch.randn(1, 16, 4096, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    case = Case(Attend(is_causal=True), (q, k, v), mean_square)
    compiled = retrograd.compile_backward(case.model, case.args, cache=False)
    peaks = []
    for call in (case.model, compiled):
        for _ in range(2):
            gradients(case, call)
        for leaf in case.leaves().values():
            leaf.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gradients(case, call)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 1.1 * peaks[0]


class Block(nn.Module):
    """A residual block [N, 32, H, W], with a strided, a grouped and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(64)
        self.grouped = nn.Conv2d(64, 64, 3, padding=1, groups=8)
        self.up = nn.ConvTranspose2d(64, 32, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.norm(self.down(x)))
        return x + self.up(F.gelu(self.grouped(y)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_convolutions(dtype: torch.dtype, layout: torch.memory_format) -> None:
    model = Block().to("cuda", dtype)
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=layout)
    x = torch.randn(4, 32, 24, 24, device="cuda", dtype=dtype).to(memory_format=layout).requires_grad_()
    case = Case(model, (x,), mean_square)
    compiled = retrograd.compile_backward(model, case.args, kernels="library", cache=False)
    assert len(compiled.explain().to_dict()["islands"]) == 6
    assert not [line for line in compiled.explain().to_dict()["kernels"] if "waits for the device" in line]
    assert_as_near_as_eager(case, compiled)


class Images(nn.Module):
    """Images [N, 3, H, W] to classes: a first layer of three colors, a pool, a depthwise and a grouped convolution, and
    two branches that are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(32)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.grouped = nn.Conv2d(32, 64, 3, stride=2, padding=1, groups=4, bias=False)
        self.narrow = nn.Conv2d(32, 64, 1, stride=2, bias=False)
        self.last = nn.BatchNorm2d(128)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        z = y + F.gelu(self.depthwise(y))
        z = F.relu(self.last(torch.cat([self.grouped(z), self.narrow(y)], 1)))
        return self.head(z.mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("precision", ["f32", "bf16", "autocast"])
def test_images_with_channels_last(precision: Precision) -> None:
    case = convert(Case(Images(), (torch.randn(16, 3, 65, 64),), mean_square), "cuda", precision)
    compiled = retrograd.compile_backward(case.model, case.args, kernels=["columns", "library"], cache=False)
    found = gradients(case, compiled)
    assert all(grad.is_contiguous() for grad in found.values())
    taken = [line for line in compiled.mlir("partitioned").splitlines() if "retrograd.max_pool_last" in line]
    assert len(taken) == 2
    assert_as_near_as_eager(case, compiled)


def test_small_ones_stay_compiled() -> None:
    model = nn.Conv2d(3, 4, 3).cuda()
    compiled = retrograd.compile_backward(model, (torch.randn(1, 3, 8, 8, device="cuda"),), cache=False)
    assert "islands" not in compiled.explain().to_dict()


def test_a_file_of_them(tmp_path: Path) -> None:
    model = Block().cuda()
    x = torch.randn(2, 32, 16, 16, device="cuda")
    compiled = retrograd.compile_backward(model, (x,), kernels="library", cache=False)
    case = Case(model, (x,), mean_square)
    expected = {name: grad.clone() for name, grad in gradients(case, compiled).items()}
    compiled.save(tmp_path / "block.rgb")
    found = gradients(case, retrograd.load(tmp_path / "block.rgb").bind(model))
    assert all(relative_error(found[name], grad) < 1e-4 for name, grad in expected.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_open_sizes(dtype: torch.dtype) -> None:
    """No kernel of our own takes them."""
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to("cuda", dtype)
    x = torch.randn(4, 96, 256, device="cuda", dtype=dtype, requires_grad=True)
    sizes = ({1: torch.export.Dim("length", min=8, max=512)},)
    compiled = retrograd.compile_backward(model, (x,), dynamic_shapes=sizes, cache=False)
    assert compiled.explain().to_dict()["islands"]
    assert_as_near_as_eager(Case(model, (x,), mean_square), compiled)
    model.to(dtype)
    other = torch.randn(4, 41, 256, device="cuda", dtype=dtype, requires_grad=True)
    assert_as_near_as_eager(Case(model, (other,), mean_square), compiled)
