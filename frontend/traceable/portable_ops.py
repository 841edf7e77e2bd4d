# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tracing as if for any machine: layers as ops of their own mathematics, whatever libraries this one has."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from retrograd.frontend.autograd.engine.family_lock import COMPILING, SETTINGS
from retrograd.frontend.layers.biased_attention import BIASED_ATTENTION
from retrograd.frontend.layers.dropped_attention import ATTENTION
from retrograd.frontend.layers.random_ops import DRAW_SEED
from retrograd.frontend.layers.recurrent import PortableCells, dropout_between_layers
from retrograd.frontend.libraries.attention_calls import describe, take_attention
from retrograd.frontend.libraries.ops import computes
from retrograd.frontend.python.value_questions import AnsweredQuestions
from retrograd.frontend.traceable.content_free import OWN_LOSSES, TraceableFunctions
from retrograd.frontend.traceable.flexible_attention import attend_flexibly, is_flexible
from retrograd.frontend.traceable.overlapping_writes import OverlappingWrites
from retrograd.frontend.traceable.replaced_kernels import replaced_kernels
from retrograd.frontend.traceable.resized_images import own_resizing_gradients


@contextlib.contextmanager
def portable_ops() -> Iterator[None]:
    """Trace layers as ops of their own mathematics, not as calls of a CPU library (oneDNN's LSTM, NNPACK's convolution
    of small batches) or of cuDNN. Tangents are tensors of their own memory. Constants that are made on a device
    (``torch.tensor(0.5, device="cuda")``) are what they are: copied there, they would be fake tensors, without values.

    A tangent traced with the strides of its output is brought to these at run time. Where elements of the output are
    one in memory, as after ``unfold``, that would overwrite some elements of the tangent with others.
    """
    with (
        # In this order: a backward inside of a trace takes the first, in a scope of any thread.
        COMPILING,
        SETTINGS,
        _without_libraries(),
        PortableAttention(),
        PortableCells(),
        AnsweredQuestions(),
        TraceableFunctions(),
        OverlappingWrites(),
        dropout_between_layers(),
        plain_checks(),
        own_resizing_gradients(),
        replaced_kernels(OWN_LOSSES),
        torch._functorch.config.patch(guess_tangent_strides_as_outputs=False),
    ):
        yield


@contextlib.contextmanager
def _without_libraries() -> Iterator[None]:
    # torch.backends.mkldnn.flags() would set the TF32 mode as well, which warns.
    libraries = (torch._C._set_mkldnn_enabled, torch._C._set_cudnn_enabled, torch._C._set_nnpack_enabled)
    before = (torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled(), torch._C._get_nnpack_enabled())
    lifts_cpu_only = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    for enable in libraries:
        enable(False)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts_cpu_only)
        for enable, enabled in zip(libraries, before, strict=True):
            enable(enabled)


# -- Attention --------------------------------------------------------------------------------------------------------

# Attention on CUDA tensors, traced as on the CPU: of a call, the log-sum-exp of each row is saved and no matrix of
# scores, whatever kernel PyTorch would choose on the card at hand.


class PortableAttention(TorchFunctionMode):
    """While it is active, ``scaled_dot_product_attention`` of CUDA tensors is the op that is decomposed for the CPU, or
    PyTorch's own mathematics where the CPU would take these (with dropout, for one)."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        query = args[0] if args else (kwargs or {}).get("query")
        if is_flexible(func):
            return attend_flexibly(args, kwargs or {})
        if func is F.multi_head_attention_forward:
            return func(*args, **_with_mask_beside(query, **(kwargs or {})))
        if func is not F.scaled_dot_product_attention or not isinstance(query, Tensor):
            return func(*args, **(kwargs or {}))
        args, kwargs = _cast_as_autocast((tuple(args), kwargs), query.device.type)
        output = _attend_dropped(*args, **(kwargs or {}))
        if output is None and query.is_cuda:
            output = _attend(*args, **(kwargs or {}))
            if output is None:
                with sdpa_kernel(SDPBackend.MATH):
                    return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if output is None else output


def _with_mask_beside(query: Any, attn_mask: Tensor | None = None, **kwargs: Any) -> dict[str, Any]:
    """Arguments of ``F.multi_head_attention_forward`` with the mask on the device of the query. PyTorch's layers look
    whether a mask is causal, and leave such a one out, wherever it is; a trace applies it."""
    if isinstance(query, Tensor) and attn_mask is not None and attn_mask.device != query.device:
        attn_mask = attn_mask.to(query.device)
    return {**kwargs, "attn_mask": attn_mask}


def _cast_as_autocast(given: Any, device: str) -> Any:
    """Cast what attention is given to the type in which autocast has it computed: the ops that stand for it do not."""
    if not torch.is_autocast_enabled(device):
        return given
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor) -> Tensor:
        is_cast = tensor.device.type == device and tensor.is_floating_point() and tensor.dtype is not torch.float64
        return tensor.to(dtype) if is_cast else tensor

    return tree_map_only(Tensor, cast, given)


def _attend_dropped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Attention with dropout, where kernels of our own take it; elsewhere ``None``."""
    if not dropout_p or query.dim() != 4:
        return None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = _added(attn_mask, query)
    if not take_attention(
        replace(describe(query, key, value, dropout_p, attn_mask=attn_mask, scale=scale), is_seeded=True)
    ):
        return None
    given = (query, key, value, dropout_p, is_causal, attn_mask, scale, DRAW_SEED(), 0)
    output: Tensor = ATTENTION(*given)[0]
    return output


def _added(mask: Tensor, query: Tensor) -> Tensor:
    """Makes the numbers that are added to scores, for a mask of those that count."""
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), -math.inf)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """``None`` where the CPU's op would not be chosen on the CPU either, and no library takes a bias' gradient."""
    plain = query.dim() == key.dim() == value.dim() == 4 and dropout_p == 0
    if not plain or query.shape[-1] != value.shape[-1]:
        return None
    if attn_mask is not None and attn_mask.requires_grad:
        given = (query, key, value, attn_mask, is_causal, scale)
        return BIASED_ATTENTION(*given)[0] if computes(BIASED_ATTENTION, *given) else None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = _added(attn_mask, query)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    output: Tensor = op(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output


# Of matrices, which raise in eager where one is singular or not positive definite; an executable raises nothing.
CHECK = torch.ops.aten._linalg_check_errors.default
torch.fx.node.has_side_effect(CHECK)


@contextmanager
def plain_checks() -> Iterator[None]:
    """While this is open, checks are traced as ops like others, not in a chain of tokens."""
    effect = torch._library.simple_registry.singleton.find("aten::_linalg_check_errors").effect
    with mock.patch.object(effect, "_effect", None):
        yield
