# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which whole numbers PyTorch computes, because their rounding decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.libraries.ops import LIBRARY, NO_LIBRARIES, ROUNDING, Libraries, library_ops
from retrograd.frontend.preparation import rounded_constants
from retrograd.frontend.preparation.rounded_constants import mark_rounded_places

Function = Callable[[Tensor, Tensor], Tensor]
ALL = Libraries(cpu=1)


def marked(function: Function, libraries: Libraries = ALL, mode: Literal["fake", "symbolic"] = "fake") -> list[str]:
    """The ops that are left to PyTorch, of a function of eight floats and eight whole numbers."""
    graph_module = make_fx(function, tracing_mode=mode)(torch.ones(8), torch.arange(8))
    with library_ops(libraries):
        mark_rounded_places(graph_module)
    return [str(node.target) for node in graph_module.graph.nodes if node.meta.get(LIBRARY) == ROUNDING]


def test_buckets_of_positions() -> None:
    """From the first float on to the whole number; the rest is compiled."""
    found = marked(lambda x, p: x * (8 + (torch.log(p.float() / 8) * 3).to(torch.long)))
    assert found == [
        "aten._to_copy.default",
        "aten.div.Tensor",
        "aten.log.default",
        "aten.mul.Tensor",
        "aten._to_copy.default",
    ]


def test_places_along_an_open_size() -> None:
    def function(x: Tensor, p: Tensor) -> Tensor:
        return x * torch.arange(1, x.shape[0] + 1).log2().floor()

    assert marked(function, mode="symbolic") == ["aten.log2.default", "aten.floor.default"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, p: x * (x.exp() * 3).to(torch.long),
        lambda x, p: x * (p.float() * x).exp().floor(),
        lambda x, p: x * (p.float() / 3).floor(),
        lambda x, p: x * (p.float().exp() * 3),
        lambda x, p: x * (p % 3),
        lambda x, p: x * (torch.rand(8).exp() * p).floor(),
    ],
    ids=["floats", "floats too", "exactly rounded", "no whole number", "no float", "random"],
)
def test_what_stays_compiled(function: Function) -> None:
    assert marked(function) == []


def test_without_libraries_all_is_compiled() -> None:
    def function(x: Tensor, p: Tensor) -> Tensor:
        return x * (p.float().exp() > 3)

    assert len(marked(function)) == 3
    assert marked(function, NO_LIBRARIES) == []


def test_large_tensors_stay_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounded_constants, "MOST_ELEMENTS", 7)
    assert marked(lambda x, p: x * (p.float().exp() > 3)) == []
