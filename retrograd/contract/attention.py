# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which calls of attention kernels of our own compute: a trace keeps these whole, and a conversion takes them."""

from __future__ import annotations

import math
from dataclasses import dataclass

FORWARD = "torch.aten._scaled_dot_product_flash_attention_for_cpu"
"""The op of a call in imported IR."""
BACKWARD = f"{FORWARD}_backward"
"""The op of its gradients."""

DROPPED = "torch.retrograd.attention"
"""The op of a call with dropout, whose numbers are those of ``retrograd.uniform`` for a seed."""
DROPPED_BACKWARD = f"{DROPPED}_backward"
"""The op of its gradients."""

MASKED_BACKWARD = f"{DROPPED_BACKWARD}_with_mask"
"""The op of its gradients and of that of the scores, whose sums are the mask's."""

ELEMENTS = ("f32", "bf16", "f16")
"""Types of elements that there are kernels for, as MLIR spells them."""

# Of f32 256 wide on an H100: kernels fit, and gradients have errors of 1.3e-6, where eager has 0.9e-6.
WIDEST = {"f32": 128, "bf16": 256, "f16": 256}
"""The widest heads of each."""

# Numbers that say where something lies in a tensor have 32 bits, and an axis of a grid 16.
_MOST_ELEMENTS, _MOST_PROGRAMS = 1 << 31, 65535
# Of a stream of random numbers.
_MOST_NUMBERS = 1 << 32

Tensor = tuple[str, tuple[int | None, ...]]
"""A type of elements, and a shape in which an open size is ``None``."""


@dataclass(frozen=True)
class Attention:
    """A call of attention: queries B x H x L x D, keys and values B x H / repeats x S x D, what is added to the scores,
    and what these are times, if that is no function of D. Of dropout, ``is_seeded`` says that its numbers are a
    function of a seed."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    scale: float | None = None
    is_seeded: bool = False

    def find_obstacle(self) -> str | None:
        """Why kernels of ours do not compute it; ``None`` where they do."""
        (element, query), (_, key), (_, value) = self.query, self.key, self.value
        elements = {element, self.key[0], self.value[0]}
        tensors = [self.query, self.key, self.value, *([self.mask] if self.mask else [])]
        if self.dropout and not (self.is_seeded and 0 < self.dropout < 1):
            return f"it has dropout of {self.dropout:g}"
        if any(size is None for _, shape in tensors for size in shape):
            return "sizes are open"
        if self.scale is not None and not self.scale > 0:
            return f"scores are times {self.scale}"
        if elements - {*ELEMENTS} or len(elements) > 1 or (self.mask and self.mask[0] not in ELEMENTS):
            return f"it is of {' and '.join(sorted({name for name, _ in tensors}))}"
        if not len(query) == len(key) == 4 or key != value or query[::3] != key[::3]:
            return "its keys are not of the queries' batch and width, or its values not of the keys' shape"
        if self.mask and not _is_broadcast(self.mask[1], (*query[:3], key[2])):
            return "its mask is not of the scores' shape"
        sizes = [math.prod(size or 0 for size in shape) for _, shape in tensors]
        if not all(sizes) or max(sizes) >= _MOST_ELEMENTS or max(query[0] or 0, query[1] or 0) > _MOST_PROGRAMS:
            return "a tensor is empty, or too large"
        if self.dropout and math.prod(size or 0 for size in (*query[:3], key[2])) > _MOST_NUMBERS:
            return "it draws more numbers than a stream of them has"
        if (query[1] or 0) % (key[1] or 1):
            return "its heads do not serve the same number of queries each"
        widest = WIDEST[element]
        return f"heads are {query[3]} wide, and kernels are for {widest} at most" if (query[3] or 0) > widest else None


def _is_broadcast(mask: tuple[int | None, ...], scores: tuple[int | None, ...]) -> bool:
    """Whether a mask of this shape is one for the scores, each of its axes of their size or of 1."""
    return 0 < len(mask) <= len(scores) and all(
        own in (1, size) for own, size in zip(reversed(mask), reversed(scores), strict=False)
    )
