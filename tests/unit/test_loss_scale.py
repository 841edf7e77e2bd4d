# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""First calls of backwards whose gradients overflow in float16 are judged by smaller tangents."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule

from retrograd.frontend.verification.first_call import Fault, FirstCall
from retrograd.frontend.verification.loss_scale import are_finite, make_smaller
from retrograd.frontend.verification.reference_graph import Graph


class Keeping:
    """Care that keeps a wrong function in torch."""

    faults: list[str]

    def __init__(self) -> None:
        self.faults = []

    def is_known(self) -> bool:
        return False

    def remember(self) -> None:
        pass

    def forget(self) -> None:
        pass

    def refuse(self, message: str) -> None:
        self.faults.append(message)

    def leave(self, message: str) -> None:
        self.faults.append(message)

    def repair(self, fault: Fault) -> None:
        self.faults.append(fault.message)


def make_backward(*, first: float, then: float) -> GraphModule:
    """The gradient of a product. In float16 it overflows on the way where it is made large first."""
    graph = FxGraph()
    saved, tangent = graph.placeholder("saved"), graph.placeholder("tangents_1")
    scaled = graph.call_function(torch.ops.aten.mul.Tensor, (tangent, first))
    product = graph.call_function(torch.ops.aten.mul.Tensor, (scaled, saved))
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (product, then)),))
    return GraphModule(torch.nn.Module(), graph)


OVERFLOWS, FITS = make_backward(first=1.0, then=2.0**-10), make_backward(first=2.0**-10, then=1.0)


def check(
    compiled: Callable[[list[Any]], list[Any]], scale: float, backward: GraphModule = OVERFLOWS
) -> tuple[FirstCall, Keeping, list[Any], Tensor]:
    torch.manual_seed(0)
    saved, tangent = torch.randn(64).half() * 4, torch.full((64,), scale, dtype=torch.float16)
    care, graph = Keeping(), Graph(backward, gradients=True)
    first = FirstCall("backward", torch.device("cpu"), compiled, graph, care)
    return first, care, first([saved, tangent]), saved


def wide(tensors: list[Any]) -> list[Any]:
    """As a kernel that keeps its numbers in float32 has it."""
    saved, tangent = tensors
    return [(tangent.float() * saved.float() * 2.0**-10).half()]


def twice(tensors: list[Any]) -> list[Any]:
    return [gradient * 2 for gradient in wide(tensors)]


def test_what_overflows_in_eager_alone_is_right() -> None:
    first, care, (gradient,), saved = check(wide, 32768.0)
    assert not care.faults
    assert first.is_settled
    assert "verified" in first.state
    torch.testing.assert_close(gradient, (saved.float() * 32).half())


def test_what_overflows_compiled_alone_is_right() -> None:
    first, care, (gradient,), _ = check(lambda tensors: list(OVERFLOWS(*tensors)), 32768.0, FITS)
    assert not care.faults
    assert first.is_settled
    assert not are_finite([gradient])


def test_what_is_wrong_beside_an_overflow_is_found() -> None:
    first, care, (gradient,), saved = check(twice, 32768.0)
    assert len(care.faults) == 1
    assert "differs from eager's by" in care.faults[0]
    assert not first.is_settled
    # The graph's gradients, for the tangents as they were.
    torch.testing.assert_close(gradient, (saved.float() * 32).half())


class Repairing(Keeping):
    """Care that has a wrong function mended at once; it is what it repairs with, too."""

    is_done = True

    def __init__(self, repaired: Callable[[list[Any]], list[Any]]) -> None:
        super().__init__()
        self.repaired = repaired

    def repair(self, fault: Fault) -> Any:
        super().repair(fault)
        return self

    def result(self) -> Callable[[list[Any]], list[Any]]:
        return self.repaired


@pytest.mark.parametrize(("repaired", "state"), [(wide, "compiled otherwise since"), (twice, "runs in torch")])
def test_what_was_mended_is_judged_beside_what_is_never_a_number(
    repaired: Callable[[list[Any]], list[Any]], state: str
) -> None:
    saved, tangent = torch.ones(64).half(), torch.full((64,), 32768.0).half()
    saved[0] = math.nan
    calls: list[list[Any]] = []

    def counted(tensors: list[Any]) -> list[Any]:
        calls.append(tensors)
        return repaired(tensors)

    care = Repairing(counted)
    first = FirstCall("backward", torch.device("cpu"), twice, Graph(OVERFLOWS, gradients=True), care)
    first([saved, tangent])
    assert len(care.faults) == 1 and not first.is_settled
    (gradient,) = first([saved, tangent])
    assert float(gradient[1]) == 32.0 and gradient[0].isnan()
    assert state in first.state
    # It is decided, and compared no more.
    count = len(calls)
    first([saved, tangent])
    assert len(calls) - count == (repaired is wide)


def test_small_tangents_are_judged_as_they_are() -> None:
    _, care, _, _ = check(twice, 1.0)
    assert len(care.faults) == 1


def test_tangents_are_made_smaller_by_powers_of_two_down_to_one() -> None:
    module = OVERFLOWS
    saved = torch.ones(3)
    for scale, expected in ((65536.0, 256.0), (300.0, 300 / 256), (5.0, 5 / 8), (2.0, 1.0)):
        smaller = make_smaller(module, [saved, torch.tensor([scale, 0.0, -1.0])])
        assert smaller is not None
        assert smaller.arguments[0] is saved
        assert float(smaller.arguments[1].abs().max()) == expected
        assert smaller.enlarge([smaller.arguments[1], None])[0][0] == scale


@pytest.mark.parametrize("scale", [1.0, 0.0, math.inf, math.nan])
def test_what_is_small_or_no_number_is_left(scale: float) -> None:
    assert make_smaller(OVERFLOWS, [torch.ones(1), torch.tensor([scale])]) is None


def test_are_finite() -> None:
    assert are_finite([torch.ones(2), None, torch.tensor([1]), 3, torch.empty(0)])
    assert not are_finite([torch.ones(2), torch.tensor([1.0, math.nan])])
    assert not are_finite([torch.tensor([complex(0, math.inf)])])
