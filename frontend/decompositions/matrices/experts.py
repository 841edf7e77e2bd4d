# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products of groups of rows with a matrix each, as mixtures of experts have them, with sizes that do not depend on how
many rows chose which expert.

Rows come sorted by group. Each group is cut into blocks of equally many rows, the last of which is filled up with
zeros: there are at most ``rows // block + groups`` blocks, and each is multiplied with its group's matrix. With blocks
of the average group's size, that is at most twice the work and twice the matrices.

Source: T. Gale, D. Narayanan, C. Young, M. Zaharia, MegaBlocks: Efficient Sparse Training with Mixture-of-Experts,
MLSys 2023, whose blocks these are, padded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition

aten = torch.ops.aten

# Elements times bins of a histogram past which they are too many.
MOST_PAIRS = 1 << 24


@dataclass(frozen=True)
class Blocks:
    """How rows lie in blocks of ``size`` rows each.

    ``group [blocks]`` is the group of each block, ``row [blocks, size]`` the row at each place, ``filled`` whether
    there is one; ``place [rows]`` is where each row is among the places of all blocks, ``grouped`` whether it is
    anywhere.
    """

    size: int
    group: Tensor
    row: Tensor
    filled: Tensor
    place: Tensor
    grouped: Tensor

    @classmethod
    def of(cls, offsets: Tensor, rows: int) -> Blocks:
        """The blocks of groups that end at ``offsets [groups]``, which do not decrease."""
        groups, ends = offsets.shape[0], offsets.to(torch.int64)
        size = max(1, -(-rows // groups))
        count = rows // size + min(groups, rows)
        starts = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
        last = torch.cumsum((ends - starts + size - 1) // size, 0)
        block = torch.arange(count, device=offsets.device)
        group = _passed(last, block).clamp(max=groups - 1)
        first = last - (ends - starts + size - 1) // size
        begin = starts[group] + (block - first[group]) * size
        row = begin.unsqueeze(-1) + torch.arange(size, device=offsets.device)
        filled = (row < ends[group].unsqueeze(-1)) & (block < last[-1]).unsqueeze(-1)
        place = torch.arange(rows, device=offsets.device)
        own = _passed(ends, place).clamp(max=groups - 1)
        return cls(
            size, group, row.clamp(0, rows - 1), filled, place - starts[own] + first[own] * size, place < ends[-1]
        )

    def gather(self, rows: Tensor) -> Tensor:
        """``rows [rows, n]`` as ``[blocks, size, n]``, with zeros where there is none."""
        return torch.where(self.filled.unsqueeze(-1), rows[self.row], 0)

    def spread(self, blocks: Tensor) -> Tensor:
        """``blocks [blocks, size, n]`` as ``[rows, n]``, with zeros in the rows of no group."""
        places = blocks.flatten(0, 1)[self.place.clamp(0, blocks.shape[0] * self.size - 1)]
        return torch.where(self.grouped.unsqueeze(-1), places, 0)


def _passed(ends: Tensor, number: Tensor) -> Tensor:
    """How many of the ``ends`` are at or before each number."""
    return (ends <= number.unsqueeze(-1)).to(torch.int64).sum(-1)


def multiply_groups(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Any:
    """``[rows, n]`` and ``[groups, n, m]`` to ``[rows, m]``: each row times the matrix of its group."""
    if not has_fixed_sizes(rows, matrices, offsets):
        return NotImplemented
    blocks = Blocks.of(offsets, rows.shape[0])
    return blocks.spread(torch.bmm(blocks.gather(rows), matrices[blocks.group]))


def sum_groups(left: Tensor, right: Tensor, offsets: Tensor) -> Any:
    """``[rows, n]`` and ``[rows, m]`` to ``[groups, n, m]``: the outer products of the rows, summed in each group."""
    if not has_fixed_sizes(left, right, offsets):
        return NotImplemented
    blocks = Blocks.of(offsets, left.shape[0])
    products = torch.bmm(blocks.gather(left).transpose(1, 2), blocks.gather(right))
    return products.new_zeros(offsets.shape[0], *products.shape[1:]).index_add(0, blocks.group, products)


def grouped_mm(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """``aten._grouped_mm`` of rows with a matrix for each group, and of columns with rows."""
    if offs is None or bias is not None or out_dtype not in (None, left.dtype) or left.dim() != 2:
        return NotImplemented
    return multiply_groups(left, right, offs) if right.dim() == 3 else sum_groups(left.t(), right, offs)


def grouped_mm_backward(rows: Tensor, matrices: Tensor, offsets: Tensor, gradient: Tensor) -> Any:
    """The gradients of the rows and of the matrices of ``multiply_groups``."""
    of_rows = multiply_groups(gradient, matrices.transpose(1, 2), offsets)
    of_matrices = sum_groups(rows, gradient, offsets)
    return NotImplemented if of_rows is NotImplemented else (of_rows, of_matrices)


def has_fixed_sizes(*tensors: Tensor) -> bool:
    """Whether all sizes are numbers, and none is zero."""
    return all(isinstance(size, int) and size > 0 for t in tensors for size in t.shape)


def histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """``aten.histc``: how many elements are in each of ``bins`` equal parts of a range."""
    if min >= max or not all(isinstance(size, int) for size in x.shape) or x.numel() * bins > MOST_PAIRS:
        return NotImplemented
    part = ((x - min) / (max - min) * bins).to(torch.int64).clamp(max=bins - 1)
    inside = (x >= min) & (x <= max)
    found = (part.reshape(-1) == torch.arange(bins, device=x.device).unsqueeze(-1)) & inside.reshape(-1)
    return found.to(x.dtype).sum(-1)


ENTRIES = (
    Decomposition(aten.histc.default, histc, NO_LOWERING),
    Decomposition(aten._grouped_mm.default, grouped_mm, NO_LOWERING),
)
# Of a library that may not be there, by name: what transformers calls while it is traced.
NAMED: dict[str, Callable[..., Any]] = {
    "transformers::grouped_mm_fallback": multiply_groups,
    "transformers::grouped_mm_fallback_backward": grouped_mm_backward,
}


def find_named() -> list[Decomposition]:
    """The entries of the ops that have been registered by now."""
    found = []
    for name, function in NAMED.items():
        library, _, op = name.partition("::")
        packet = getattr(getattr(torch.ops, library), op, None)
        if packet is not None:
            found.append(Decomposition(packet.default, function, "it is Python code that runs op by op"))
    return found
