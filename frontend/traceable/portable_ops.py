# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tracing as if for any machine: layers as ops of their own mathematics, whatever libraries this one has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from retrograd.frontend.layers.recurrent import PortableCells, dropout_between_layers
from retrograd.frontend.python.value_questions import AnsweredQuestions
from retrograd.frontend.traceable.content_free import TraceableFunctions
from retrograd.frontend.traceable.matrix_checks import plain_checks
from retrograd.frontend.traceable.overlapping_writes import OverlappingWrites
from retrograd.frontend.traceable.portable_attention import PortableAttention


@contextlib.contextmanager
def portable_ops() -> Iterator[None]:
    """While this is open, layers are traced as ops of their own mathematics and not as calls of a CPU library
    (oneDNN's LSTM, NNPACK's convolution of small batches) or of cuDNN, tangents as tensors of their own memory, and
    constants made on a device (``torch.tensor(0.5, device="cuda")``) as what they are: copied there, they would be
    fake tensors, without values.

    A tangent traced with the strides of its output is brought to these at run time. Where elements of the output are
    one in memory, as after ``unfold``, that would overwrite some elements of the tangent with others.
    """
    # torch.backends.mkldnn.flags() would set the TF32 mode as well, which warns.
    libraries = (torch._C._set_mkldnn_enabled, torch._C._set_cudnn_enabled, torch._C._set_nnpack_enabled)
    before = (torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled(), torch._C._get_nnpack_enabled())
    lifts_cpu_only = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    for enable in libraries:
        enable(False)
    try:
        with (
            PortableAttention(),
            PortableCells(),
            AnsweredQuestions(),
            TraceableFunctions(),
            OverlappingWrites(),
            dropout_between_layers(),
            plain_checks(),
            torch._functorch.config.patch(guess_tangent_strides_as_outputs=False),
        ):
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts_cpu_only)
        for enable, enabled in zip(libraries, before, strict=True):
            enable(enabled)
