# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Long rows: which are found, and the script that spreads them over a workgroup."""

import pytest

from retrograd.pipelines.devices.row_tiles import find_rows, row_rules


def test_long_rows_that_no_warp_divides_are_found_once() -> None:
    text = (
        "tensor<256x50257xf32> tensor<50257xf32> tensor<8x1000xbf16> tensor<4x1024xf32> tensor<2x197xf32> tensor<f32>"
    )
    assert find_rows(text) == [1000, 50257]


@pytest.mark.parametrize("type_", ["tensor<9x1000xf64>", "tensor<9x1000xi64>", "tensor<1000x9xf32>", "tensor<?x?xf32>"])
def test_other_rows_are_left(type_: str) -> None:
    assert not row_rules(type_)


def test_the_script_matches_each_rank() -> None:
    rules = row_rules("tensor<256x50257xf32>")
    assert [rule.matcher for rule in rules] == [f"reduces_50257_{rank}" for rank in range(1, 5)]
    script = "\n".join(rule.text for rule in rules)
    for rank in range(1, 5):
        assert script.count(f"@reduces_50257_{rank}(") == script.count(f"@maps_50257_{rank}(") == 1
    assert "partial_reduction = [0, 1024], workgroup = [1, 0]" in script
    assert "lane_basis = [[1, 1, 32], [0, 1, 2]], subgroup_basis = [[1, 1, 8], [0, 1, 2]]" in script
    # The reduction in the last loop, and nowhere else.
    assert '"transform.match.structured.dim"(%structured) <{raw_dim_list = array<i64: 0>, reduction}>' in script
    assert script.count(", reduction}>") == 4
