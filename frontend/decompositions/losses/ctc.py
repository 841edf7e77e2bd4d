# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Connectionist temporal classification as sums over alignments, in logarithms.

A target of S labels is a chain of 2 S + 1 states: a blank before, between and after its labels. From one frame to the
next an alignment stays, goes on by one state, or by two where a blank between two labels may be left out.
Source: Graves et al., "Connectionist Temporal Classification: Labelling Unsegmented Sequence Data with Recurrent
Neural Networks", 2006, section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition
from retrograd.frontend.layers.ctc_loss import CTC_LOSS, CTC_LOSS_BACKWARD, split_rows

aten = torch.ops.aten

# Sequences of as many frames are written out frame by frame; of longer ones, blocks of frames side by side.
MOST_STEPS = 32
# Past these, compiling takes minutes, or blocks take far longer than the loop over frames that torch runs.
MOST_FRAMES = 1024
MOST_WORK = 2**24
# The logarithm of next to nothing: unlike infinity, it can be subtracted from itself.
_NEVER = -1e30


@dataclass(frozen=True)
class _Chain:
    """``classes`` [N, S] of the states, ``skips`` whether two steps lead to one; ``scores`` [T, N, S], the logarithm
    of each state's probability at each frame; ``active`` [T, N, 1], whether a frame is one of the row."""

    classes: Tensor
    skips: Tensor
    scores: Tensor
    active: Tensor


def ctc_loss(
    log_probs: Tensor, targets: Tensor, frames: Tensor, labels: Tensor, blank: int, zero_infinity: bool
) -> Any:
    """``retrograd::ctc_loss``: the loss of each row, and the logarithm of the probability of all that leads to a state
    up to a frame."""
    if not _is_small(log_probs, targets):
        return NotImplemented
    chain = _make_chain(log_probs, targets, frames, labels, blank)
    # Before the first frame, so that a row of no frames needs no case of its own.
    alpha = _scan(_start(chain, torch.zeros_like(labels)), chain.skips, chain.scores, chain.active)
    last = alpha[-1]
    ends = torch.stack([2 * labels, 2 * labels - 1], 1).clamp(0, last.shape[1] - 1)
    whole, bare = last.gather(1, ends).unbind(1)
    likelihood = _log_sum(whole, torch.where(labels > 0, bare, _NEVER))
    loss = torch.where(likelihood < _NEVER / 2, math.inf, -likelihood)
    refused = (frames > log_probs.shape[0]) | (labels > targets.shape[1]) | (frames < 0) | (labels < 0)
    return torch.where(refused, math.nan, loss), alpha.transpose(0, 1).contiguous()


