# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles without a tail: which products of a CPU get one."""

import pytest

from retrograd.pipelines.analysis.layout.cpu_tiles import TailTile, find_tail_tile
from retrograd.pipelines.devices import targets
from retrograd.pipelines.devices.targets import find_target
from retrograd.pipelines.toolchain.lowering_steps import lowering_pipeline


@pytest.mark.parametrize(
    ("rows", "columns", "tile"),
    [
        (16, 21, TailTile(8, 7, 16, 21)),
        (64, 27, TailTile(8, 9, 16, 27)),
        (20, 36, TailTile(5, 12, 16, 36)),
        # A workgroup has whole tiles.
        (64, 100, TailTile(8, 10, 16, 60)),
    ],
)
def test_tiles_divide_both_sides(rows: int, columns: int, tile: TailTile) -> None:
    assert find_tail_tile(rows, columns, 4096) == tile


@pytest.mark.parametrize(
    ("rows", "columns", "terms"),
    [
        # No tail; fewer columns than a tile of IREE's; no divisor of columns, of rows; a tail of terms.
        (16, 48, 4096),
        (16, 9, 4096),
        (16, 23, 4096),
        (13, 21, 4096),
        (16, 21, 4100),
    ],
)
def test_others_keep_the_tile_that_they_have(rows: int, columns: int, terms: int) -> None:
    assert find_tail_tile(rows, columns, terms) is None


def test_tails_matter_on_wide_vectors_alone() -> None:
    pipelines = {name: lowering_pipeline(find_target(name)) for name in ("cpu:x86-64-v4", "cpu:x86-64-v3", "cuda")}
    assert [name for name, text in pipelines.items() if "avoid-tails" in text] == ["cpu:x86-64-v4"]


@pytest.mark.parametrize(
    ("cpu", "found"), [("AMD EPYC avx512f", ["cpu"]), ("AMD EPYC avx2", []), ("Intel avx512f", [])]
)
def test_turned_matrices_are_packed_for_cpus_of_amds_with_wide_vectors(
    monkeypatch: pytest.MonkeyPatch, cpu: str, found: list[str]
) -> None:
    monkeypatch.setattr(targets, "host_cpu", lambda: cpu)
    pipelines = {name: lowering_pipeline(find_target(name)) for name in ("cpu", "cpu:x86-64-v4", "cuda")}
    assert [name for name, text in pipelines.items() if "pack-turned" in text] == found
