# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The CPU's flash attention, and its backward, on tensors of any device: what an island runs in the place of the op.

On CUDA they are computed by the kernels that PyTorch itself would choose there (cuDNN's, flash or memory-efficient
ones), which keep no matrix of scores. What none of them takes is computed by its formula.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from retrograd.frontend.decompositions.attention import (
    all_heads,
    flash_attention,
    flash_attention_backward,
    laid_out_like,
    score_scale,
    summed_heads,
    swapped_layout,
)
from retrograd.frontend.layers import biased_attention as biased_layers

aten = torch.ops.aten
# Rows of a mask and of log-sum-exps are taken in steps of so many elements.
_MASK_STEP, _ROW_STEP = 16, 32
_HEAD_STEP = 8


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, L, D]`` and log-sum-exp ``[B, H, L]`` (f32 for half types), as
    ``aten._scaled_dot_product_flash_attention_for_cpu``. ``key`` and ``value`` are ``[B, H / repeats, S, D]``."""
    if not query.is_cuda:
        op = aten._scaled_dot_product_flash_attention_for_cpu.default
        return op(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    match _choose(query, key, value, attn_mask, is_causal, scale):
        case SDPBackend.CUDNN_ATTENTION:
            # By its binding, which takes half the time of the op's.
            attend = torch._scaled_dot_product_cudnn_attention
            output, lse, *_ = attend(query, key, value, attn_mask, True, 0.0, is_causal, scale=scale)
            return output, lse.squeeze(-1)
        case SDPBackend.FLASH_ATTENTION:
            op = aten._scaled_dot_product_flash_attention.default
            wide = [_widened(t) for t in (query, key, value)]
            output, lse, *_ = op(*wide, 0.0, is_causal, scale=score_scale(query, scale))
            return output[..., : value.shape[-1]], lse
        case SDPBackend.EFFICIENT_ATTENTION:
            return _attend_efficiently(query, key, value, attn_mask, is_causal, scale)
    return flash_attention(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, as ``aten._scaled_dot_product_flash_attention_for_cpu_backward``."""
    if not query.is_cuda:
        op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        how = (query, key, value, out, logsumexp, dropout_p, is_causal)
        return op(grad, *how, attn_mask=attn_mask, scale=scale)
    # Of no dropout the state of the random numbers is not looked at.
    state = torch.empty(2, dtype=torch.uint64, device=query.device)
    lengths = (None, None, query.shape[2], key.shape[2])
    found: Sequence[Tensor]
    match _choose(query, key, value, attn_mask, is_causal, scale):
        case SDPBackend.CUDNN_ATTENTION:
            op = aten._scaled_dot_product_cudnn_attention_backward.default
            lse, masked = logsumexp.unsqueeze(-1), (state[:1], state[1:], attn_mask)
            # A kernel is kept by how its inputs lie, and reads an output as that of its first call lay.
            laid = laid_out_like(out, query)
            found = op(grad, query, key, value, laid, lse, *masked, *lengths, 0.0, is_causal, scale=scale)
        case SDPBackend.FLASH_ATTENTION:
            op = aten._scaled_dot_product_flash_attention_backward.default
            wide = [_widened(t) for t in (grad, query, key, value, out)]
            drawn = (*lengths, 0.0, is_causal, state, state)
            found = [g[..., : query.shape[-1]] for g in op(*wide, logsumexp, *drawn, scale=score_scale(query, scale))]
        case SDPBackend.EFFICIENT_ATTENTION:
            found = _differentiate_efficiently(
                grad, query, key, value, attn_mask, out, logsumexp, is_causal, scale, of_mask=False
            )
        case _:
            found = flash_attention_backward(
                grad, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )
    return found[0], found[1], found[2]


def biased_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """:func:`frontend.layers.biased_attention.biased_attention` by PyTorch's memory-efficient kernels, on CUDA."""
    if not biased_layers.has_kernels(query):
        return biased_layers.biased_attention(query, key, value, bias, causal, scale)
    return _attend_efficiently(query, key, value, bias, causal, scale)