def ctc_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    frames: Tensor | Sequence[int],
    labels: Tensor | Sequence[int],
    loss: Tensor,
    alpha: Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> Any:
    """``retrograd::ctc_loss_backward`` and ``aten._ctc_loss_backward``: how much more probable a class is than the
    alignments make it, frame by frame."""
    frames_, labels_ = (torch.as_tensor(n, device=log_probs.device).reshape(-1).long() for n in (frames, labels))
    rows = split_rows(targets.long(), labels_, labels, log_probs.shape[1])[:, : alpha.shape[2] // 2]
    if not _is_small(log_probs, rows):
        return NotImplemented
    chain = _make_chain(log_probs, rows, frames_, labels_, blank)
    beta = _scan_back(chain, labels_)
    # States past a row's own are never on the way, whatever torch's kernel left there.
    on_the_way = chain.active & (beta > _NEVER / 2)
    posterior = torch.exp(alpha.transpose(0, 1) + beta - chain.scores + loss.unsqueeze(1))
    posterior = torch.where(on_the_way, posterior, 0)
    of_class = (chain.classes.unsqueeze(2) == torch.arange(log_probs.shape[2], device=rows.device)).to(log_probs.dtype)
    expected = torch.bmm(posterior.transpose(0, 1), of_class).transpose(0, 1)
    impossible = (loss == math.inf).unsqueeze(1)
    gradient = (torch.exp(log_probs) - expected) * grad.unsqueeze(1)
    gradient = torch.where(impossible, 0.0 if zero_infinity else math.nan, gradient)
    return torch.where(chain.active, gradient, 0)


def _is_small(log_probs: Tensor, targets: Tensor) -> bool:
    sizes = (*log_probs.shape, *targets.shape)
    if not all(isinstance(size, int) for size in sizes) or 0 in sizes:
        return False
    frames, batch, _ = log_probs.shape
    states = 2 * targets.shape[1] + 1
    return frames <= MOST_STEPS or (frames <= MOST_FRAMES and frames * batch * states**2 <= MOST_WORK)


def _make_chain(log_probs: Tensor, targets: Tensor, frames: Tensor, labels: Tensor, blank: int) -> _Chain:
    here = torch.arange(targets.shape[1], device=targets.device) < labels.unsqueeze(1)
    rows = torch.where(here, targets, blank)
    blanks = torch.full_like(rows, blank)
    classes = torch.cat([torch.stack([blanks, rows], 2).flatten(1), blanks[:, :1]], 1)
    # A blank between two labels may be left out, unless they are the same.
    skips = torch.cat([torch.zeros_like(classes[:, :2], dtype=torch.bool), classes[:, 2:] != classes[:, :-2]], 1)
    scores = log_probs.clamp(min=_NEVER).gather(2, classes.expand(log_probs.shape[0], *classes.shape))
    active = (torch.arange(log_probs.shape[0], device=frames.device).unsqueeze(1) < frames).unsqueeze(2)
    return _Chain(classes, skips, scores, active)


def _start(chain: _Chain, place: Tensor) -> Tensor:
    """``[N, S]``: certain to be in the state ``place``, [N], a blank: one step from it leads there and to the label
    beside it."""
    states = torch.arange(chain.classes.shape[1], device=place.device)
    return torch.where(states == place.unsqueeze(1), 0.0, _NEVER).to(chain.scores.dtype)


def _scan_back(chain: _Chain, labels: Tensor) -> Tensor:
    """``[T, N, S]``, the logarithm of the probability of all that leads on from a state at a frame: a scan of the
    reversed chain."""
    end = chain.classes.shape[1] - 1
    flipped = chain.skips.flip(1)
    skips = torch.cat([torch.zeros_like(flipped[:, :2]), flipped[:, :-2]], 1)
    start = _start(chain, end - 2 * labels)
    return _scan(start, skips, chain.scores.flip(0, 2), chain.active.flip(0)).flip(0, 2)


def _scan(start: Tensor, skips: Tensor, scores: Tensor, active: Tensor) -> Tensor:
    """Apply all steps to ``start`` [N, S], one after another; returns the state after each: ``[T, N, S]``.

    Many frames are cut into blocks. What a block makes of each state is worked out for all blocks at once, then where
    each block starts, block by block, and then all blocks from there: about ``sqrt(8 T)`` steps, of 2 S times the work
    (Ladner and Fischer, "Parallel Prefix Computation", 1980).
    """
    frames, batch, states = scores.shape
    if frames <= MOST_STEPS:
        return torch.stack(_steps(start, skips, [*scores], [*active]))
    length = round(math.sqrt(frames / 2))
    blocks = -(-frames // length)
    # Frames that are no row's at the end leave all as it is.
    missing = blocks * length - frames
    scores, active = (torch.cat([t, torch.zeros_like(t[:1]).expand(missing, *t.shape[1:])]) for t in (scores, active))
    by_block = scores.reshape(blocks, length, batch, states).transpose(0, 1)
    active = active.reshape(blocks, length, batch, 1).transpose(0, 1)
    each = torch.where(torch.eye(states, dtype=torch.bool, device=start.device), 0.0, _NEVER).to(start.dtype)
    each = each.expand(blocks, batch, states, states)
    leads = _steps(each, skips.unsqueeze(1), [*by_block.unsqueeze(3)], [*active.unsqueeze(3)])[-1]
    starts = [start]
    for block in range(blocks - 1):
        paths = starts[-1].unsqueeze(2) + leads[block]
        starts.append(torch.logsumexp(paths, 1))
    return torch.stack(_steps(torch.stack(starts), skips, [*by_block], [*active]), 1).flatten(0, 1)[:frames]


def _steps(state: Tensor, skips: Tensor, scores: Sequence[Tensor], active: Sequence[Tensor]) -> list[Tensor]:
    """Apply each step to ``state``: staying, going on by one or, where ``skips`` says so, by two; nothing changes where
    a frame is not ``active``. Returns the state after each."""
    never = torch.full_like(state[..., :2], _NEVER)
    found = []
    for score, is_active in zip(scores, active, strict=True):
        past = torch.cat([never, state], -1)
        moved = _log_sum(state, past[..., 1:-1], torch.where(skips, past[..., :-2], _NEVER)) + score
        state = torch.where(is_active, moved, state)
        found.append(state)
    return found


def _log_sum(*terms: Tensor) -> Tensor:
    """The logarithm of a sum, of logarithms none of which is infinite."""
    highest = terms[0]
    for term in terms[1:]:
        highest = torch.maximum(highest, term)
    total = torch.exp(terms[0] - highest)
    for term in terms[1:]:
        total = total + torch.exp(term - highest)
    return highest + torch.log(total)


ENTRIES = (
    Decomposition(CTC_LOSS, ctc_loss, NO_LOWERING),
    *(
        Decomposition(op, ctc_loss_backward, NO_LOWERING)
        for op in (CTC_LOSS_BACKWARD, aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)
    ),
)
