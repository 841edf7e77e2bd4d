# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which matrix products are worth packing the operands of (IREE's data tiling) on a CPU.

A product on packed operands runs at the same speed whatever its shape and however its operands are transposed; packing
reads and writes each of them once. On two cores with AVX-512, in f32, with M * N * K below 2**26 the plain product won
33 of 39 times, by up to a factor of two; from there on the packed one won 18 of 30, by as much, and lost little.
IREE has such a threshold too, in releases after 3.13.
"""

from __future__ import annotations

from collections.abc import Sequence

from retrograd.pipelines.analysis.layout.split_products import find_part

LEAST_VOLUME = 1 << 26
PRODUCTS = ("torch.aten.mm", "torch.aten.bmm", "torch.aten.addmm", "torch.aten.baddbmm", "torch.aten.matmul")

Shape = tuple[int, ...] | None


def repays_packing(name: str, operands: Sequence[Shape], element_type: str) -> bool:
    """Whether IREE is to pack the operands of the product ``name``, an op of torch's, on operands of these shapes.

    True where that cannot be told: for open sizes, and for other types than f32, of which plain products are slower
    still. False for an op that is no product, and for a product that is split: the two together do not compile.
    """
    if name not in PRODUCTS:
        return False
    # Scalars have no shape, and what a product is added to comes first.
    shapes = [shape for shape in operands if shape is not None][-2:]
    if len(shapes) < 2 or element_type != "f32":
        return True
    left, right = shapes
    if min(len(left), len(right)) < 2:
        return False
    if find_part(name, operands) is not None:
        return False
    return left[-2] * left[-1] * right[-1] >= LEAST_VOLUME
