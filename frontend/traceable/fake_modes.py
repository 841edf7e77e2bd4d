# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Ends what modes of fake tensors refer to, once a trace is done."""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensorMode


def forget_tensors(mode: FakeTensorMode) -> None:
    """Let a mode refer no more to the tensors that it made stand-ins for.

    The stand-ins live as long as the graph, and their mode with them. It refers to the tensors weakly, but
    ``torch.utils.swap_tensors``, and ``Module.to`` where it swaps, refuse tensors that anything refers to so.
    """
    mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()
