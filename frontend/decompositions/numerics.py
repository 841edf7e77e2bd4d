# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Variance, thin products, activations and batch norm, where torch-mlir has other digits or no form at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition, from_pytorch
from retrograd.frontend.decompositions.sums import computed, sum_of_channels

aten = torch.ops.aten


def var_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    """``aten.var_mean.correction``: variance, then mean, in two passes in ``x``'s precision (f32 for half types)."""
    if not x.dtype.is_floating_point:
        return NotImplemented
    axes = [axis % x.dim() for axis in dim] if dim else list(range(x.dim()))
    values = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    count: Any = 1
    for axis in axes:
        count = count * x.shape[axis]
    mean = values.sum(axes, keepdim=True) / count
    centred = values - mean
    freedom = count - (1 if correction is None else correction)
    if isinstance(freedom, int | float):
        freedom = max(freedom, 0)
    total = (centred * centred).sum(axes, keepdim=True)
    variance = total * (1.0 / freedom) if freedom != 0 else total / torch.zeros_like(total)
    if not keepdim:
        variance, mean = _drop(variance, axes), _drop(mean, axes)
    return variance.to(x.dtype), mean.to(x.dtype)


def var(x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    """``aten.var.correction``: see ``var_mean``."""
    both = var_mean(x, dim, correction=correction, keepdim=keepdim)
    return both if both is NotImplemented else both[0]


def matrix_product(x: Tensor, y: Tensor) -> Any:
    """``aten.mm`` of shapes ``[m, k]`` and ``[k, n]`` where one of the three sizes is 1: products and a sum;
    zeros where one is 0."""
    (m, k), n = x.shape, y.shape[1]
    if any(statically_known_true(size == 0) for size in (m, k, n)):
        return torch.zeros(m, n, dtype=x.dtype, device=x.device)
    # A size that differs from call to call is 1 only now and then.
    ones = [statically_known_true(size == 1) for size in (m, k, n)]
    if not x.dtype.is_floating_point or not any(ones):
        return NotImplemented
    half = x.dtype in (torch.bfloat16, torch.float16)
    left, right = (x.float(), y.float()) if half else (x, y)
    if ones[1]:
        product = left * right
    elif ones[2]:
        product = (left * right.t()).sum(1, keepdim=True)
    else:
        product = (left.t() * right).sum(0, keepdim=True)
    return product.to(x.dtype)


def log1p(x: Tensor) -> Any:
    """``aten.log1p`` in f64, to the last digits also where ``x`` is small.

    Source: Goldberg, "What every computer scientist should know about floating-point arithmetic" (1991), theorem 4.
    """
    if x.dtype is not torch.float64:
        return NotImplemented
    above = 1 + x
    rounded = above - 1
    # Where 1 + x rounds to 1, and where it is infinite, the quotient has no value.
    exact = (rounded == 0) | torch.isinf(above)
    quotient = x / torch.where(exact, 1.0, rounded)
    return torch.where(rounded == 0, x, torch.log(above) * torch.where(exact, 1.0, quotient))


def batch_of_products(x: Tensor, y: Tensor) -> Any:
    """``aten.bmm`` of shapes ``[b, m, k]`` and ``[b, k, n]`` where a size is 0."""
    (b, m, k), n = x.shape, y.shape[2]
    return torch.zeros(b, m, n, dtype=x.dtype, device=x.device) if 0 in (b, m, k, n) else NotImplemented


def trilinear(
    x: Tensor,
    y: Tensor,
    z: Tensor,
    new_x: Sequence[int],
    new_y: Sequence[int],
    new_z: Sequence[int],
    summed: Sequence[int],
    unroll_dim: int = 1,
) -> Any:
    """``aten._trilinear`` where an operand has no elements: each operand with new axes of size 1, their product added
    up along ``summed``."""
    if not any(statically_known_true(size == 0) for t in (x, y, z) for size in t.shape):
        return NotImplemented
    for axis in sorted(new_x):
        x = x.unsqueeze(axis)
    for axis in sorted(new_y):
        y = y.unsqueeze(axis)
    for axis in sorted(new_z):
        z = z.unsqueeze(axis)
    product = x * y * z
    return product.sum(list(summed)) if summed else product


def weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """``aten._weight_norm_interface_backward``: gradients of ``v`` and ``g`` of ``w = g * v / norms`` along ``dim``.

    Source: PyTorch's ``_weight_norm_differentiable_backward``.
    """
    axes = [axis for axis in range(v.dim()) if axis != dim % v.dim()]
    along = (grad * v).sum(axes, keepdim=True)
    return (g / norms) * (grad - v * (along / (norms * norms))), along / norms


def native_batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Any:
    """``aten.native_batch_norm_backward``: the gradients of input, weight and bias.

    With ``g`` the gradient, ``c = x - mean`` and means over all but the channels, training gives
    ``(g - c * invstd^2 * mean(g * c) - mean(g)) * invstd * weight``. On a GPU it is PyTorch's own form: with this one a
    ResNet-50 under autocast took an H100 33.5 ms of kernels for 27.0.
    """
    if grad.device.type != "cpu":
        return from_pytorch(aten.native_batch_norm_backward.default)(
            grad, x, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask
        )
    mean, invstd = save_mean, save_invstd
    if not train and running_mean is not None and running_var is not None:
        mean, invstd = computed(running_mean), torch.rsqrt(computed(running_var) + eps)
    if mean is None or invstd is None or x.dim() < 2:
        return NotImplemented
    each = [1, -1, *[1] * (x.dim() - 2)]
    g = computed(grad)
    centred = computed(x) - computed(mean).reshape(each)
    total, along = sum_of_channels(g), sum_of_channels(g * centred)
    scale = invstd if weight is None else invstd * computed(weight)
    if train:
        norm = 1.0 / (x.numel() / x.shape[1])
        slope = centred * (along * norm * (invstd * invstd)).reshape(each)
        grad_x = ((g - slope) - (total * norm).reshape(each)) * scale.reshape(each)
    else:
        grad_x = g * scale.reshape(each)
    kind = x.dtype if weight is None else weight.dtype
    grad_weight = (along * invstd).to(kind) if output_mask[1] else None
    return grad_x.to(x.dtype), grad_weight, total.to(kind) if output_mask[2] else None


def smooth_l1_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, beta: float) -> Tensor:
    """``aten.smooth_l1_loss_backward``: NaN of what is NaN, since it is not beyond ``beta``."""
    kind = x.dtype
    grad, x, target = map(computed, (grad, x, target))
    difference = x - target
    share = grad / difference.numel() if reduction == 1 else grad
    slope = torch.where(difference.abs() >= beta, torch.sign(difference), difference / beta)
    return (slope * share).to(kind)


