# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attributes that a model sets to numbers, texts and sizes are set by each call, as in eager."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd


class Notes(nn.Module):
    """Notes what it was given, a count that does not matter, and an attribute that it puts back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.last: Any = None
        self.size: Any = None
        self.rows = 2
        self.calls = 0
        self.mode = "a"

    def forward(self, x: Tensor) -> Tensor:
        self.last = {"shape": tuple(x.shape), "kind": [None, "text"]}
        self.size = x.shape
        self.rows = len(x)
        self.calls += 1
        for name in ("mode",):
            before = getattr(self, name)
            setattr(self, name, "b")
            setattr(self, name, before)
        return self.linear(x).square().sum()  # type: ignore[no-any-return]


def noted(model: Any) -> list[Any]:
    """What is compared: values, and the type of the size."""
    return [model.last, model.size, type(model.size), model.rows, model.mode]


def test_values_are_set_as_in_eager(tmp_path: Path) -> None:
    model, x = Notes(), torch.randn(2, 3)
    expected, other = copy.deepcopy(model), copy.deepcopy(model)
    step = retrograd.compile_backward(model, (x,))
    assert (model.last, model.size, model.calls) == (None, None, 0)
    step.save(tmp_path / "model.vmfb")
    loaded = retrograd.load(tmp_path / "model.vmfb", other)
    for number in range(3):
        for one, call in ((model, step), (expected, expected), (other, loaded)):
            if number == 2:
                one.last, one.size, one.rows, one.mode = "other", None, 7, "c"
            call(x).backward()
        assert noted(model) == noted(expected) == noted(other)
    torch.testing.assert_close(model.linear.weight.grad, expected.linear.weight.grad)
    # What the model does not read is compiled for once.
    assert step.specializations is not None and len(step.specializations.texts) == 1
    assert step.explain().to_dict()["left_attributes"] == ["calls is another value at each call"]
    assert "attributes that no call sets" in str(step.explain())


class Grid(nn.Module):
    """Keeps a grid for the sizes that it was made for, as Fourier neural operators do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self._grid: Tensor | None = None
        self._size: Any = None
        self.scale: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self._size != x.shape[1:]:
            self._grid, self._size = torch.linspace(0, 1, x.shape[1]), x.shape[1:]
        if self.scale is None:
            self.scale = 3
        return (self.linear(x) * self.scale).square().sum() * self._grid.sum()  # type: ignore[no-any-return, union-attr]


def test_a_grid_that_is_kept_with_its_sizes() -> None:
    model, x = Grid(), torch.randn(2, 3)
    expected = copy.deepcopy(model)
    step = retrograd.compile_backward(model, (x,))
    for number in range(4):
        for one, call in ((model, step), (expected, expected)):
            if number == 3:
                one._size = one._grid = one.scale = None
            call(x).backward()
        assert (model._size, type(model._size), model.scale) == (expected._size, torch.Size, 3)
        torch.testing.assert_close(model._grid, expected._grid)
        torch.testing.assert_close(model.linear.weight.grad, expected.linear.weight.grad)
    assert step.specializations is not None and len(step.specializations.texts) == 1


class Scaled(Notes):
    """Works out a number once."""

    def forward(self, x: Tensor) -> Tensor:
        if self.size is None:
            self.size = 3
        return (self.linear(x) * self.size).sum()  # type: ignore[no-any-return]


def test_another_value_than_was_and_is_set() -> None:
    model, x = Scaled(), torch.randn(2, 3)
    expected = copy.deepcopy(model)
    step = retrograd.compile_backward(model, (x,))
    for size, others in ((None, 0), (3, 0), (5, 1)):
        for one, call in ((model, step), (expected, expected)):
            one.size = size
            call(x).backward()
        assert model.size == expected.size
        torch.testing.assert_close(model.linear.weight.grad, expected.linear.weight.grad)
        assert step.specializations is not None and len(step.specializations.texts) == others


class Kind(Notes):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x.dtype
        self.rows = x.shape[0]
        return self.linear(x).sum()  # type: ignore[no-any-return]


def test_what_a_file_and_open_sizes_do_not_hold(tmp_path: Path) -> None:
    model, x = Kind(), torch.randn(4, 3)
    rows = torch.export.Dim("rows", min=2)
    step = retrograd.compile_backward(model, (x,), dynamic_shapes={"x": {0: rows}})
    step(torch.randn(5, 3)).backward()
    assert (model.last, model.rows) == (torch.float32, 2)
    assert step.explain().to_dict()["left_attributes"] == ["rows depends on an open size"]
    with pytest.raises(retrograd.ArtifactError, match=r"sets 'last' to torch.float32.*numbers or texts"):
        step.save(tmp_path / "model.vmfb")


class Turns(Notes):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.last = (self.calls, "calls")
        return (self.linear(x) * self.calls).sum()  # type: ignore[no-any-return]


def test_a_count_that_matters_is_refused() -> None:
    model = Turns()
    with pytest.raises(retrograd.CaptureError, match=r"otherwise each time(?s:.*)calls"):
        retrograd.compile_backward(model, (torch.randn(2, 3),))
    assert (model.calls, model.last) == (0, None)
