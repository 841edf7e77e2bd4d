# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Norms and softmaxes along rows, forward and backward, on the device: near to float64, twice the same bits."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from steps import require_device
from test_cuda_kernels import TOLERANCES, check, compile_with, random
from torch import Tensor


def setup_module() -> None:
    require_device()


def normalized(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x + residual, weight.shape, weight, bias) * 2 + residual


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(4096, 768), (300, 1000), (5003, 65), (70, 4099), (41, 8192)])
def test_layer_norms_with_what_is_around_them(rows: int, columns: int, dtype: torch.dtype) -> None:
    sizes = (rows, columns), (rows, columns), (columns,), (columns,)
    check(normalized, *(random(*size, dtype=dtype) for size in sizes), kernels="norms")


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_sequences_of_rows_with_places(dtype: torch.dtype) -> None:
    """What is read by the place in a sequence and by the sequence, whose gradients are sums over the others."""

    def placed(x: Tensor, place: Tensor, sequence: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x + place, weight.shape, weight, 1e-5).softmax(-1) * sequence

    sizes = (8, 33, 1040), (33, 1040), (8, 1, 1040), (1040,)
    check(placed, *(random(*size, dtype=dtype) for size in sizes), kernels="norms")


def test_slices_that_begin_anywhere() -> None:
    def cut(x: Tensor, weight: Tensor) -> Tensor:
        return F.layer_norm(x[:, 3:771], (768,), weight[1:]).softmax(1)

    for dtype in TOLERANCES:
        check(cut, random(512, 1030, dtype=dtype), random(769, dtype=dtype), kernels="norms")


@pytest.mark.parametrize(
    "function", [lambda x: x.softmax(1), lambda x: F.layer_norm(x, (600,)), lambda x: x.log_softmax(1)]
)
def test_infinities_and_what_is_no_number(function: Callable[[Tensor], Tensor]) -> None:
    x = random(512, 600)
    with torch.no_grad():
        x[1, 7], x[2, 599], x[3, 0], x[4] = float("inf"), float("nan"), -float("inf"), -float("inf")
    found, eager = compile_with("norms", function, (x,))(x).detach(), function(x).detach()
    assert torch.equal(found.isnan(), eager.isnan()) and torch.equal(found.isinf(), eager.isinf())
    assert torch.allclose(found[5:], eager[5:], rtol=1e-5, atol=1e-6)
