# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Transposes as Triton's interpreter runs their kernels: a program for a process of its own, in which
``TRITON_INTERPRET`` is set. It fails where they are none."""

import math

import torch

from retrograd.pipelines.kernels.source.transposes import transpose

# How many matrices, their rows and columns, and the tile's.
CASES = ((3, 70, 9, 32, 16), (2, 3, 100, 4, 64))


def main() -> None:
    """Check all cases."""
    torch.manual_seed(0)
    for count, rows, columns, high, wide in CASES:
        x, y = torch.randn(count, rows, columns), torch.full((count, columns, rows), math.nan, dtype=torch.float16)
        grid = (-(-rows // high) * -(-columns // wide), count, 1)
        transpose[grid](x, y, rows, columns, BR=high, BC=wide)
        assert torch.equal(y, x.transpose(1, 2).half()), (count, rows, columns)


if __name__ == "__main__":
    main()
