# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What is too small to gain anything by being cut is told by its text."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.pipelines.analysis.partition.read_graph import read_joint
from retrograd.pipelines.infra.functions import functions
from retrograd.pipelines.stages.lifetimes import most_bytes

LIT = Path(__file__).parents[1] / "lit" / "transforms"


@pytest.mark.parametrize(
    ("types", "size"),
    [
        ("!torch.vtensor<[2,3],f32>", 24),
        ("!torch.vtensor<[],f64> !torch.vtensor<[4],bf16>", 16),
        ("!torch.vtensor<[5],i1> !torch.vtensor<[3],ui8> !torch.vtensor<[2],si64>", 24),
        ("!torch.vtensor<[7],f8E4M3FN> !torch.vtensor<[7],f8E5M2>", 14),
        ("!torch.vtensor<[0,9],f32> !torch.int", 0),
        ("!torch.vtensor<[2],f32> !torch.vtensor<[?,3],f32>", math.inf),
        ("!torch.vtensor<[2],complex<f32>>", math.inf),
        ("!torch.vtensor<[2],!torch.qint8>", math.inf),
        ("!torch.vtensor<*,f32>", math.inf),
    ],
)
def test_bytes_of_types(types: str, size: float) -> None:
    assert most_bytes(types) == size


def test_no_value_is_left_out() -> None:
    """Of all functions that lit cuts where they are large."""
    counted = 0
    for text in (LIT / "bwd-shorten-lifetimes.mlir").read_text(encoding="utf-8").split("// -----"):
        with make_context(), ir.Location.unknown():
            module = ir.Module.parse(text)
            reads = [read_joint(func) for func in functions(module.operation)]
            values = sum(value.bytes for read in reads for value in read.graph.values)
            assert 0 < values <= most_bytes(str(module)) < math.inf
            counted += len(reads)
    assert counted >= 3
