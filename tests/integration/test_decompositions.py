# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Each entry of the decomposition table against eager: traced with it, the graph must not hold the op, and agree."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.decompositions import (
    DECOMPOSITIONS,
    columns,
    convolution,
    correlation,
    decomposition_table,
)
from retrograd.frontend.source import CaptureError

aten = torch.ops.aten
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def tensors_of(value: Any) -> list[Tensor | None]:
    return [value] if isinstance(value, Tensor) else list(value)


def assert_close(ours: Any, theirs: Any, *, strides: bool = False, least_scale: float = 1e-3) -> None:
    assert len(tensors_of(ours)) == len(tensors_of(theirs))
    for mine, reference in zip(tensors_of(ours), tensors_of(theirs), strict=True):
        assert (mine is None) == (reference is None or not isinstance(reference, Tensor))
        if mine is None or reference is None:
            continue
        assert mine.dtype == reference.dtype and mine.shape == reference.shape
        if strides:
            assert mine.stride() == reference.stride()
        tolerance = TOLERANCE.get(reference.dtype, 0.0)
        scale = float(reference.double().abs().nan_to_num(0, 0, 0).max()) if reference.numel() else 0.0
        torch.testing.assert_close(
            mine, reference, rtol=tolerance, atol=tolerance * max(scale, least_scale), equal_nan=True
        )


def targets(graph: torch.fx.GraphModule) -> set[Any]:
    return {node.target for node in graph.graph.nodes if node.op == "call_function"}


def trace(op: Any, *args: Any, **kwargs: Any) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """The graph of ``op`` traced with the table, and its tensors."""
    leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def call(*tensors: Tensor) -> Any:
        whole = list(leaves)
        for position, tensor in zip(positions, tensors, strict=True):
            whole[position] = tensor
        inner_args, inner_kwargs = torch.utils._pytree.tree_unflatten(whole, spec)
        return op(*inner_args, **inner_kwargs)

    tensors = [leaves[i] for i in positions]
    return make_fx(call, decomposition_table=decomposition_table(), tracing_mode="fake")(*tensors), tensors


def traced(op: Any, *args: Any, gone: bool = True, **kwargs: Any) -> Any:
    """What ``op`` gives when traced with the table and run; ``gone`` says that the op itself must not be left."""
    graph, tensors = trace(op, *args, **kwargs)
    assert (op in targets(graph)) != gone
    return graph(*tensors)


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


def check(op: Any, *args: Any, strides: bool = False, gone: bool = True, **kwargs: Any) -> None:
    assert_close(traced(op, *args, gone=gone, **kwargs), op(*args, **kwargs), strides=strides)


