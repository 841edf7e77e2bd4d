# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``verify=True`` allows what rounding explains and nothing else. What is "compiled" here is eager code that is off."""

import contextlib
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.doors.capture import capture_joint
from retrograd.frontend.layers.random_ops import DRAW_SEED, UNIFORM
from retrograd.frontend.verification.errors import VerificationError
from retrograd.frontend.verification.first_comparison import compare_with_eager, relative_error
from retrograd.frontend.verification.reference_graph import Graph

Call = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class Halves(nn.Module):
    """One weight is multiplied under autocast, the other never in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.randn(16, 16))
        self.high = nn.Parameter(torch.randn(4, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ self.low).float().sin(), self.high * 3


def compare(call: Call, *, autocast: bool) -> None:
    """Whether ``call``, of the parameters and ``x``, gives what the model gives."""
    torch.manual_seed(0)
    model, x = Halves(), torch.randn(4, 16)
    with contextlib.ExitStack() as stack, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        captured = capture_joint(stack, model, (x,))
    compare_with_eager(call, captured, [model.low, model.high, x], reference=eager(autocast))


def eager(autocast: bool) -> Call:
    def run(primals: Sequence[Tensor]) -> Sequence[Tensor]:
        low, high, x = primals
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return (x @ low).float().sin(), high * 3

    return run


def exact(primals: Sequence[Tensor]) -> Sequence[Tensor]:
    """In float32 throughout."""
    return eager(False)(primals)


def high_off(primals: Sequence[Tensor]) -> Sequence[Tensor]:
    """The gradient that has no bfloat16 in it is off by what bfloat16 would explain."""
    first, second = exact(primals)
    return first, second.detach() + (primals[1] - primals[1].detach()) * 3.01


def low_off(primals: Sequence[Tensor]) -> Sequence[Tensor]:
    """The other one is off by more than that."""
    first, second = exact(primals)
    return first.detach() + (first - first.detach()) * 1.1, second


def test_under_autocast_rounding_elsewhere_is_right() -> None:
    compare(exact, autocast=True)


@pytest.mark.parametrize(("call", "name"), [(high_off, "high"), (low_off, "low")])
def test_more_than_rounding_explains_is_wrong(call: Call, name: str) -> None:
    with pytest.raises(VerificationError, match=f"gradient of {name}"):
        compare(call, autocast=True)


def test_without_autocast_rounding_to_bfloat16_is_wrong() -> None:
    compare(exact, autocast=False)
    with pytest.raises(VerificationError, match=r"1e-04 is allowed for torch\.float32"):
        compare(eager(True), autocast=False)


def test_relative_error() -> None:
    nan, inf = math.nan, math.inf
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])) == 0
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(torch.tensor([nan, inf, 1.0]), torch.tensor([nan, inf, 1.0])) == 0
    assert relative_error(torch.tensor([nan, 1.0]), torch.tensor([0.0, 1.0])) == inf
    assert relative_error(torch.tensor([0.0, 1.0]), torch.tensor([nan, 1.0])) == inf
    assert relative_error(torch.tensor([inf, 1.0]), torch.tensor([-inf, 1.0])) == inf
    assert relative_error(torch.tensor([inf]), torch.tensor([1.0])) == inf
    assert relative_error(torch.tensor([nan]), torch.tensor([inf])) == inf
    assert relative_error(torch.tensor([True]), torch.tensor([False])) > 1
    assert relative_error(torch.empty(0), torch.empty(0)) == 0


def test_random_numbers_are_drawn_where_the_tensors_are() -> None:
    """A seed is the CPU's, and what is drawn from it goes to the device of the rest."""

    def model(x: Tensor) -> Tensor:
        numbers: Tensor = UNIFORM(DRAW_SEED(), 0, [4])
        return x * numbers.to(x.device)

    with FakeTensorMode():
        traced = make_fx(model)(torch.empty(4, device="cuda"))
    (drawn,) = Graph(traced, gradients=False).runnable.graph.find_nodes(op="call_function", target=UNIFORM)
    assert drawn.args[0].target is torch.ops.aten._to_copy.default
    assert drawn.args[0].kwargs == {"device": torch.device("cuda", 0)}
