# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Narrower types in torch: how far a tensor is from what is saved of it, and that MLIR means the same types."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from retrograd.contract import formats
from retrograd.contract.formats import FORMATS
from retrograd.frontend.preparation import narrowing
from retrograd.frontend.preparation.narrowing import pack, unpack

TENSORS = {
    "normal": lambda: torch.randn(7, 40),
    "wide range": lambda: torch.randn(300) * torch.logspace(-6, 3, 300),
    "zero": lambda: torch.zeros(3, 70),
    "half": lambda: torch.randn(90).to(torch.float16),
    "double": lambda: torch.randn(2, 3, 50, dtype=torch.float64),
    "not contiguous": lambda: torch.randn(40, 8).t(),
    "outlier": lambda: torch.cat([torch.randn(100), torch.tensor([1e6])]),
}


def bound(tensor: Tensor, format: str) -> Tensor:
    """The largest error of each element."""
    magnitude, unit = tensor.abs().double(), FORMATS[format].roundoff
    if format == "bf16":
        return magnitude * unit
    if format == "float8_e4m3":
        # Half the distance between subnormal numbers, in units of the scale.
        return torch.maximum(magnitude * unit, magnitude.max() / formats.FLOAT8_MAX * 2.0**-10)
    flat = torch.nn.functional.pad(magnitude.reshape(-1), (0, -magnitude.numel() % formats.BLOCK))
    largest = flat.view(-1, formats.BLOCK).amax(1, keepdim=True).expand(-1, formats.BLOCK)
    return largest.reshape(-1)[: magnitude.numel()].view(magnitude.shape) * unit


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", TENSORS)
def test_errors_stay_within_the_bound(name: str, format: str) -> None:
    torch.manual_seed(0)
    tensor = TENSORS[name]()
    parts = pack(tensor, format)
    found = unpack(parts, format, tensor.shape, tensor.dtype)
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    assert sum(p.numel() * p.element_size() for p in parts) == FORMATS[format].size(tensor.numel())
    # What comes on top is the rounding of the arithmetic itself, in float32 or in the tensor's own type.
    slack = 1 + 1e-5 if tensor.dtype != torch.float16 or format == "bf16" else 1.1
    assert bool(((found.double() - tensor.double()).abs() <= bound(tensor, format) * slack).all())


def test_both_forms_name_parts_alike() -> None:
    for format in FORMATS:
        parts = dict.fromkeys(formats.part_names("h", format), "h")
        assert narrowing.part_names({"h": narrowing.narrow_packer(format)}) == parts
