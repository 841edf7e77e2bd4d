# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels of convolutions, without a device: which calls they are for, on which tiles, and what they compute."""

import contextlib
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Interpreter
from torch.utils._pytree import tree_leaves

from retrograd.contract.convolution import ELEMENTS, Convolution
from retrograd.frontend.decompositions.table import tracing_table
from retrograd.frontend.doors.capture import capture_joint
from retrograd.frontend.layers.convolution_ops import (
    CONVOLUTION_LAST,
    CONVOLUTION_LAST_FILTERS,
    CONVOLUTION_LAST_IMAGES,
)
from retrograd.frontend.libraries.kernel_calls import REFUSED, note_refusals
from retrograd.frontend.libraries.ops import Libraries, library_ops
from retrograd.frontend.libraries.written_out import write_out
from retrograd.pipelines.kernels.convolution_tiles import (
    CONVOLVE,
    CORRELATE,
    SPREAD,
    Work,
    choose_tile,
    estimate_seconds,
)
from retrograd.pipelines.kernels.convolutions import Geometry
from retrograd.pipelines.kernels.tiles import ARCHITECTURES

IMAGES, FILTERS, RESULTS = ("f32", (8, 64, 28, 28)), ("f32", (64, 16, 3, 3)), ("f32", (8, 64, 28, 28))
CALL = Convolution(IMAGES, FILTERS, RESULTS, (1, 1), (1, 1), (1, 1), groups=4)
STRIDED = Convolution(
    ("f32", (64, 64, 56, 56)), ("f32", (128, 64, 3, 3)), ("f32", (64, 128, 28, 28)), (2, 2), (1, 1), (1, 1), groups=1
)
COLORS = replace(STRIDED, images=("f32", (64, 3, 56, 56)), filters=("f32", (128, 3, 3, 3)))
OPS = (CONVOLUTION_LAST, CONVOLUTION_LAST_IMAGES, CONVOLUTION_LAST_FILTERS)


def test_a_call_that_there_are_kernels_for() -> None:
    assert CALL.find_obstacle() is None


@pytest.mark.parametrize(
    ("call", "obstacle"),
    [
        (replace(CALL, images=("f32", (None, 64, 28, 28))), "sizes are open"),
        (replace(CALL, filters=("f64", (64, 16, 3, 3))), "it is of f32 and f64"),
        (replace(CALL, images=("f32", (8, 64, 28)), filters=("f32", (64, 16, 3))), "it is not of images"),
        (replace(CALL, images=("f32", (0, 64, 28, 28))), "a tensor is empty, or too large"),
        (replace(CALL, images=("f32", (1 << 16, 64, 28, 28))), "a tensor is empty, or too large"),
        (replace(CALL, stride=(1, 2), dilation=(1, 2)), "it has a stride and a dilation along one axis"),
        (replace(CALL, groups=64, filters=("f32", (64, 1, 3, 3))), "groups are of 1 channels"),
        (replace(CALL, results=("f32", (1, 64, 2, 2))), "of 36864 multiplications it is too small"),
    ],
)
def test_calls_that_there_are_none_for(call: Convolution, obstacle: str) -> None:
    assert call.find_obstacle() == obstacle


def test_channels_last_are_the_same_call() -> None:
    images, filters, results = (
        (element, (shape[0], *shape[2:], shape[1])) for element, shape in (IMAGES, FILTERS, RESULTS)
    )
    assert Convolution.of_last(images, filters, results, (1, 1), (1, 1), (1, 1)) == CALL


def test_which_product_a_convolution_is() -> None:
    geometry = Geometry(STRIDED)
    assert geometry.work(CONVOLVE) == Work(CONVOLVE, 1, 64 * 28 * 28, 128, 9, 64, "f32")
    # Four remainders of the strides, to which nine taps go.
    assert geometry.work(SPREAD) == Work(SPREAD, 4, 64 * 28 * 28, 64, 3, 128, "f32")
    assert geometry.work(CORRELATE) == Work(CORRELATE, 9, 128, 64, 1, 64 * 28 * 28, "f32")
    assert not geometry.has_runs


