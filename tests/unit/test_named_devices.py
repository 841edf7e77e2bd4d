# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tensors of retrograd's own lie where the code says: ``torch.set_default_device`` is for those of the user."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

ROOT = Path(__file__).parents[2]
# What puts a tensor on the default device where no device is named.
CONSTRUCTORS = {function.__name__ for function in _device_constructors()}


def find_unplaced(source: str) -> Iterator[int]:
    """The lines that make a tensor on whatever device is the default."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        named = {keyword.arg for keyword in node.keywords}
        owner = node.func.value
        is_torchs = isinstance(owner, ast.Name) and owner.id == "torch"
        if is_torchs and node.func.attr in CONSTRUCTORS and not named & {"device", None}:
            yield node.lineno


@pytest.mark.parametrize("folder", ["frontend", "retrograd", "runtime"])
def test_own_tensors_are_made_on_a_named_device(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if ".venv" not in path.parts
        for line in find_unplaced(path.read_text())
    ]
    assert not found, "name a device: torch.set_default_device may say another than the CPU"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("torch.zeros(2)", [1]),
        ("x = torch.empty(3, dtype=torch.int64)\ntorch.arange(4)", [1, 2]),
        ("torch.zeros(2, device='cpu'); torch.rand(3, **placed); torch.zeros_like(x); x.new_zeros(2)", []),
    ],
)
def test_a_tensor_without_a_device_is_found(source: str, lines: list[int]) -> None:
    assert list(find_unplaced(source)) == lines
    assert {"zeros", "tensor", "randint"} <= CONSTRUCTORS
    assert torch.zeros.__name__ in CONSTRUCTORS
