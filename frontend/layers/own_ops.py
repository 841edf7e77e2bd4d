# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Ops of our own, in PyTorch's dispatcher as ``retrograd::name``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

_LIBRARY = torch.library.Library("retrograd", "FRAGMENT")


def define_op(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any] | None,
    differentiate: Callable[..., Any] | None = None,
    keep: Callable[..., None] | None = None,
    *,
    tags: Sequence[torch.Tag] = (),
) -> OpOverload:
    """The op of a ``schema``, such as ``lstm(Tensor gates) -> Tensor``, that ``run`` computes on every device, and
    ``fake`` of fake tensors; ``differentiate`` gives its gradients of what ``keep`` put into the context."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=tuple(tags))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    if fake is not None:
        torch.library.register_fake(f"retrograd::{name}", fake, lib=_LIBRARY)
    if differentiate is not None:
        torch.library.register_autograd(f"retrograd::{name}", differentiate, setup_context=keep, lib=_LIBRARY)
    op: OpOverload = getattr(torch.ops.retrograd, name).default
    return op