CONVOLUTIONS = {
    # name: batch, channels, filters, spatial, kernel, stride, padding, dilation, groups
    "plain": (2, 3, 5, (7, 8), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "more_inputs": (2, 6, 3, (7, 8), (3, 2), (1, 1), (1, 0), (1, 1), 1),
    "stride": (2, 3, 4, (8, 9), (3, 3), (2, 3), (1, 0), (1, 1), 1),
    "dilated": (2, 3, 4, (9, 10), (3, 3), (1, 2), (2, 1), (2, 3), 1),
    "wide_padding": (1, 2, 3, (5, 5), (2, 2), (1, 1), (3, 3), (1, 1), 1),
    "one_by_one": (2, 4, 6, (5, 5), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "one_by_one_stride": (2, 4, 6, (6, 5), (1, 1), (2, 2), (0, 0), (1, 1), 1),
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
ALL_CONVOLUTIONS = [
    (name, transposed, dtype)
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
    monkeypatch.setattr(columns, "COLUMN_BYTES", 0)
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


ATTENTION = [
    # heads, key heads, queries, keys, causal, mask, scale
    (3, 3, 5, 7, False, False, None),
    (3, 3, 6, 6, True, False, None),
    (2, 2, 5, 7, False, True, 0.3),
    (4, 2, 6, 6, True, False, None),
]


def attention_arguments(
    case: tuple[Any, ...], dtype: torch.dtype
) -> tuple[list[Tensor], tuple[float, bool], dict[str, Any]]:
    torch.manual_seed(0)
    heads, key_heads, queries, keys, causal, masked, scale = case
    query = torch.randn(2, heads, queries, 8).to(dtype)
    key, value = (torch.randn(2, key_heads, keys, 8).to(dtype) for _ in range(2))
    mask = torch.randn(queries, keys).to(dtype) if masked else None
    if mask is not None:
        mask[2] = -math.inf
        mask[0, 3] = -math.inf
    return [query, key, value], (0.0, causal), {"attn_mask": mask, "scale": scale}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ATTENTION)
def test_attention(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    qkv, options, keywords = attention_arguments(case, dtype)
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    check(op, *qkv, *options, **keywords, strides=True)
    check(op, *(t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv), *options, **keywords, strides=True)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    out, lse = op(*qkv, *options, **keywords)
    if case[0] == case[1]:
        check(backward, torch.randn_like(out), *qkv, out, lse, *options, **keywords, strides=True)


def test_grouped_query_attention_backward() -> None:
    """Against autograd of the written-out product: the kernel's own backward takes no grouped heads."""
    qkv, options, keywords = attention_arguments(ATTENTION[3], torch.float64)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(*qkv, *options, **keywords)
    grad = torch.randn_like(out)
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    ours = {e.op: e.function for e in DECOMPOSITIONS}[op](grad, *qkv, out, lse, *options, **keywords)
    query, key, value = (t.clone().requires_grad_() for t in qkv)
    wide = [t.repeat_interleave(2, 1) for t in (key, value)]
    scores = (query @ wide[0].mT / math.sqrt(8)).masked_fill(~torch.ones(6, 6).tril().bool(), -math.inf)
    theirs = torch.autograd.grad(scores.softmax(-1) @ wide[1], (query, key, value), grad)
    assert_close(ours, theirs)


def test_attention_refuses_dropout() -> None:
    q = torch.randn(1, 1, 2, 4)
    with pytest.raises(NotImplementedError, match=r"flash_attention_for_cpu: dropout_p=0.5.*MATH"):
        traced(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q, q, 0.5, False)


AVERAGES = [
    # spatial, kernel, stride, padding, ceil_mode, count_include_pad, divisor
    ((8, 8), [2, 2], [2, 2], [0, 0], False, True, None),
    ((9, 8), [3, 3], [2, 2], [1, 1], False, True, None),
    ((9, 8), [3, 3], [2, 2], [1, 1], False, False, None),
    ((9, 10), [3, 2], [2, 3], [1, 0], True, True, None),
    ((9, 10), [3, 4], [2, 3], [1, 2], True, False, None),
    ((8, 8), [3, 3], [1, 1], [1, 1], True, True, 5),
    ((7, 9), [2, 2], [3, 4], [0, 0], False, True, None),
    ((6, 7, 5), [2, 3, 2], [2, 1, 1], [1, 1, 0], True, False, None),
    ((6, 7, 5), [2], [], [0], False, True, None),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", AVERAGES)
def test_average_pool_backward(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    spatial, *options = case
    # PyTorch pools volumes in f32 and f64 alone.
    x = torch.randn(2, 3, *spatial).to(torch.float32 if len(spatial) == 3 and dtype == torch.bfloat16 else dtype)
    forward = F.avg_pool2d if len(spatial) == 2 else F.avg_pool3d
    keywords = dict(zip(["stride", "padding", "ceil_mode", "count_include_pad"], options[1:], strict=False))
    keywords["stride"] = keywords["stride"] or options[0]
    grad = torch.randn_like(forward(x, options[0], **keywords, divisor_override=options[-1]))
    op = aten.avg_pool2d_backward.default if len(spatial) == 2 else aten.avg_pool3d_backward.default
    check(op, grad, x, *options)
    check(op, grad[0], x[0], *options)


MAXIMA = [
    # spatial, kernel, stride, padding, dilation, ceil_mode
    ((8, 8), [2, 2], [2, 2], [0, 0], [1, 1], False),
    ((9, 7), [2, 2], [2, 2], [0, 0], [1, 1], False),
    ((9, 8), [3, 3], [2, 2], [1, 1], [1, 1], False),
    ((9, 10), [3, 3], [2, 2], [0, 1], [2, 1], True),
    ((9, 10), [3, 2], [1, 1], [1, 1], [2, 2], False),
    ((7, 9), [2, 2], [3, 4], [0, 0], [1, 1], False),
    ((5, 6, 7), [2, 3, 2], [1, 2, 2], [1, 1, 0], [1, 1, 2], True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", MAXIMA)
def test_max_pool_backward(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    spatial, *options = case
    x = torch.randn(2, 3, *spatial).to(dtype)
    flat = len(spatial) == 2
    forward = aten.max_pool2d_with_indices.default if flat else aten.max_pool3d_with_indices.default
    op = aten.max_pool2d_with_indices_backward.default if flat else aten.max_pool3d_with_indices_backward.default
    y, indices = forward(x, *options)
    check(op, torch.randn_like(y), x, *options, indices)


SIZES = [((8, 8), (4, 2)), ((7, 10), (3, 4)), ((5, 6), (7, 9)), ((9, 9), (1, 1)), ((6, 5, 7), (4, 5, 2))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("size", "out"), SIZES)
def test_adaptive_average_pool(size: tuple[int, ...], out: tuple[int, ...], dtype: torch.dtype) -> None:
    x, rank = torch.randn(2, 3, *size).to(dtype), len(size)
    forward, backward = (
        getattr(aten, name).default for name in (f"_adaptive_avg_pool{rank}d", f"_adaptive_avg_pool{rank}d_backward")
    )
    check(forward, x, list(out))
    grad = torch.randn(2, 3, *out).to(dtype)
    check(backward, grad, x)
    check(backward, grad[0], x[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("size", "out"), SIZES)
def test_adaptive_max_pool(size: tuple[int, ...], out: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of equal elements, which halves and a few whole numbers have, the first in the plane is taken."""
    x, rank = torch.randint(9, (2, 3, *size)).to(dtype), len(size)
    forward = getattr(aten, f"adaptive_max_pool{rank}d").default
    check(forward, x, list(out))
    y, indices = forward(x, list(out))
    check(getattr(aten, f"adaptive_max_pool{rank}d_backward").default, torch.randn_like(y), x, indices)


SINGLE_WINDOWS = [
    # spatial, kernel, stride, padding, ceil_mode: along some axis one window, which does not fill it
    ((3, 6), [2, 3], [2, 2], [0, 0], False),
    ((3, 6), [3, 3], [2, 2], [0, 0], True),
    ((4, 9), [3, 7], [3, 3], [0, 0], False),
    ((4, 3), [3, 3], [5, 2], [1, 1], False),
    ((5, 3), [4, 2], [7, 2], [2, 1], True),
    ((3, 4, 4), [2, 2, 2], [2, 2, 2], [0, 1, 0], False),
]


@pytest.mark.parametrize("case", SINGLE_WINDOWS)
def test_pooling_by_a_single_window(case: tuple[Any, ...]) -> None:
    """What the window does not reach is left out, what it reaches beyond is put there: IREE compiles it."""
    spatial, *options, ceil_mode = case
    x, rank = torch.randn(2, 3, *spatial), len(spatial)
    maximum = getattr(aten, f"max_pool{rank}d_with_indices").default
    check(maximum, x, *options, [1] * rank, ceil_mode, gone=False)
    check(maximum, torch.full_like(x, -torch.inf), *options, [1] * rank, ceil_mode, gone=False)
    average = getattr(aten, f"avg_pool{rank}d").default
    for include, divisor in ((True, None), (False, None), (True, 3)):
        check(average, x, *options, ceil_mode, include, divisor, gone=False)
    kernel, stride, _ = options
    for graph in (trace(maximum, x, *options, [1] * rank, ceil_mode)[0], trace(average, x, *options, ceil_mode)[0]):
        (node,) = [n for n in graph.graph.nodes if n.target in (maximum, average)]
        filled = node.args[0].meta["val"].shape[2:]
        assert all((n - k) % s == 0 for n, k, s in zip(filled, kernel, stride, strict=True))


def test_pieces_that_are_said_to_be_written_to() -> None:
    """What a recurrent cell splits its gates with."""
    x = torch.randn(3, 5)
    check(aten.unsafe_split.Tensor, x, 2, 1)
    check(aten.unsafe_split_with_sizes.default, x, [2, 0, 3], -1)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("name", ["avg_pool{}d", "max_pool{}d_with_indices"])
def test_pooling_without_a_batch(name: str, rank: int) -> None:
    """Becomes that of a batch of one."""
    op = getattr(aten, name.format(rank)).default
    x = torch.randn(2, *[6] * rank)
    graph, tensors = trace(op, x, [3] * rank)
    (pooled,) = [n for n in graph.graph.nodes if n.target is op]
    assert pooled.args[0].meta["val"].shape == (1, *x.shape)
    assert_close(graph(*tensors), op(x, [3] * rank))
    # Numbers that stand for all axes would end torch-mlir's process.
    graph, tensors = trace(op, x, [3] * rank, [2], [1])
    (pooled,) = [n for n in graph.graph.nodes if n.target is op]
    assert all(len(numbers) == rank for numbers in pooled.args[1:4])
    assert_close(graph(*tensors), op(x, [3] * rank, [2], [1]))


@pytest.mark.parametrize("op", [aten.index_put.default, aten._unsafe_index_put.default])
@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put_with_axes_left_out(op: Any, accumulate: bool) -> None:
    x = torch.randn(4, 5, 6)
    i = torch.tensor([0, 2, 2]) if accumulate else torch.tensor([0, 2, 1])
    j = torch.tensor([[1], [3]])
    put = {aten.index_put.default, aten._unsafe_index_put.default}

    def agree(indices: list[Tensor | None], values: Tensor) -> None:
        ours = traced(op, x, indices, values, accumulate, gone=op is not aten.index_put.default)
        assert_close(ours, aten.index_put.default(x, indices, values, accumulate))

    assert op in put
    agree([None, i], torch.randn(4, 3, 6))
    agree([None, None, i], torch.randn(4, 5, 3))
    agree([i, None, j], torch.randn(2, 3, 5))
    agree([None, i, j], torch.randn(4, 2, 3))
    agree([None, i], torch.randn(1))


@pytest.mark.parametrize("op", [aten.index.Tensor, aten.index_put.default])
def test_indices_are_of_one_type(op: Any) -> None:
    x, indices = torch.randn(4, 5), [torch.tensor([0, -1], dtype=torch.int32), torch.tensor([1, 3])]
    values = (torch.randn(2), False) if op is aten.index_put.default else ()
    check(op, x, indices, *values, gone=False)
    (node,) = [n for n in trace(op, x, indices, *values)[0].graph.nodes if n.target is op]
    assert {i.meta["val"].dtype for i in node.args[1]} == {torch.int64}


def test_writing_nowhere() -> None:
    check(aten.index_put.default, torch.randn(4, 5), [torch.zeros(0, dtype=torch.int64)], torch.randn(0, 5), True)


@pytest.mark.parametrize(
    ("shape", "index"), [((3, 3), [4, -9, 0]), ((3, 3), 4), ((), 0), ((1,), []), ((2, 3), [[5], [1]])]
)
def test_take(shape: tuple[int, ...], index: Any) -> None:
    check(aten.take.default, torch.randn(shape), torch.tensor(index, dtype=torch.int64))


@pytest.mark.parametrize(
    ("shifts", "dims", "gone"), [([1, 2], [2, 0], False), ([3, 1], [2, -1], True), ([1], [2], True), ([4], [-1], True)]
)
def test_roll_of_two(shifts: list[int], dims: list[int], gone: bool) -> None:
    check(aten.roll.default, torch.randn(5, 6, 2), shifts, dims, gone=gone)


@pytest.mark.parametrize("shape", [(5, 6), (2,), (2, 1), ()])
def test_roll_without_an_axis(shape: tuple[int, ...]) -> None:
    """Becomes one along the only axis there is."""
    x = torch.randn(shape)
    graph, tensors = trace(aten.roll.default, x, [3])
    assert all(n.args[2] == [0] for n in graph.graph.nodes if n.target is aten.roll.default)
    assert_close(graph(*tensors), x.roll(3))


@pytest.mark.parametrize("order", [0, 1.2, 2, math.inf, -math.inf])
def test_norm_of_a_number(order: float) -> None:
    for number in (-2.0, 0.0):
        check(aten.linalg_vector_norm.default, torch.tensor(number), order, [0], True)


def test_index_put_keeps_leading_indices() -> None:
    x = torch.randn(4, 5)
    check(aten.index_put.default, x, [torch.tensor([1, 3])], torch.randn(2, 5), False, gone=False)


@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put_by_a_mask(accumulate: bool) -> None:
    """A row for all that are chosen, and one for each; nothing is written anywhere else."""
    x, mask = torch.randn(4, 5), torch.tensor([False, True, False, True])
    for values in (torch.randn(5), torch.randn(2, 5), torch.randn(2, 1), torch.randn(())):
        check(aten.index_put.default, x, [mask], values, accumulate)
    check(aten.index_put.default, x, [mask.to(torch.uint8)], torch.randn(5), accumulate)
    check(aten.index_put.default, x.T, [None, mask], torch.randn(5, 2), accumulate)
    with pytest.raises(CaptureError, match="by a mask and other indices at once"):
        trace(aten.index_put.default, x, [mask, torch.tensor([1])], torch.zeros(()))


@pytest.mark.parametrize("pad", [[-1, 2], [-1, -2, 3, -1], [0, -1], [-1, 0, -2, -1]])
def test_negative_pad(pad: list[int]) -> None:
    x = torch.randn(5, 7)
    only_cuts = all(amount <= 0 for amount in pad)
    check(aten.constant_pad_nd.default, x, pad, 1.5, gone=only_cuts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [-2, 0, 1])
@pytest.mark.parametrize("dims", [(0, 1), (2, 1), (-3, -1)])
def test_diagonal(dtype: torch.dtype, offset: int, dims: tuple[int, int]) -> None:
    x = torch.randn(3, 5, 4).to(dtype)
    src = torch.diagonal(torch.randn(3, 5, 4).to(dtype), offset, *dims).contiguous()
    check(aten.diagonal_scatter.default, x, src, offset, *dims)
    check(aten.diagonal_backward.default, src, [3, 5, 4], offset, *dims)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("padding_idx", [-1, 3])
@pytest.mark.parametrize("by_frequency", [False, True])
def test_embedding_backward(dtype: torch.dtype, padding_idx: int, by_frequency: bool) -> None:
    indices = torch.randint(0, 7, (4, 6))
    grad = torch.randn(4, 6, 5).to(dtype)
    check(aten.embedding_dense_backward.default, grad, indices, 9, padding_idx, by_frequency)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(("dim", "correction"), [(None, None), ([1], 0), ([0, -1], 1), ([2], 2)])
def test_variance(dtype: torch.dtype, keepdim: bool, dim: list[int] | None, correction: int | None) -> None:
    x = (torch.randn(4, 5, 6) * 3 + 2).to(dtype)
    check(aten.var_mean.correction, x, dim, correction=correction, keepdim=keepdim)
    check(aten.var.correction, x, dim, correction=correction, keepdim=keepdim)


@pytest.mark.parametrize("correction", [1, 2])
def test_variance_without_freedom(correction: int) -> None:
    check(aten.var.correction, torch.randn(4, 1), [1], correction=correction)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(dtype: torch.dtype, approximate: str) -> None:
    x = torch.linspace(-6, 6, 49).to(dtype)
    check(aten.gelu.default, x, approximate=approximate)
    check(aten.gelu_backward.default, torch.randn(49).to(dtype), x, approximate=approximate)


def test_batch_norm_variants() -> None:
    x, weight, bias = torch.randn(4, 3, 5, 5), torch.randn(3), torch.randn(3)
    mean, variance = torch.randn(3), torch.rand(3) + 0.5
    ours = traced(aten._batch_norm_with_update_functional.default, x, weight, bias, mean, variance, 0.1, 1e-5)
    theirs = aten._native_batch_norm_legit_functional.default(x, weight, bias, mean, variance, True, 0.1, 1e-5)
    assert_close([ours[0], *ours[4:]], [theirs[0], *theirs[3:]])
    ours = traced(aten._batch_norm_no_update.default, x, weight, bias, mean, variance, 0.1, 1e-5)
    assert_close(ours[0], F.batch_norm(x, mean, variance, weight, bias))
    rest = (None, None, theirs[1], theirs[2], True, 1e-5, [True, True, True])
    grad = torch.randn_like(x)
    ours = traced(aten.batch_norm_backward.default, grad, x, weight, *rest, torch.empty(0, dtype=torch.uint8))
    assert_close(ours, aten.native_batch_norm_backward.default(grad, x, weight, *rest))


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("dim", [0, 1])
def test_weight_norm(dim: int) -> None:
    v, grad = torch.randn(4, 3), torch.randn(4, 3)
    g, norms = torch.randn(v.sum(1 - dim, keepdim=True).shape), v.norm(dim=1 - dim, keepdim=True)
    check(aten._weight_norm_interface_backward.default, grad, v, g, norms, dim)


class Pieces(nn.Module):
    """Slices, selects, pads, indexing and a variance: one small graph with all their gradients."""

    def forward(self, x: Tensor) -> Tensor:
        picked = x.index_put((torch.tensor([0, 2]),), x[1:3]) + x[:, torch.tensor([1, 0, 1, 2, 3, 4])]
        return F.pad(picked[:, 1::2], (-1, 2)).std(0) + x[2].softmax(-1)[:4].var()


class Loss(nn.Module):
    target: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=1)
        self.register_buffer("target", torch.tensor([0, 3, -100, 5]))

    def forward(self, x: Tensor) -> Tensor:
        words = self.table(torch.tensor([1, 2, 2, 10]))
        return F.cross_entropy(x * words, self.target, label_smoothing=0.1) + F.nll_loss(words, self.target)


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.GroupNorm(2, 4), nn.Conv2d(4, 6, 5, padding=2), nn.GELU("tanh"),
        nn.AvgPool2d(2, ceil_mode=True), nn.ConvTranspose2d(6, 2, 3, stride=2), nn.AdaptiveAvgPool2d(3), nn.Flatten(),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "conv_net": (conv_net, [(2, 3, 19, 18)]),
    "lines": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.AvgPool1d(2), nn.InstanceNorm1d(4, affine=True)),
        [(2, 3, 12)],
    ),
    "volumes": (lambda: nn.Sequential(nn.Conv3d(2, 3, 3), nn.MaxPool3d(2), nn.AdaptiveAvgPool3d(2)), [(1, 2, 8, 9, 8)]),
    "adaptive_max": (lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.AdaptiveMaxPool2d(3)), [(2, 1, 7, 8)]),
    "attention": (Attention, [(2, 3, 6, 8)] * 3),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), [(2, 5, 8)]),
    "norms": (lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.RMSNorm(8), nn.Softmax(-1)), [(4, 6)]),
    "lstm": (lambda: Recurrent(4, 5, num_layers=2, batch_first=True), [(2, 6, 4)]),
    "pieces": (Pieces, [(4, 6)]),
    "loss": (Loss, [(4, 6)]),
}


@pytest.mark.parametrize("name", MODELS)
def test_joint_graph(name: str) -> None:
    torch.manual_seed(0)
    build, shapes = MODELS[name]
    model, inputs = build(), tuple(torch.randn(shape).requires_grad_() for shape in shapes)
    with contextlib.ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, model, inputs, decompositions=decomposition_table())
        graph = joint.graph_module
    backward = {
        node.target for node in graph.graph.nodes if str(node.target).endswith(("_backward.default", "_legit.default"))
    }
    assert not backward
    state = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    parameters = dict(model.named_parameters())
    tangent = torch.randn_like(model(*inputs))
    for tensor, saved in zip((*model.parameters(), *model.buffers()), state, strict=True):
        tensor.data.copy_(saved)
    expected = model(*inputs)
    gradients = torch.autograd.grad(expected, (*parameters.values(), *inputs), tangent)
    forward, found = graph([*state, *(t.detach() for t in inputs)], [tangent])
    found = [gradient for gradient in found if gradient is not None]
    assert_close(forward[-1], expected.detach())
    # A bias before a norm has no gradient but rounding errors.
    assert_close(found, gradients, least_scale=1.0)


def test_table_is_data_with_reasons() -> None:
    table = decomposition_table()
    assert all(table[entry.op] is entry.function for entry in DECOMPOSITIONS)
    assert len({entry.op for entry in DECOMPOSITIONS}) == len(DECOMPOSITIONS)
    assert all(len(entry.reason.split()) >= 4 for entry in DECOMPOSITIONS)


def test_a_symbolic_batch_stays_symbolic() -> None:
    op = aten.convolution_backward.default
    options = (None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    x, weight, grad = torch.randn(4, 3, 9, 9), torch.randn(5, 3, 3, 3), torch.randn(4, 5, 5, 5)

    def call(grad: Tensor, x: Tensor, weight: Tensor) -> Any:
        return op(grad, x, weight, *options)[:2]

    graph = make_fx(call, decomposition_table=decomposition_table(), tracing_mode="symbolic")(grad, x, weight)
    grad, x = torch.randn(7, 5, 5, 5), torch.randn(7, 3, 9, 9)
    assert_close(graph(grad, x, weight), call(grad, x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(5, 7, 1), (1, 7, 5), (5, 1, 4), (1, 1, 1), (1, 6, 1)])
def test_thin_products(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    check(aten.mm.default, torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype))


def test_wide_products_are_kept() -> None:
    check(aten.mm.default, torch.randn(2, 3), torch.randn(3, 2), gone=False)
    check(aten.mm.default, torch.arange(3).view(1, 3), torch.arange(3).view(3, 1), gone=False)