def biased_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`frontend.layers.biased_attention.biased_attention_backward` by the same kernels."""
    if not biased_layers.has_kernels(query):
        given = (grad, query, key, value, bias, out, logsumexp, causal, scale)
        return biased_layers.biased_attention_backward(*given)
    dq, dk, dv, of_bias = _differentiate_efficiently(
        grad, query, key, value, bias, out, logsumexp, causal, scale, of_mask=True
    )
    return dq, dk, dv, of_bias.sum_to_size(bias.shape).contiguous()


def stacked(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors as one, as ``torch.stack`` gives it; the memory that they lie in, where that is the same: some kernels
    write the gradients of queries, keys and values side by side."""
    first, *others = tensors
    step = int(others[0].storage_offset() - first.storage_offset()) if others else 0
    memory = first.untyped_storage().data_ptr()
    if step > 0 and all(
        t.untyped_storage().data_ptr() == memory
        and t.storage_offset() == first.storage_offset() + number * step
        and (t.shape, t.stride(), t.dtype) == (first.shape, first.stride(), first.dtype)
        for number, t in enumerate(tensors)
    ):
        shape, stride = ([*map(int, numbers)] for numbers in (first.shape, first.stride()))
        shape.insert(axis, len(tensors))
        stride.insert(axis, step)
        whole = first.as_strided(shape, stride)
        if whole.is_contiguous():
            return whole
    return torch.stack([*tensors], axis)


def _attend_efficiently(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by memory-efficient kernels."""
    repeats = query.shape[1] // key.shape[1]
    keys, values = all_heads(key, repeats), all_heads(value, repeats)
    output, lse, *_ = aten._scaled_dot_product_efficient_attention.default(
        query, keys, values, _aligned(mask, query, key), True, 0.0, is_causal, scale=scale
    )
    return output, lse[..., : query.shape[2]]


def _differentiate_efficiently(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None,
    *,
    of_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and, for all heads, of the mask if that is wanted, by the same kernels."""
    repeats = query.shape[1] // key.shape[1]
    keys, values = all_heads(key, repeats), all_heads(value, repeats)
    lse = F.pad(logsumexp, (0, -query.shape[2] % _ROW_STEP))
    # Of no dropout the state of the random numbers is not looked at. An output is read as the kernels lay it out,
    # whatever its strides are.
    unused = torch.empty((), dtype=torch.int64, device=query.device)
    given = (grad, query, keys, values, _aligned(mask, query, key), swapped_layout(out), lse, unused, unused, 0.0)
    op = aten._scaled_dot_product_efficient_attention_backward.default
    dq, dk, dv, of_added = op(*given, [True, True, True, of_mask], is_causal, scale=scale)
    return dq, summed_heads(dk, repeats), summed_heads(dv, repeats), of_added


def _choose(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> SDPBackend:
    """The kernels that eager would take of these tensors; the same for both halves."""
    grouped = query.shape[1] != key.shape[1]
    choice = torch._fused_sdp_choice(query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=grouped)
    return SDPBackend(choice)


def _widened(tensor: Tensor) -> Tensor:
    """Heads as wide as flash kernels take them, with zeros behind; the scale of scores is that of the narrow ones."""
    return F.pad(tensor, (0, -tensor.shape[-1] % _HEAD_STEP)) if tensor.shape[-1] % _HEAD_STEP else tensor


def _aligned(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask for all heads, its rows in memory a multiple of 16 elements apart, their elements next to each other."""
    if mask is None:
        return None
    length = key.shape[2]
    # Where there is nothing to pad, a mask with axes in another order stays in it.
    padded = F.pad(mask.expand(*mask.shape[:-1], length), (0, -length % _MASK_STEP)).contiguous()[..., :length]
    return padded.expand(query.shape[0], query.shape[1], query.shape[2], length)
