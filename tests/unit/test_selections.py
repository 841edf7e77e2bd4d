# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What is computed from ``x[mask]`` can be traced where it is computed element by element, and is eager's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.python.source_locations import CaptureError
from retrograd.frontend.traceable.content_free import TraceableFunctions

Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def written(write: Callable[[Tensor, Tensor, Tensor], None]) -> Function:
    """All of a tensor that part of was written to."""

    def run(x: Tensor, y: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        out = x * 1
        write(out, y, mask)
        return out.square().sum()

    return run


def assign(x: Tensor, y: Tensor, mask: Tensor) -> None:
    x[mask] = y[mask].exp()


def add(x: Tensor, y: Tensor, mask: Tensor) -> None:
    x[mask] += 1


def scale(x: Tensor, y: Tensor, mask: Tensor) -> None:
    x[mask] *= y[mask]


def logarithm(x: Tensor, y: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Neither the values nor the derivatives at what is left out are numbers."""
    positive = x > 0
    return x[positive].log().sum() + torch.masked_select(y, positive).mean()


def experts(x: Tensor, y: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Each on the rows that chose it, weighted."""
    out = torch.zeros(6, 3)
    for number in range(2):
        rows, slots = torch.where(labels.clamp(0, 3).reshape(6, 2) == number)
        hidden = F.linear(x.reshape(12, 5)[rows], y[number]).tanh()
        out.index_add_(0, rows, hidden * y[..., 0].reshape(6, 2)[rows, slots, None])
    return out.square().sum()


def add_experts(x: Tensor, y: Tensor, mask: Tensor) -> None:
    """As Mistral's reference code adds up what experts give, each on the rows that chose it."""
    for number in range(2):
        rows, slots = torch.where(mask == bool(number))
        x[rows] += y[rows, slots, 0, None, None] * F.linear(x[rows], y[number, 0].outer(y[2, 1])).tanh()


def rows_twice(x: Tensor, y: Tensor, mask: Tensor) -> None:
    """Of several values for one row the last stays; the gradient is that of PyTorch's formula."""
    rows, slots = torch.where(mask)
    x[rows] = y[rows] * y[rows, slots, None]


def assign_rows(x: Tensor, y: Tensor, mask: Tensor) -> None:
    (rows,) = torch.where(mask[:, 0])
    x[rows] = y[rows].exp()


def scale_rows(x: Tensor, y: Tensor, mask: Tensor) -> None:
    (rows,) = mask[:, 1].nonzero(as_tuple=True)
    x[rows] *= 2 * y[rows]


FUNCTIONS: dict[str, Function] = {
    "experts": experts,
    "places": lambda x, y, m, i: (x[torch.where(m)] * y[m.nonzero(as_tuple=True)]).square().sum(),
    "parts at places": lambda x, y, m, i: (
        x[m.nonzero()[:, 0], 1, :3] * y[torch.where(m)[0], :, 2, None].sum(-1)
    ).mean(),
    "places by axis": lambda x, y, m, i: x[m.nonzero()[:, 0]].sin().mean(),
    "labels at places": lambda x, y, m, i: F.cross_entropy(x[torch.where(m)], i[torch.where(m)]),
    "add experts": written(add_experts),
    "rows twice": written(rows_twice),
    "numbers at places": written(lambda x, y, m: x.__setitem__(torch.where(m), 2)),
    "a token at places": written(lambda x, y, m: x.__setitem__(torch.where(m), y[0, 0])),
    "parts of places": written(lambda x, y, m: x.__setitem__((torch.where(m)[0] - 4, ...), y[torch.where(m)[0]])),
    "assign rows": written(assign_rows),
    "scale rows": written(scale_rows),
    "sum": lambda x, y, m, i: x[m].sum(),
    "mean of squares": lambda x, y, m, i: (x[m] - y[m]).square().mean(),
    "logarithm": logarithm,
    "cross entropy": lambda x, y, m, i: F.cross_entropy(x[m], i[m]),
    "smoothed sum": lambda x, y, m, i: F.cross_entropy(x[m], i[m], reduction="sum", label_smoothing=0.1),
    "another label to ignore": lambda x, y, m, i: F.nll_loss(F.log_softmax(x[m], -1), i[m].clamp(0), ignore_index=0),
    "squares": lambda x, y, m, i: F.mse_loss(x[m], y[m]),
    "each, then their mean": lambda x, y, m, i: F.smooth_l1_loss(input=x[m], target=y[m], reduction="none").mean(),
    "logits": lambda x, y, m, i: F.binary_cross_entropy_with_logits(x[m], y[m].sigmoid()),
    "losses that are chosen from": lambda x, y, m, i: F.mse_loss(x, y, reduction="none")[m].mean(),
    "rows": lambda x, y, m, i: (F.linear(x[m], y[0]).softmax(-1) * torch.arange(3.0)).sum(0).sum(),
    "parts": lambda x, y, m, i: x[m][:, 1].mean(0) + x[m][..., -2:].sum(-1).exp().sum(),
    "beside other axes": lambda x, y, m, i: (
        x[m, :].sin().sum() + (x[m, 1] * y[m, -1]).sum() + (x[m, ..., 1:4] - y[m[:, 0], 0, 1:4].sum()).square().mean()
    ),
    "extremes": lambda x, y, m, i: x[m].max() + y[m].min() + (x[m] > 9).any() + (x[m] > -9).all(),
    "choice": lambda x, y, m, i: torch.where(x[m] > y[m], 2 / x[m], torch.ones(5) * y[m]).sum(),
    "list": lambda x, y, m, i: x[[True, False, False, True]].std(),
    "assign": written(assign),
    "add": written(add),
    "scale": written(scale),
}


def arguments() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    mask, labels = torch.rand(4, 3) > 0.5, torch.randint(5, (4, 3))
    mask[0, 0], labels[0, 0] = True, -100
    return torch.randn(4, 3, 5), torch.randn(4, 3, 5), mask, labels


@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_as_eager(name: str) -> None:
    given = arguments()

    def run(x: Tensor, y: Tensor, mask: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        leaves = x.detach().requires_grad_(), y.detach().requires_grad_()
        result = FUNCTIONS[name](*leaves, mask, labels)
        return result.detach(), *torch.autograd.grad(result, leaves, materialize_grads=True)

    with TraceableFunctions():
        traced = make_fx(run, tracing_mode="fake")(*given)
    torch.testing.assert_close(traced(*given), run(*given))
    # Other elements are chosen by another mask, which may choose none.
    given[2].logical_not_()
    torch.testing.assert_close(traced(*given), run(*given))


def changed_mask(x: Tensor, y: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    mask = mask.clone()
    chosen = x[mask]
    mask &= y[..., 0] > 0
    return (chosen * y[mask]).sum()


def another_name(x: Tensor, y: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    chosen = x[mask]
    same = chosen.float()
    chosen += 1
    return same.sum()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def by_custom_function(x: Tensor, y: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    doubled: Tensor = Doubled.apply(x[mask])  # type: ignore[no-untyped-call]
    return doubled.sum()


def by_hooked_module(x: Tensor, y: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    layer = torch.nn.Tanh()
    layer.register_full_backward_hook(lambda module, given, wanted: (given[0] * 3,))  # type: ignore[index]
    result: Tensor = layer(x[mask]).sum()
    return result


def by_modules(x: Tensor, y: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    layer = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Dropout(0.0))
    layer.chosen = x[mask]
    result: Tensor = layer(layer.chosen).sum()
    return result


REFUSED: dict[str, tuple[Function, str]] = {
    "places that are not chosen": (
        written(lambda x, y, m: x.__setitem__(torch.where(m), torch.ones(7, 5))),
        "not chosen from",
    ),
    "places of two masks": (
        written(lambda x, y, m: x.__setitem__((torch.where(m)[0], torch.where(~m)[1]), 0)),
        "two masks choose",
    ),
    "values of another mask": (written(lambda x, y, m: x.__setitem__(torch.where(m), y[~m])), "two masks choose"),
    "indices of two masks": (lambda x, y, m, i: x[torch.where(m)[0], torch.where(~m)[1]].sum(), "two masks choose"),
    "other indices beside": (lambda x, y, m, i: x[torch.where(m)[0], i[0]].sum(), "beside other indices"),
    "how many": (lambda x, y, m, i: x.sum() / torch.where(m)[0].numel(), "numel, where"),
    "places of places": (lambda x, y, m, i: x[torch.where(torch.where(m)[0] > 1)].sum(), "where, where"),
    "sums along another axis": (
        lambda x, y, m, i: x[..., 0].index_add(1, torch.where(m)[1], x[torch.where(m)]).sum(),
        "index_add along",
    ),
    "length": (lambda x, y, m, i: x[m].sum() / len(x[m]), r"len\(\), where .*test_selections.py"),
    "shape": (lambda x, y, m, i: x[m].sum() / x[m].shape[0], "shape, where the size of x"),
    "deviation": (lambda x, y, m, i: x[m].std(), "std, where"),
    "two masks": (lambda x, y, m, i: (x[x > 0] * y[y > 0]).sum(), "two masks choose"),
    "a mask that was written to": (changed_mask, "two masks choose"),
    "memory that was written to": (another_name, "by another name"),
    "written elsewhere": (written(lambda x, y, m: x.__setitem__(m, y[y[..., 0] > 0])), "by another mask"),
    "rows that are not chosen": (lambda x, y, m, i: (x[m] * torch.ones(3, 5)).sum(), "not chosen from"),
    "targets that are not chosen": (lambda x, y, m, i: F.mse_loss(x[m], torch.ones(5)), "not chosen from"),
    "a module with hooks": (by_hooked_module, "backward hooks of a module"),
    "a custom function": (by_custom_function, "torch.autograd.Function of it"),
    "numpy": (lambda x, y, m, i: x.sum() * np.asarray(x[m].detach()).sum(), r"numpy\(\), where"),
    "weights of classes": (lambda x, y, m, i: F.cross_entropy(x[m], i[m], weight=y[0, 0]), "with weights"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, message = REFUSED[name]
    with TraceableFunctions(), pytest.raises(CaptureError, match=message):
        make_fx(function, tracing_mode="fake")(*arguments())


def by_class(x: Tensor, y: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    chosen = x[mask]
    is_known = isinstance(chosen, list | Tensor) and torch.is_tensor(chosen)
    return chosen.sum() if is_known and not isinstance(chosen, tuple | torch.nn.Parameter) else x.sum() * 0


def test_what_is_chosen_is_a_tensor_to_the_model() -> None:
    given = arguments()
    for function in (by_class, by_modules):
        with TraceableFunctions():
            traced = make_fx(function, tracing_mode="fake")(*given)
        torch.testing.assert_close(traced(*given), function(*given))
