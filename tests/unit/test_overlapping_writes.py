# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Writes to views in which elements are one in memory are traced as eager carries them out, or refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.decompositions.table import decomposition_table
from retrograd.frontend.python.source_locations import CaptureError
from retrograd.frontend.traceable.overlapping_writes import OverlappingWrites

Write = Callable[[Tensor], object]


def ramp(v: Tensor) -> Tensor:
    """Four numbers, made where ``v`` is traced."""
    return torch.arange(4.0, dtype=v.dtype)


def ones(_v: Tensor) -> Tensor:
    """Two places."""
    return torch.ones(2, dtype=torch.int64)


# What is done to v of axes 4 and 3, which is expanded from axes 4 and 1.
CARRIED_OUT: dict[str, Write] = {
    "fill all": lambda v: v.fill_(0.5),
    "fill rows": lambda v: v[:2].fill_(0.5),
    "zero": lambda v: v.zero_(),
    "fill one of each": lambda v: v[:, 1].fill_(0.5),
    "multiply one of each": lambda v: v[:, 1].mul_(3),
    "assign to one of each": lambda v: v.__setitem__((slice(None), 2), v[:, 0] * ramp(v)),
    "one element": lambda v: v.__setitem__((1, 2), 0.25),
    "diagonal": lambda v: v.diagonal().fill_(8.0),
    "turned": lambda v: v.t()[:, ::2].fill_(0.5),
    "one after another": lambda v: (v[:2].fill_(0.5), v[:, 0].mul_(2), v.view(4, 3)[3].zero_()),
    "on an axis of one": lambda v: v[:, :1].mul_(ramp(v)[:, None]),
    "result": lambda v: torch.mul(ramp(v), 2, out=v[:, 0]),
    "many at once": lambda v: torch._foreach_mul_([v[2:, 0], v[:2, 1]], 3.0),
}
# Eager refuses some of them, others depend on the order of elements, or on which of those that are one is written.
REFUSED: dict[str, Write] = {
    "mul_": lambda v: v.mul_(2),
    "fill_": lambda v: v[1:].fill_(v[2, 0] * 0 + 0.5),
    "add_": lambda v: v[0].add_(1),
    "masked_fill_": lambda v: v.masked_fill_(v > 2, 0.5),
    "index_put_": lambda v: v.__setitem__((ones(v), ones(v)), ramp(v)[:2]),
    "index_fill_": lambda v: v.index_fill_(0, ones(v), 0.5),
    "copy_": lambda v: v.copy_(ramp(v)[:3]),
}


def traced(function: Callable[..., Tensor], *args: Tensor) -> Callable[..., Tensor]:
    with OverlappingWrites():
        functional = dispatch_functionalize(function)
        graph: Callable[..., Tensor] = make_fx(functional, decomposition_table(), tracing_mode="fake")(*args)
    return graph


def after(write: Write, scale: float = 2.0) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        y = x * scale
        v = y.expand(4, 3)
        write(v)
        return torch.stack((v * x, y + x * v))

    return run


@pytest.mark.parametrize("name", CARRIED_OUT)
def test_as_in_eager(name: str) -> None:
    """To the bit: nothing is written as a difference, which rounds."""
    x, run = torch.arange(1.0, 5.0).reshape(4, 1), after(CARRIED_OUT[name], 1e8)
    assert torch.equal(traced(run, x)(x), run(x))


def test_infinities() -> None:
    """Of which differences are NaN."""
    x, run = torch.ones(4, 1), after(lambda v: v[:, 1].fill_(1.0), float("-inf"))
    assert torch.equal(traced(run, x)(x), run(x))


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    x = torch.ones(4, 1)
    with pytest.raises(CaptureError, match=rf"aten\.{name}\.\w+ writes to .* several elements are one(.|\n)*clone\(\)"):
        traced(after(REFUSED[name]), x)


def test_windows() -> None:
    """Views of another kind: to one window at a time everything can be written, to all of them nothing."""

    def one(x: Tensor) -> Tensor:
        y = x * 2
        windows = y.unfold(0, 3, 1)
        windows[1].mul_(x[:3])
        return y + windows.sum()

    def every(x: Tensor) -> Tensor:
        y = x * 2
        y.unfold(0, 3, 1).mul_(3)
        return y

    x = torch.arange(1.0, 6.0)
    assert torch.equal(traced(one, x)(x), one(x))
    with pytest.raises(CaptureError, match="elements are one in memory"):
        traced(every, x)


def test_views_by_sizes_and_strides() -> None:
    """Once one of them sees elements several times, only the tensor itself is written to."""

    def write(x: Tensor) -> Tensor:
        y = x * 2
        y.as_strided((3, 2), (1, 1))[0].mul_(3)
        return y

    def apart(x: Tensor) -> Tensor:
        y = x * 2
        y.as_strided((2, 2), (1, 2))[0].mul_(3)
        return y

    def expanded(x: Tensor) -> Tensor:
        y = x * 2
        y.as_strided((2, 2, 1), (1, 2, 1)).expand(2, 2, 3)[..., 0].mul_(3)
        return y

    x = torch.arange(1.0, 5.0)
    assert torch.equal(traced(apart, x)(x), apart(x))
    for function in (write, expanded):
        with pytest.raises(CaptureError, match=r"that as_strided\(\) sees some elements of several times"):
            traced(function, x)


def test_other_writes_stay_as_they_are() -> None:
    """Those to tensors of which there is no such view, or an expanded one of a single element."""

    def run(x: Tensor) -> Tensor:
        y = x * 2
        y.expand(1, 4, 1)[0].mul_(3)
        y[:2].add_(1)
        return y

    x = torch.arange(1.0, 5.0).reshape(4, 1)
    graph = traced(run, x)
    assert torch.equal(graph(x), run(x))
    assert "as_strided" not in str(graph.graph)  # type: ignore[attr-defined]


def test_open_sizes_are_refused() -> None:
    """A view by sizes and strides has none."""

    def run(x: Tensor) -> Tensor:
        y = x * 2
        y.expand(x.shape[0], 3)[:, 1].fill_(0.5)
        return y

    x = torch.ones(4, 1)
    with OverlappingWrites(), pytest.raises(CaptureError, match="its sizes are open"):
        make_fx(dispatch_functionalize(run), tracing_mode="symbolic")(x)
