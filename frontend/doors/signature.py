# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""torch's tensors, dtypes and trees in the words of a signature."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
import torch
from torch.utils import _pytree as pytree

from retrograd.contract.signature import TensorType
from retrograd.frontend.sizes.size_expressions import to_size


def type_of(tensor: torch.Tensor, names: Mapping[sympy.Symbol, str] | None = None) -> TensorType:
    """The type of a tensor; ``names`` are those of the sizes that were left open."""
    return TensorType(
        tuple(to_size(n, names or {}) for n in tensor.shape),
        dtype_name(tensor.dtype),
        tuple(to_size(n, names or {}) for n in tensor.stride()),
        tensor.device.type,
        tensor.requires_grad,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``float32``."""
    return str(dtype).removeprefix("torch.")


def dump_tree(spec: pytree.TreeSpec) -> str | None:
    """A tree as text; ``None`` if it has a type that torch cannot write."""
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, ValueError, TypeError):
        return None
