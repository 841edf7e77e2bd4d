# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Narrower types for saved values: what of a tensor is kept, in how many bytes, and how far it is from the tensor.

``int8-block`` is block-wise quantization (T. Dettmers et al., "8-bit optimizers via block-wise quantization", 2022),
linear; ``float8_e4m3`` that of P. Micikevicius et al., "FP8 formats for deep learning", 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

BLOCK = 64
FLOAT8_MAX = 448.0
INT8_MAX = 127.0
# The least magnitude that a scale is made from: the tensor may be zero everywhere.
TINY = 2.0**-100
# Bytes of an element that can be narrowed, by its type in MLIR.
_FLOATS = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2}


@dataclass(frozen=True)
class NarrowType:
    """A type to save in.

    ``parts`` names what is kept of a tensor; ``size`` is the bytes of them all for a tensor of so many elements;
    ``roundoff`` is the largest error of an element, relative to itself or, for ``int8-block``, to the largest of its
    block, in units of it. ``blocks`` says that elements are counted, which takes fixed sizes.
    """

    parts: tuple[str, ...]
    size: Callable[[int], int]
    roundoff: float
    blocks: bool = False


FORMATS = {
    "bf16": NarrowType(("bf16",), lambda count: 2 * count, 2.0**-8),
    # Below 2**-6 of the scaled range numbers are subnormal, 2**-10 apart at most from their neighbours' midpoint.
    "float8_e4m3": NarrowType(("float8", "scale"), lambda count: count + 4, 2.0**-4),
    "int8-block": NarrowType(
        ("int8", "scales"), lambda count: -(-count // BLOCK) * (BLOCK + 4), 0.5 / INT8_MAX, blocks=True
    ),
}


def narrowed_bytes(format: str, shape: tuple[int, ...], element: str) -> int | None:
    """Bytes of a tensor in ``format``; ``None`` if it is of no floating type, or would take no less."""
    if element not in _FLOATS or format not in FORMATS:
        return None
    size = FORMATS[format].size(prod(shape))
    return size if size < prod(shape) * _FLOATS[element] else None


def part_names(name: str, format: str) -> tuple[str, ...]:
    """Names the parts of the value called ``name``."""
    return tuple(part_name(name, part) for part in FORMATS[format].parts)


def part_name(name: str, part: str) -> str:
    """Names a part of the value called ``name``."""
    return f"{name}_{part}"