def test_few_channels_are_read_by_runs() -> None:
    colors = Geometry(COLORS)
    assert colors.has_runs and not Geometry(replace(COLORS, dilation=(1, 2))).has_runs
    assert colors.work(CONVOLVE) == Work(CONVOLVE, 1, 64 * 28 * 28, 128, 3, 9, "f32")
    assert colors.work(CORRELATE) == Work(CORRELATE, 3, 128, 9, 1, 64 * 28 * 28, "f32")
    numbers = colors.numbers(CONVOLVE)
    assert (numbers["C"], numbers["wide"], numbers["run"], numbers["pitch_x"]) == (9, 1, 3, 3)
    # The gradient of images has no runs: taps of a row overlap.
    assert (colors.numbers(SPREAD)["C"], colors.numbers(SPREAD)["wide"]) == (3, 3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_parts_cover_a_sum_and_none_is_empty(architecture: str, element: str) -> None:
    for count, rows, columns, places in [(1, 64, 64, 200704), (9, 512, 512, 3136), (49, 64, 3, 40000), (1, 8, 8, 1)]:
        work = Work(CORRELATE, count, rows, columns, 1, places, element)
        tile = choose_tile(work, architecture)
        assert tile.parts * tile.steps(work) * tile.depth >= places
        assert (tile.parts - 1) * tile.steps(work) * tile.depth < places
    # A sum over taps is computed in one.
    assert choose_tile(Work(CONVOLVE, 1, 64, 64, 9, 2048, element), architecture).parts == 1


def test_long_sums_are_split() -> None:
    """One tile would leave 131 multiprocessors idle; hundreds do not."""
    assert choose_tile(Work(CORRELATE, 1, 64, 64, 1, 200704, "bf16"), "sm_90").parts > 16
    assert choose_tile(Work(CORRELATE, 9, 2048, 2048, 1, 3136, "bf16"), "sm_90").parts == 1


def test_an_estimate_counts_rounds() -> None:
    """One tile more than a round holds takes as long as a tile by itself."""
    work = Work(CONVOLVE, 1, 1 << 14, 64, 1, 64, "f32")
    tile = replace(choose_tile(work, "sm_90"), resident=1)
    full = replace(work, rows=132 * tile.rows)
    one, two = (estimate_seconds(replace(full, rows=full.rows + more), tile, "sm_90") for more in (0, 1))
    assert two == pytest.approx(2 * one)
    three = replace(tile, resident=3)
    few, many = (estimate_seconds(replace(full, rows=count * tile.rows), three, "sm_90") for count in (1, 3 * 132))
    assert few < many / 1.5 and many == pytest.approx(3 * one)


def test_a_trace_keeps_whole_what_kernels_take() -> None:
    x, w, bias = torch.randn(2, 16, 32, 32), torch.randn(32, 8, 3, 3), torch.randn(32)
    convolution, backward = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 2)
    table = tracing_table()
    grad = convolution(x, w, None, *how)
    with library_ops(Libraries(kernels=("convolutions",))):
        assert table[convolution](x, w, None, *how) is NotImplemented
        assert table[backward](grad, x, w, None, *how, [True, True, False]) is NotImplemented
        # A bias is added behind a kernel, and its gradient a sum of its own.
        torch.testing.assert_close(table[convolution](x, w, bias, *how), convolution(x, w, bias, *how))
        found = table[backward](grad, x, w, [32], *how, [True, True, True])
        for mine, right in zip(found, backward(grad, x, w, [32], *how, [True, True, True]), strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-3)
        assert table[convolution](x.double(), w.double(), None, *how) is not NotImplemented
        graph_module = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
        note_refusals(graph_module)
    line = "convolution of tensor<2x16x32x32xf64> with tensor<32x8x3x3xf64>: IREE's code, it is of f64"
    assert graph_module.meta[REFUSED] == (line,)
    assert table[convolution](x, w, None, *how) is not NotImplemented


class Net(nn.Module):
    """Convolutions with a bias, of groups, and transposed, with something in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.second, self.third = nn.Conv2d(32, 32, 3, 2, groups=2), nn.ConvTranspose2d(32, 8, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x)))
        third: Tensor = self.third(F.relu(self.second(y)))
        return third.square().mean((0, 2, 3))


@pytest.mark.parametrize("is_written_out", [False, True], ids=["traced", "written out of a library's trace"])
def test_nothing_between_two_convolutions_is_turned_around(is_written_out: bool) -> None:
    """And the graph computes what it computed."""
    model, x = Net(), torch.randn(4, 3, 33, 33, requires_grad=True)
    kernels = Libraries(cpu=1 if is_written_out else None, kernels=("columns", "convolutions"), channels_last=True)
    found = []
    for libraries in (kernels, Libraries()):
        with contextlib.ExitStack() as stack, library_ops(libraries):
            captured = capture_joint(stack, model, (x,)).graph_module
            found.append(write_out(captured, libraries) if is_written_out and libraries.kernels else captured)
    laid, plain = found
    counts = [len(laid.graph.find_nodes(op="call_function", target=op)) for op in OPS]
    assert counts == [3, 3, 3], laid.graph
    turned = [
        node
        for node in laid.graph.find_nodes(op="call_function", target=torch.ops.aten.permute.default)
        if node.meta["val"].numel() == 4 * 32 * 33 * 33 and not node.meta["val"].is_contiguous()
    ]
    assert not [node for node in turned if any(user.target in OPS for user in node.users)]
    nodes = [node for node in plain.graph.nodes if node.op == "placeholder"]
    arguments = [
        torch.randn(node.meta["val"].shape)
        if node.meta["val"].is_floating_point()
        else torch.zeros(node.meta["val"].shape, dtype=node.meta["val"].dtype)
        for node in nodes
    ]
    results = [tree_leaves(Interpreter(graph_module).run(*arguments)) for graph_module in found]
    for mine, right in zip(*results, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("output_padding", [0, 1])
def test_ops_with_channels_last_are_pytorchs(output_padding: int) -> None:
    """Of a transposed convolution too, whose images may end behind the last window."""
    x, w = torch.randn(2, 6, 7, 9, dtype=torch.float64), torch.randn(4, 3, 3, 2, dtype=torch.float64)
    how = ((2, 3), (1, 0), (1, 1))
    window = [number for pair in how for number in pair]

    def last(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.permute(0, 2, 3, 1).contiguous()

    y = torch.ops.aten.convolution.default(x, w, None, *how, False, [0, 0], 2)
    torch.testing.assert_close(CONVOLUTION_LAST(last(x), last(w), window, [*y.shape[2:]]), last(y))
    grad = torch.randn_like(y)
    backward = torch.ops.aten.convolution_backward.default
    dx, dw, _ = backward(grad, x, w, None, *how, False, [0, 0], 2, [True, True, False])
    torch.testing.assert_close(CONVOLUTION_LAST_IMAGES(last(grad), last(w), window, [7, 9, 6]), last(dx))
    torch.testing.assert_close(CONVOLUTION_LAST_FILTERS(last(grad), last(x), window, [3, 2, 3]), last(dw))
    turned = torch.ops.aten.convolution.default(grad, w, None, *how, True, [output_padding, output_padding], 2)
    size = [*turned.shape[2:], 6]
    torch.testing.assert_close(CONVOLUTION_LAST_IMAGES(last(grad), last(w), window, size), last(turned))
