# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Distances and grids as decompositions, against eager; nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd.frontend.decompositions.table import DECOMPOSITIONS
from retrograd.frontend.decompositions.views import copies

aten = torch.ops.aten
FUNCTIONS = {entry.op: entry.function for entry in DECOMPOSITIONS}
EPSILON = 1e-10


class Decomposed(TorchDispatchMode):
    """Runs what the table has for ``ops`` in their place, and notes which of them were asked for."""

    def __init__(self, *ops: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops, self.seen = ops, set[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.ops:
            return func(*args, **(kwargs or {}))
        self.seen.add(func)
        # As the tracer does it, so that ops without tensors among their arguments find a mode.
        with self:
            return FUNCTIONS[func](*args, **(kwargs or {}))


def check(function: Callable[..., Tensor], *inputs: Tensor, ops: tuple[Any, ...]) -> None:
    """The result and the gradients of ``function``, with ``ops`` decomposed and without."""

    def run() -> list[Tensor | None]:
        leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
        out = function(*leaves)
        torch.manual_seed(1)
        wanted = [t for t in leaves if t.requires_grad]
        return [out.detach(), *torch.autograd.grad(out, wanted, torch.randn_like(out), allow_unused=True)]

    expected = run()
    with Decomposed(*ops) as mode:
        found = run()
    assert mode.seen == set(ops)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=EPSILON, atol=EPSILON, equal_nan=True)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, float("inf")])
def test_distances(p: float) -> None:
    x, y = numbers(2, 1, 4, 3), numbers(5, 3)
    ops = (aten._cdist_forward.default, aten._cdist_backward.default)
    check(lambda x, y: torch.cdist(x, y, p), x, y, ops=ops)
    # Rows that are equal have no derivative, which is zero here.
    check(lambda x, y: torch.cdist(x, y, p), x[0, 0], torch.cat([x[0, 0, :1], y]), ops=ops)
    unknown = FUNCTIONS[aten._cdist_forward.default](x, torch.full_like(y, torch.nan), p)
    assert unknown.isnan().all()


@pytest.mark.parametrize("dim", [None, (), 1, (0, -1)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_norms_of_orders_that_are_rounded(dim: Any, keepdim: bool) -> None:
    def smallest_and_largest(x: Tensor) -> Tensor:
        found: Tensor = torch.linalg.vector_norm(x, -2.1, dim, keepdim) - torch.linalg.vector_norm(x, 0.9, dim, keepdim)
        return found

    check(smallest_and_largest, numbers(2, 3, 4), ops=(aten.linalg_vector_norm.default,))


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align", [False, True])
def test_grid_sample(mode: str, padding: str, align: bool) -> None:
    ops = (aten.grid_sampler_2d.default, aten.grid_sampler_2d_backward.default)
    sample: Any = F.grid_sample
    for sizes in ((5, 6), (1, 3)):
        # Places up to twice as far out as the image reaches.
        x, grid = numbers(2, 3, *sizes), numbers(2, 4, 3, 2)
        check(lambda x, g: sample(x, g, mode, padding, align), x, grid, ops=ops)
    if mode != "bicubic":
        volume = (aten.grid_sampler_3d.default, aten.grid_sampler_3d_backward.default)
        check(
            lambda x, g: sample(x, g, mode, padding, align), numbers(2, 3, 4, 5, 6), numbers(2, 2, 3, 4, 3), ops=volume
        )


def test_grid_sample_of_one_argument() -> None:
    ops = (aten.grid_sampler_2d.default, aten.grid_sampler_2d_backward.default)
    x, grid = numbers(1, 2, 4, 4), numbers(1, 3, 3, 2)
    check(lambda x: F.grid_sample(x, grid, align_corners=False), x, ops=ops)
    check(lambda g: F.grid_sample(x, g, align_corners=False), grid, ops=ops)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_replication_pad(axes: int) -> None:
    op = getattr(aten, f"replication_pad{axes}d_backward").default
    for amounts in ([2, 1, 0, 3, 1, 1], [-1, 2, 1, -2, 0, -1]):
        pad = amounts[: 2 * axes]
        check(lambda x, p=pad: F.pad(x, p, mode="replicate"), numbers(2, 3, *[5, 6, 4][:axes]), ops=(op,))


def test_masked_scatter() -> None:
    op = aten.masked_scatter_backward.default
    mask = torch.tensor([[True], [False], [True]])
    check(lambda x, s: x.masked_scatter(mask, s), numbers(3, 4), numbers(3, 5), ops=(op,))
    ops = (op, aten.masked_scatter.default)
    check(lambda x, s: x.masked_scatter(mask, s), numbers(4), numbers(3, 5), ops=ops)
    check(lambda x, s: x.masked_scatter(mask[:, 0], s), numbers(2, 3), numbers(9), ops=ops)


@pytest.mark.parametrize("accumulate", [False, True])
def test_put(accumulate: bool) -> None:
    index = torch.tensor([[0, 5], [-1, 3]])
    check(lambda x, s: x.put(index, s, accumulate), numbers(3, 4), numbers(2, 2), ops=(aten.put.default,))


@pytest.mark.parametrize("entry", copies.ENTRIES, ids=lambda entry: str(entry.op))
def test_copies_of_views(entry: Any) -> None:
    arguments = {"diagonal": (1,), "expand": ([2, 3, 4],), "permute": ([1, 0],), "select": (0, -1), "slice": (1, 1, 3)}
    arguments |= {"split": (2,), "split_with_sizes": ([1, 2],), "squeeze.dim": (0,), "squeeze.dims": ([0],)}
    arguments |= {
        "as_strided": ([2, 3], [4, 1], 1),
        "transpose": (0, 1),
        "unfold": (1, 2, 1),
        "unsqueeze": (1,),
        "view": ([4, 3],),
    }
    name = str(entry.op).removeprefix("aten.").replace("_copy", "").removesuffix(".default")
    given = arguments.get(name, arguments.get(name.partition(".")[0], ()) if not name.startswith("squeeze") else ())
    x = numbers(3, 4)
    ours, theirs = entry.function(x, *given), entry.op(x, *given)
    for mine, reference in zip(*[[t] if isinstance(t, Tensor) else t for t in (ours, theirs)], strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=0)
        assert mine.is_contiguous() and mine.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
