# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Transposes in kernels of our own, without a device: which permutations they are."""

import pytest

from retrograd.pipelines.kernels.transposes import find_matrices


@pytest.mark.parametrize(
    ("shape", "order", "expected"),
    [
        ([512, 256, 3, 3], [0, 2, 3, 1], (512, 256, 9)),
        ([512, 3, 3, 256], [0, 3, 1, 2], (512, 9, 256)),
        ([64, 3, 224, 224], [0, 2, 3, 1], (64, 3, 224 * 224)),
        ([300, 7], [1, 0], (1, 300, 7)),
        ([1, 300, 1, 7], [0, 3, 2, 1], (1, 300, 7)),
        # Heads move as they are, nothing moves, and all axes change places.
        ([8, 512, 12, 64], [0, 2, 1, 3], None),
        ([8, 5, 1, 4], [0, 2, 1, 3], None),
        ([3, 4, 5], [2, 1, 0], None),
        ([2, 3, 4, 5], [3, 0, 1, 2], (1, 24, 5)),
    ],
)
def test_which_matrices_a_permutation_turns(
    shape: list[int], order: list[int], expected: tuple[int, int, int] | None
) -> None:
    assert find_matrices(shape, order) == expected
