# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Connectionist temporal classification as a library op whose shapes follow from those of its arguments.

The shapes of torch's own op follow from what is in its lengths, so that it cannot be traced. Here
``retrograd::ctc_loss`` and its backward run torch's kernels, in an eager island: written out as sums over alignments
they took 18 times as long to compile, and steps were slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from retrograd.frontend.layers.own_ops import define_op

aten = torch.ops.aten

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda loss: loss, "mean": torch.mean, "sum": torch.sum}


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Any:
    """``F.ctc_loss`` of ``log_probs`` [T, N, C] or [T, C], for lengths in tensors or lists.

    ``targets`` are [N, S], or all in a row: each row is then as long as all of them where lengths are in a tensor. The
    gradient of ``log_probs`` is eager's: that of what a log-softmax gives, which adds up to zero over the classes. Half
    types are computed in float32, as under ``torch.autocast``.

    Returns ``NotImplemented`` for a reduction that there is not.
    """
    if reduction not in REDUCTIONS:
        return NotImplemented
    emitted = log_probs if log_probs.dtype == torch.float64 else log_probs.float()
    batched = emitted.dim() == 3
    emitted = emitted if batched else emitted.unsqueeze(1)
    frames, labels = (
        torch.as_tensor(n, device=emitted.device).reshape(-1).long() for n in (input_lengths, target_lengths)
    )
    rows = split_rows(targets.long(), labels, target_lengths, emitted.shape[1])
    loss, _ = CTC_LOSS(emitted, rows, frames, labels, blank, zero_infinity)
    if zero_infinity:
        loss = torch.where(loss == torch.inf, 0, loss)
    if reduction == "mean":
        loss = loss / labels.clamp(min=1)
    return REDUCTIONS[reduction](loss if batched else loss.squeeze(0))


def split_rows(targets: Tensor, labels: Tensor, lengths: Tensor | Sequence[int], batch: int) -> Tensor:
    """Targets that may be all in a row as ``[N, S]``; what is past a row's length is some other label."""
    if targets.numel() == 0:
        return targets.new_zeros(batch, 1)
    if targets.dim() == 2 or batch == 1:
        return targets.reshape(batch, -1)
    most = targets.shape[0] if isinstance(lengths, Tensor) else max(lengths)
    first = torch.cumsum(labels, 0) - labels
    place = first.unsqueeze(1) + torch.arange(max(most, 1), device=targets.device)
    return targets[place.clamp(max=targets.shape[0] - 1)]


def _run(
    log_probs: Tensor, targets: Tensor, frames: Tensor, labels: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    """The loss of each row, [N], and the logarithm of what leads to each state, [N, T, 2 S + 1]; zeros past a row's
    frames and states, where PyTorch leaves what the memory held before."""
    loss, alpha = aten._ctc_loss.Tensor(log_probs, targets, frames, labels, blank, zero_infinity)
    alpha = F.pad(alpha, (0, 2 * targets.shape[1] + 1 - alpha.shape[2]))
    frame, state = (torch.arange(size, device=alpha.device) for size in alpha.shape[1:])
    is_set = (frame < frames.to(alpha.device)[:, None])[:, :, None]
    is_set = is_set & (state < 2 * labels.to(alpha.device)[:, None] + 1)[:, None, :]
    return loss, alpha.where(is_set, 0).contiguous()


def _run_backward(*args: Any) -> Tensor:
    return aten._ctc_loss_backward.Tensor(*args)


def _fake(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    frames, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, frames, 2 * targets.shape[1] + 1)


def _fake_backward(grad: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, blank, zero_infinity = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)
    ctx.options = blank, zero_infinity


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    found = CTC_LOSS_BACKWARD(grad, *ctx.saved_tensors, *ctx.options)
    return found, None, None, None, None, None


_ARGUMENTS = "Tensor log_probs, Tensor targets, Tensor frames, Tensor labels"
_OPTIONS = "int blank, bool zero_infinity"
CTC_LOSS = define_op(
    f"ctc_loss({_ARGUMENTS}, {_OPTIONS}) -> (Tensor, Tensor)", _run, _fake, _differentiate, _setup_context
)
CTC_LOSS_BACKWARD = define_op(
    f"ctc_loss_backward(Tensor grad, {_ARGUMENTS}, Tensor loss, Tensor alpha, {_OPTIONS}) -> Tensor",
    _run_backward,
    _fake_backward,
)
