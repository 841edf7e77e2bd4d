# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Images that are resized, traced as one op with a backward of its own. PyTorch decomposes these ops before it
differentiates them, so that their gradients are those of gathers: a scatter for each corner of each element."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._decomp.decompositions import get_scale_value, upsample_compute_output_size
from torch._ops import OpOverload, OpOverloadPacket

from retrograd.frontend.traceable.replaced_kernels import Kernels, replaced_kernels

_PACKETS: tuple[OpOverloadPacket, ...] = (
    torch.ops.aten.upsample_linear1d,
    torch.ops.aten.upsample_bilinear2d,
    torch.ops.aten.upsample_trilinear3d,
    torch.ops.aten.upsample_bicubic2d,
    torch.ops.aten.upsample_nearest1d,
    torch.ops.aten.upsample_nearest2d,
    torch.ops.aten.upsample_nearest3d,
    torch.ops.aten._upsample_nearest_exact1d,
    torch.ops.aten._upsample_nearest_exact2d,
    torch.ops.aten._upsample_nearest_exact3d,
)
_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@contextlib.contextmanager
def own_resizing_gradients() -> Iterator[None]:
    """While this is open, tracing sees resizing ops and their backward ops, and not what PyTorch makes of them."""
    with replaced_kernels(_own_kernels()):
        yield


def _own_kernels() -> Iterator[tuple[OpOverload, Kernels]]:
    for packet in _PACKETS:
        # PyTorch's own kernel of the form for Python callers takes no open sizes.
        resize: Callable[..., Tensor] = partial(_resize, packet.default)
        yield packet.default, {}
        yield packet.vec, dict.fromkeys(_KEYS, resize)


def _resize(op: OpOverload, x: Tensor, output_size: Sequence[int] | None, *how: Any) -> Tensor:
    """``how`` is whether corners are aligned, of ops that ask, and the factors of the sizes if they are given."""
    *aligned, factors = how
    size = upsample_compute_output_size(x.size(), output_size, factors)
    scales = [get_scale_value(factors, axis) for axis in range(x.dim() - 2)]
    resized: Tensor = op(x, size, *aligned, *scales)
    return resized
