# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Questions that PyTorch's own layers ask of a tensor's contents, which a trace does not know, answered without them.

Attention masks are looked at for whether they are causal, or padding on the right, since there are faster kernels for
those. That they are not causal is an answer that is always right: they are applied as they are. A batch norm with
``momentum=None`` asks how many batches it has seen, for a mean over all of them: a formula of tensors. Covariances ask
whether their weights are any, and distributions whether a matrix is symmetric, to raise where it is not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributions import Distribution, constraints
from torch.nn import TransformerEncoder
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from retrograd.frontend.python.source_locations import CaptureError
from retrograd.frontend.traceable.covariance import corrcoef, cov


class AnsweredQuestions(TorchFunctionMode):
    """While it is active, the layers of ``torch.nn.Transformer`` and batch norms are traced without looking at the
    contents of a tensor. It is of its thread only, and what a model itself asks is not answered."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch._nested_tensor_from_mask_left_aligned:
            return _takes_nested_tensors(args[0])
        if func in _QUESTIONS and _find_caller(_ASKS_IF_CAUSAL) is not None:
            return False
        if func in _QUESTIONS and _find_caller(_NORMALIZES) is not None:
            return _WHOLE
        if func in _QUESTIONS and _is_validating():
            return True
        if func is F.batch_norm and (layer := _averaging_layer()) is not None:
            return _batch_norm_averaged(layer, *args, **kwargs)
        formula = _FORMULAS.get(func)
        value = formula(*args, **kwargs) if formula is not None else NotImplemented
        return func(*args, **kwargs) if value is NotImplemented else value


_FORMULAS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.cov: cov,
    Tensor.cov: cov,
    torch.corrcoef: corrcoef,
    Tensor.corrcoef: corrcoef,
}
_QUESTIONS = (Tensor.__bool__, Tensor.__float__, Tensor.item)
_ASKS_IF_CAUSAL = transformer._detect_is_causal_mask.__code__
_LOOKS_FURTHER = tuple(
    type(constraint).check.__code__
    for constraint in (constraints.symmetric, constraints.positive_semidefinite, constraints.positive_definite)
)
_NORMALIZES = _BatchNorm.forward.__code__
_HANDED_ON_BY = tuple(
    function.__code__ for function in (F.batch_norm, torch.overrides.handle_torch_function, FunctionalTensor.__bool__)
)
# The share of a batch in the statistics, if they were of this batch alone.
_WHOLE = 1.0


def _is_validating() -> bool:
    """Whether a distribution asks whether a matrix is square, or symmetric, before it looks further. It raises where it
    is not, as a check of the arguments: what raises is taken for granted."""
    caller: FrameType | None = None
    for code in _LOOKS_FURTHER:
        caller = caller or _find_caller(code)
    while caller is not None and caller.f_code in _LOOKS_FURTHER:
        caller = caller.f_back
    return caller is not None and caller.f_code is Distribution.__init__.__code__


def _takes_nested_tensors(src: Tensor) -> bool:
    """Whether a ``TransformerEncoder`` in eval mode leaves out what is padded, which it does where no gradients are
    needed: its results are then zero there, so that this is no question of speed alone.

    Raises:
        CaptureError: it depends on the mask.
    """
    frame = _find_caller(TransformerEncoder.forward.__code__)
    parameters = () if frame is None else frame.f_locals["self"].layers[0].parameters()
    if torch.is_grad_enabled() and any(t.requires_grad for t in (src, *parameters)):
        return False
    raise CaptureError(
        "a TransformerEncoder without gradients gives zeros where src_key_padding_mask pads on the right, and other "
        "numbers for other masks, which are not known while it is traced",
        "make it with enable_nested_tensor=False, or call torch.backends.mha.set_fastpath_enabled(False)",
    )


def _batch_norm_averaged(
    layer: _BatchNorm, x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, *args: Any, **kwargs: Any
) -> Tensor:
    """``F.batch_norm`` for a layer whose running statistics are means over all batches: 1 / n of the newest is in."""
    if running_mean is None or running_var is None or layer.num_batches_tracked is None:
        return F.batch_norm(x, running_mean, running_var, *args, **kwargs)
    # With the share of _WHOLE, a batch norm leaves the statistics of the batch; it multiplies what was there by zero.
    of_batch = torch.zeros_like(running_mean), torch.zeros_like(running_var)
    y = F.batch_norm(x, *of_batch, *args, **kwargs)
    with torch.no_grad():
        for running, newest in zip((running_mean, running_var), of_batch, strict=True):
            running += (newest - running) / layer.num_batches_tracked
    return y


def _averaging_layer() -> _BatchNorm | None:
    """The batch norm that calls ``F.batch_norm`` for its statistics to be means over all batches, if one does."""
    frame = _find_caller(_NORMALIZES)
    layer = None if frame is None else frame.f_locals["self"]
    averages = layer is not None and layer.training and layer.track_running_stats and layer.momentum is None
    return layer if averages else None


def _find_caller(code: CodeType) -> FrameType | None:
    """The frame of this function if it is the one that called into torch. In between stand the modes that are active,
    and what hands a call to them."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (frame.f_code.co_name == "__torch_function__" or frame.f_code in _HANDED_ON_BY):
        frame = frame.f_back
    return frame if frame is not None and frame.f_code is code else None
