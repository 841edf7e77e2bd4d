# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The decomposition table, and its entries for norms, products and whole models, against eager."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from decomposition_checks import assert_close, check, traced
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

from retrograd.frontend.decompositions.table import (
    DECOMPOSITIONS,
    decomposition_table,
)

aten = torch.ops.aten


@pytest.mark.parametrize("order", [0, 1.2, 2, math.inf, -math.inf])
def test_norm_of_a_number(order: float) -> None:
    for number in (-2.0, 0.0):
        check(aten.linalg_vector_norm.default, torch.tensor(number), order, [0], True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(("dim", "correction"), [(None, None), ([1], 0), ([0, -1], 1), ([2], 2)])
def test_variance(dtype: torch.dtype, keepdim: bool, dim: list[int] | None, correction: int | None) -> None:
    x = (torch.randn(4, 5, 6) * 3 + 2).to(dtype)
    check(aten.var_mean.correction, x, dim, correction=correction, keepdim=keepdim)
    check(aten.var.correction, x, dim, correction=correction, keepdim=keepdim)


@pytest.mark.parametrize("correction", [1, 2])
def test_variance_without_freedom(correction: int) -> None:
    check(aten.var.correction, torch.randn(4, 1), [1], correction=correction)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(dtype: torch.dtype, approximate: str) -> None:
    x = torch.linspace(-6, 6, 49).to(dtype)
    check(aten.gelu.default, x, approximate=approximate)
    check(aten.gelu_backward.default, torch.randn(49).to(dtype), x, approximate=approximate)


def test_batch_norm_variants() -> None:
    x, weight, bias = torch.randn(4, 3, 5, 5), torch.randn(3), torch.randn(3)
    mean, variance = torch.randn(3), torch.rand(3) + 0.5
    ours = traced(aten._batch_norm_with_update_functional.default, x, weight, bias, mean, variance, 0.1, 1e-5)
    theirs = aten._native_batch_norm_legit_functional.default(x, weight, bias, mean, variance, True, 0.1, 1e-5)
    assert_close([ours[0], *ours[4:]], [theirs[0], *theirs[3:]])
    ours = traced(aten._batch_norm_no_update.default, x, weight, bias, mean, variance, 0.1, 1e-5)
    assert_close(ours[0], F.batch_norm(x, mean, variance, weight, bias))
    rest = (None, None, theirs[1], theirs[2], True, 1e-5, [True, True, True])
    grad = torch.randn_like(x)
    ours = traced(aten.batch_norm_backward.default, grad, x, weight, *rest, torch.empty(0, dtype=torch.uint8))
    assert_close(ours, aten.native_batch_norm_backward.default(grad, x, weight, *rest))


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("dim", [0, 1])
def test_weight_norm(dim: int) -> None:
    v, grad = torch.randn(4, 3), torch.randn(4, 3)
    g, norms = torch.randn(v.sum(1 - dim, keepdim=True).shape), v.norm(dim=1 - dim, keepdim=True)
    check(aten._weight_norm_interface_backward.default, grad, v, g, norms, dim)


class Pieces(nn.Module):
    """Slices, selects, pads, indexing and a variance: one small graph with all their gradients."""

    def forward(self, x: Tensor) -> Tensor:
        picked = x.index_put((torch.tensor([0, 2]),), x[1:3]) + x[:, torch.tensor([1, 0, 1, 2, 3, 4])]
        return F.pad(picked[:, 1::2], (-1, 2)).std(0) + x[2].softmax(-1)[:4].var()


class Loss(nn.Module):
    target: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=1)
        self.register_buffer("target", torch.tensor([0, 3, -100, 5]))

    def forward(self, x: Tensor) -> Tensor:
        words = self.table(torch.tensor([1, 2, 2, 10]))
        return F.cross_entropy(x * words, self.target, label_smoothing=0.1) + F.nll_loss(words, self.target)


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.GroupNorm(2, 4), nn.Conv2d(4, 6, 5, padding=2), nn.GELU("tanh"),
        nn.AvgPool2d(2, ceil_mode=True), nn.ConvTranspose2d(6, 2, 3, stride=2), nn.AdaptiveAvgPool2d(3), nn.Flatten(),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "conv_net": (conv_net, [(2, 3, 19, 18)]),
    "lines": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.AvgPool1d(2), nn.InstanceNorm1d(4, affine=True)),
        [(2, 3, 12)],
    ),
    "volumes": (lambda: nn.Sequential(nn.Conv3d(2, 3, 3), nn.MaxPool3d(2), nn.AdaptiveAvgPool3d(2)), [(1, 2, 8, 9, 8)]),
    "attention": (Attention, [(2, 3, 6, 8)] * 3),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), [(2, 5, 8)]),
    "norms": (lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.RMSNorm(8), nn.Softmax(-1)), [(4, 6)]),
    "lstm": (lambda: Recurrent(4, 5, num_layers=2, batch_first=True), [(2, 6, 4)]),
    "pieces": (Pieces, [(4, 6)]),
    "loss": (Loss, [(4, 6)]),
}


@pytest.mark.parametrize("name", MODELS)
def test_joint_graph(name: str) -> None:
    torch.manual_seed(0)
    build, shapes = MODELS[name]
    model, inputs = build(), tuple(torch.randn(shape).requires_grad_() for shape in shapes)
    with contextlib.ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, model, inputs, decompositions=decomposition_table())
        graph = joint.graph_module
    backward = {
        node.target for node in graph.graph.nodes if str(node.target).endswith(("_backward.default", "_legit.default"))
    }
    assert not backward
    state = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    parameters = dict(model.named_parameters())
    tangent = torch.randn_like(model(*inputs))
    for tensor, saved in zip((*model.parameters(), *model.buffers()), state, strict=True):
        tensor.data.copy_(saved)
    expected = model(*inputs)
    gradients = torch.autograd.grad(expected, (*parameters.values(), *inputs), tangent)
    forward, found = graph([*state, *(t.detach() for t in inputs)], [tangent])
    found = [gradient for gradient in found if gradient is not None]
    assert_close(forward[-1], expected.detach())
    # A bias before a norm has no gradient but rounding errors.
    assert_close(found, gradients, least_scale=1.0)


def test_table_is_data_with_reasons() -> None:
    table = decomposition_table()
    assert all(table[entry.op] is entry.function for entry in DECOMPOSITIONS)
    assert len({entry.op for entry in DECOMPOSITIONS}) == len(DECOMPOSITIONS)
    assert all(len(entry.reason.split()) >= 4 for entry in DECOMPOSITIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(5, 7, 1), (1, 7, 5), (5, 1, 4), (1, 1, 1), (1, 6, 1)])
def test_thin_products(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    check(aten.mm.default, torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype))


def test_wide_products_are_kept() -> None:
    check(aten.mm.default, torch.randn(2, 3), torch.randn(3, 2), gone=False)
    check(aten.mm.default, torch.arange(3).view(1, 3), torch.arange(3).view(3, 1), gone=False)