def _drop(x: Tensor, axes: Sequence[int]) -> Tensor:
    return aten.squeeze.dims(x, axes)


_WIDE = "torch-mlir adds up a variance in f64, which does not compile for CUDA"
_BATCH_NORM = "a form of batch norm that training graphs hold, and that torch-mlir does not lower"

ENTRIES = (
    Decomposition(aten.var_mean.correction, var_mean, _WIDE),
    Decomposition(aten.var.correction, var, _WIDE),
    Decomposition(
        aten.mm.default,
        matrix_product,
        "data tiling packs the whole matrix for a product with a vector, which takes longer than the product; "
        "iree-compile divides by zero on an empty one",
    ),
    Decomposition(aten.log1p.default, log1p, "IREE's f64 code rounds 1 + x first: ten digits are lost for a small x"),
    Decomposition(aten.bmm.default, batch_of_products, "IREE's compiler divides by a size of zero"),
    Decomposition(
        aten._trilinear.default,
        trilinear,
        "torch-mlir takes a size of 0 for 1 in the product, and checks at run time that the shapes go together",
    ),
    Decomposition(
        aten.smooth_l1_loss_backward.default,
        smooth_l1_loss_backward,
        "PyTorch's form takes NaN for beyond beta, where it has no sign: a gradient of zero",
    ),
    Decomposition(aten._weight_norm_interface_backward.default, weight_norm_backward, NO_LOWERING),
    Decomposition(
        aten.gelu.default,
        from_pytorch(aten.gelu.default),
        "torch-mlir's constant of the tanh form is off in the fifth digit",
    ),
    Decomposition(
        aten.native_batch_norm_backward.default,
        native_batch_norm_backward,
        "sums of a thousand terms one after the other are a hundred times further from float64 than eager's",
    ),
    *(
        Decomposition(op, from_pytorch(op), _BATCH_NORM)
        for op in (
            aten.batch_norm_backward.default,
            aten._batch_norm_with_update_functional.default,
            aten._batch_norm_no_update.default,
        )
    ),
)
