# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decompositions of convolutions and their gradients against eager, from one tap to filters of many."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from decomposition_checks import assert_close, check, targets, trace, traced
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.decompositions.convolutions import convolution, correlation, im2col
from retrograd.frontend.decompositions.table import decomposition_table

aten = torch.ops.aten


def is_direct(node: torch.fx.Node) -> bool:
    """Whether a convolution is of the one kind that torch-mlir's own lowering is best at."""
    arguments: tuple[Any, ...] = node.args
    _, weight, _, stride, _, _, transposed, _, groups = arguments
    kernel = weight.meta["val"].shape[2:]
    return bool(not transposed and groups == 1 and all(s == 1 for s in stride) and math.prod(kernel) >= 9)


def check_convolution(op: Any, *args: Any) -> None:
    """Agrees with eager, and leaves no convolution but direct ones."""
    graph, tensors = trace(op, *args)
    left = [node for node in graph.graph.nodes if "convolution" in str(node.target)]
    assert all(node.target == aten.convolution.default and is_direct(node) for node in left)
    assert_close(graph(*tensors), op(*args))


CONVOLUTIONS = {
    # name: batch, channels, filters, spatial, kernel, stride, padding, dilation, groups
    "plain": (2, 3, 5, (7, 8), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "more_inputs": (2, 6, 3, (7, 8), (3, 2), (1, 1), (1, 0), (1, 1), 1),
    "stride": (2, 3, 4, (8, 9), (3, 3), (2, 3), (1, 0), (1, 1), 1),
    "dilated": (2, 3, 4, (9, 10), (3, 3), (1, 2), (2, 1), (2, 3), 1),
    "wide_padding": (1, 2, 3, (5, 5), (2, 2), (1, 1), (3, 3), (1, 1), 1),
    "one_by_one": (2, 4, 6, (5, 5), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "one_by_one_stride": (2, 4, 6, (6, 5), (1, 1), (2, 2), (0, 0), (1, 1), 1),
    "one_place": (3, 4, 6, (1, 1), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "one_place_of_planes": (3, 4, 6, (3, 2), (1, 1), (3, 2), (0, 0), (1, 1), 1),
    "one_place_of_padding": (3, 4, 6, (1,), (1,), (3,), (1,), (1,), 1),
    "one_place_of_one_image": (1, 4, 6, (1, 1), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "five": (2, 3, 4, (9, 9), (5, 5), (1, 1), (2, 2), (1, 1), 1),
    "seven_stride": (1, 3, 4, (15, 14), (7, 7), (2, 2), (3, 3), (1, 1), 1),
    "grouped": (2, 4, 6, (7, 7), (3, 3), (2, 1), (1, 1), (1, 2), 2),
    "depthwise": (2, 4, 4, (7, 7), (3, 3), (2, 1), (1, 1), (1, 1), 4),
    "depthwise_twice": (2, 3, 6, (7, 7), (3, 3), (1, 1), (1, 1), (1, 1), 3),
    "one_channel": (3, 1, 4, (8, 8), (3, 3), (1, 1), (0, 0), (1, 1), 1),
    "depthwise_seven": (2, 4, 8, (9, 8), (7, 5), (1, 2), (3, 2), (1, 2), 4),
    "patches": (2, 3, 4, (12, 9), (4, 4), (4, 4), (1, 0), (1, 1), 1),
    "grouped_patches_apart": (2, 4, 4, (13, 12), (4, 4), (5, 4), (0, 0), (1, 1), 2),
    "wide_stride": (1, 3, 2, (23, 20), (7, 5), (4, 3), (2, 1), (1, 1), 1),
    "line": (2, 3, 4, (11,), (3,), (2,), (1,), (1,), 1),
    "long_line": (2, 3, 4, (60,), (23,), (1,), (30,), (2,), 1),
    "long_dilated_stride": (2, 3, 4, (90,), (19,), (3,), (4,), (2,), 1),
    "wide_line": (1, 2, 3, (70,), (40,), (16,), (3,), (1,), 1),
    "large_volume": (1, 2, 4, (7, 6, 8), (2, 4, 5), (1, 2, 3), (1, 0, 2), (2, 1, 1), 2),
    "volume": (1, 2, 3, (5, 6, 5), (3, 2, 3), (1, 2, 1), (1, 0, 1), (1, 1, 1), 1),
}


TRANSPOSED = {
    # name: batch, channels, filters, spatial, kernel, stride, padding, dilation, groups, output padding
    "plain": (2, 3, 4, (5, 6), (3, 3), (1, 1), (1, 1), (1, 1), 1, (0, 0)),
    "one_place": (3, 4, 6, (1, 1), (1, 1), (2, 2), (0, 0), (1, 1), 1, (1, 0)),
    "stride": (2, 3, 4, (5, 6), (3, 4), (2, 2), (1, 1), (1, 1), 1, (1, 0)),
    "dilated_output_padding": (1, 2, 3, (5, 5), (3, 3), (1, 2), (0, 0), (3, 3), 1, (2, 2)),
    "grouped": (2, 4, 6, (5, 5), (3, 3), (2, 2), (1, 1), (1, 1), 2, (0, 1)),
    "depthwise": (2, 4, 4, (5, 5), (3, 3), (2, 2), (1, 1), (1, 1), 4, (1, 1)),
    "line": (2, 3, 4, (6,), (4,), (3,), (1,), (1,), 1, (2,)),
    "depthwise_five": (2, 4, 4, (5, 4), (5, 5), (2, 3), (2, 0), (1, 2), 4, (1, 2)),
    "long_line": (2, 3, 4, (9,), (21,), (2,), (1,), (3,), 1, (2,)),
    "wide_line": (1, 2, 3, (6,), (40,), (16,), (3,), (1,), 1, (15,)),
    "large_volume": (1, 4, 4, (3, 4, 3), (2, 4, 5), (3, 2, 1), (1, 2, 3), (4, 4, 4), 2, (2, 3, 1)),
    "volume": (1, 2, 3, (3, 4, 3), (2, 3, 2), (2, 1, 2), (0, 1, 0), (1, 1, 1), 1, (0, 0, 1)),
}


def convolution_arguments(
    name: str, transposed: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, tuple[Any, ...]]:
    torch.manual_seed(0)
    batch, channels, filters, spatial, kernel, stride, padding, dilation, groups, *rest = (
        TRANSPOSED if transposed else CONVOLUTIONS
    )[name]
    x = torch.randn(batch, channels, *spatial).to(dtype)
    first, second = (channels, filters // groups) if transposed else (filters, channels // groups)
    weight = (torch.randn(first, second, *kernel) / math.sqrt(second * math.prod(kernel))).to(dtype)
    extra = list(rest[0]) if rest else [0] * len(kernel)
    options = (list(stride), list(padding), list(dilation), transposed, extra, groups)
    return x, weight, torch.randn(filters).to(dtype), options


LARGE_FILTERS = {
    *("depthwise_seven", "depthwise_five", "patches", "grouped_patches_apart", "wide_stride"),
    *("long_line", "long_dilated_stride", "wide_line", "large_volume"),
}


# In each type one: the product is long.
ALL_CONVOLUTIONS = [
    pytest.param(name, transposed, dtype, marks=[pytest.mark.long] * (dtype != torch.float32 and name != "plain"))
    for transposed, table in ((False, CONVOLUTIONS), (True, TRANSPOSED))
    for name in table
    # Columns have no arithmetic of their own.
    for dtype in ([torch.float32] if name in LARGE_FILTERS else [torch.float32, torch.float64, torch.bfloat16])
]


@pytest.mark.parametrize(("name", "transposed", "dtype"), ALL_CONVOLUTIONS)
def test_convolution(name: str, transposed: bool, dtype: torch.dtype) -> None:
    x, weight, bias, options = convolution_arguments(name, transposed, dtype)
    check_convolution(aten.convolution.default, x, weight, bias, *options)


@pytest.mark.parametrize(("name", "transposed", "dtype"), ALL_CONVOLUTIONS)
def test_convolution_backward(name: str, transposed: bool, dtype: torch.dtype) -> None:
    x, weight, bias, options = convolution_arguments(name, transposed, dtype)
    grad = torch.randn_like(aten.convolution.default(x, weight, bias, *options))
    op = aten.convolution_backward.default
    arguments = (grad, x, weight, list(bias.shape), *options)
    check_convolution(op, *arguments, [True, True, True])


@pytest.mark.parametrize("size", [(3, 1, 1), (1, 3, 1, 2), (1,), (2, 3)])
def test_axes_are_squeezed_by_one_view(size: tuple[int, ...]) -> None:
    x, axes = torch.randn(size), [0, -1] if len(size) > 1 else [0]
    graph, tensors = trace(aten.squeeze.dims, x, axes)
    assert [n.target for n in graph.graph.nodes if n.op == "call_function"] == [aten.view.default]
    assert_close(graph(*tensors), aten.squeeze.dims(x, axes))


@pytest.mark.parametrize(("width", "is_of_rows"), [(1, True), (2, False)])
def test_one_place_of_each_image_is_a_row_of_one_product(width: int, is_of_rows: bool) -> None:
    """For each image by itself the filters would be read again."""
    x, weight, how = torch.randn(3, 4, 1, width), torch.randn(6, 4, 1, 1), ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    given = torch.randn(3, 6, 1, width), x, weight, None, *how, [True, True, False]
    for op, arguments in (
        (aten.convolution.default, (x, weight, None, *how)),
        (aten.convolution_backward.default, given),
    ):
        graph, _ = trace(op, *arguments)
        assert (aten.bmm.default in targets(graph)) != is_of_rows
        assert (aten.mm.default in targets(graph)) == (is_of_rows or op is aten.convolution_backward.default)


@pytest.mark.parametrize("mask", [[True, False, False], [False, True, False], [False, False, True]])
def test_convolution_backward_gives_what_the_mask_asks(mask: list[bool]) -> None:
    x, weight, bias, options = convolution_arguments("grouped", False, torch.float32)
    grad = torch.randn_like(aten.convolution.default(x, weight, bias, *options))
    arguments = (grad, x, weight, list(bias.shape), *options, mask)
    ours = traced(aten.convolution_backward.default, *arguments)
    theirs = aten.convolution_backward.default(*arguments)
    assert [value is not None for value in ours] == mask
    assert_close([v for v in ours if v is not None], [v for v, wanted in zip(theirs, mask, strict=True) if wanted])


@pytest.mark.parametrize(
    "name", ["plain", "stride", "grouped", "volume", "seven_stride", "large_volume", "depthwise_seven", "wide_stride"]
)
def test_convolution_row_by_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(im2col, "COLUMN_BYTES", 0)
    monkeypatch.setattr(convolution, "DIRECT_CHANNELS", 100)
    monkeypatch.setattr(correlation, "TURNED_CHANNELS", 100)
    x, weight, bias, options = convolution_arguments(name, False, torch.float32)
    y = aten.convolution.default(x, weight, bias, *options)
    check(aten.convolution.default, x, weight, bias, *options)
    check(aten.convolution_backward.default, torch.randn_like(y), x, weight, [1], *options, [True, True, True])


@pytest.mark.parametrize("name", ["large_volume", "patches", "wide_line", "long_line", "depthwise_seven"])
@pytest.mark.parametrize("transposed", [False, True])
def test_large_filters_are_few_ops(name: str, transposed: bool) -> None:
    """A slice for each tap, forward and twice in the backward, takes minutes to compile."""
    if name in (TRANSPOSED if transposed else CONVOLUTIONS):
        x, weight, bias, options = convolution_arguments(name, transposed, torch.float32)
        grad = torch.randn_like(aten.convolution.default(x, weight, bias, *options))
        backward = (grad, x, weight, list(bias.shape), *options, [True, True, True])
        for op, arguments in (
            (aten.convolution.default, (x, weight, bias, *options)),
            (aten.convolution_backward.default, backward),
        ):
            graph, _ = trace(op, *arguments)
            assert len(graph.graph.nodes) < 20 + 6 * sum(weight.shape[2:])


@pytest.mark.parametrize(
    ("width", "device", "is_direct"), [(8, "cpu", True), (7, "cpu", False), (14, "cpu", False), (7, "meta", True)]
)
def test_loops_are_for_rows_of_whole_vectors_on_a_cpu(width: int, device: str, is_direct: bool) -> None:
    """Of 14 a row they took ten times as long as columns."""
    size = (2, 8, 6, width)
    x, weight = torch.empty(size, device=device), torch.empty(4, 8, 3, 3, device=device)
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert (convolution.convolution(x, weight, None, *how) is NotImplemented) == is_direct


@pytest.mark.parametrize("kernel", [25, 4])
def test_a_filter_on_open_sizes_is_a_slice_for_each_tap(kernel: int) -> None:
    """Up to a number of taps that graphs can bear."""
    x, weight = torch.randn(1, 2, 40, 40), torch.randn(2, 2, kernel, kernel)

    def call(x: Tensor, weight: Tensor) -> Any:
        return aten.convolution.default(x, weight, None, [2, 2], [0, 0], [1, 1], False, [0, 0], 1)

    graph = make_fx(call, decomposition_table=decomposition_table(), tracing_mode="symbolic")(x, weight)
    assert (aten.convolution.default in targets(graph)) == (kernel == 25)
    x = torch.randn(1, 2, 41, 44)
    assert_close(graph(x, weight), call(x, weight))


@pytest.mark.long
def test_a_symbolic_batch_stays_symbolic() -> None:
    op = aten.convolution_backward.default
    options = (None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    x, weight, grad = torch.randn(4, 3, 9, 9), torch.randn(5, 3, 3, 3), torch.randn(4, 5, 5, 5)

    def call(grad: Tensor, x: Tensor, weight: Tensor) -> Any:
        return op(grad, x, weight, *options)[:2]

    graph = make_fx(call, decomposition_table=decomposition_table(), tracing_mode="symbolic")(grad, x, weight)
    grad, x = torch.randn(7, 5, 5, 5), torch.randn(7, 3, 9, 9)
    assert_close(graph(grad, x, weight), call(grad, x, weight))
