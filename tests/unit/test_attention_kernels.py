# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels of attention, without a device: which calls they are for, on which tiles, and what they compute."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from retrograd.contract.attention import ELEMENTS, WIDEST, Attention
from retrograd.frontend.decompositions.table import tracing_table
from retrograd.frontend.libraries.attention_calls import take_attention
from retrograd.frontend.libraries.kernel_calls import REFUSED, note_refusals
from retrograd.frontend.libraries.ops import LIBRARY_OPS, Libraries, library_ops
from retrograd.pipelines.kernels.attention_tiles import ATTEND, KEYS, QUERIES, choose_tile, fill_width
from retrograd.pipelines.kernels.tiles import ARCHITECTURES

HEADS = ("bf16", (2, 4, 5, 8))
CALL = Attention(HEADS, ("bf16", (2, 2, 7, 8)), ("bf16", (2, 2, 7, 8)))


def all_of(element: str, *shape: int) -> Attention:
    return Attention((element, shape), (element, shape), (element, shape))


@pytest.mark.parametrize("mask", [None, ("bf16", (5, 7)), ("f32", (2, 1, 1, 7)), ("f16", (4, 5, 1)), ("f32", (1,))])
def test_calls_that_there_are_kernels_for(mask: tuple[str, tuple[int, ...]] | None) -> None:
    assert replace(CALL, mask=mask).find_obstacle() is None


def test_dropout_of_a_seed_is_taken() -> None:
    assert replace(CALL, dropout=0.1, is_seeded=True).find_obstacle() is None


@pytest.mark.parametrize(
    ("call", "obstacle"),
    [
        (replace(CALL, dropout=0.1), "it has dropout of 0.1"),
        (replace(CALL, dropout=1.0, is_seeded=True), "it has dropout of 1"),
        (
            replace(all_of("bf16", 64, 64, 1025, 8), dropout=0.1, is_seeded=True),
            "it draws more numbers than a stream of them has",
        ),
        (replace(CALL, scale=-1.0), "scores are times -1.0"),
        (replace(CALL, query=("bf16", (2, 4, None, 8))), "sizes are open"),
        (replace(CALL, query=("f32", (2, 4, 5, 8))), "it is of bf16 and f32"),
        (replace(CALL, mask=("i1", (5, 7))), "it is of bf16 and i1"),
        (replace(CALL, mask=("f32", (7, 5))), "its mask is not of the scores' shape"),
        (replace(CALL, mask=("f32", ())), "its mask is not of the scores' shape"),
        (replace(CALL, value=("bf16", (2, 2, 7, 9))), "its keys are not of the queries' batch and width"),
        (replace(CALL, query=("bf16", (2, 3, 5, 8))), "its heads do not serve the same number of queries each"),
        (replace(CALL, query=("bf16", (2, 0, 5, 8))), "a tensor is empty, or too large"),
        (all_of("f64", 2, 4, 5, 8), "it is of f64"),
        (all_of("f32", 2, 4, 5, 160), "heads are 160 wide, and kernels are for 128 at most"),
        (all_of("bf16", 1 << 16, 1, 128, 256), "a tensor is empty, or too large"),
    ],
)
def test_calls_that_there_are_none_for(call: Attention, obstacle: str) -> None:
    assert (call.find_obstacle() or "").startswith(obstacle)


@pytest.mark.parametrize(("width", "filled"), [(1, 16), (16, 16), (17, 32), (80, 128), (128, 128), (129, 256)])
def test_widths_are_filled_up_to_powers_of_two(width: int, filled: int) -> None:
    assert fill_width(width) == filled


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_every_width_has_tiles(architecture: str, element: str) -> None:
    for width in range(1, WIDEST[element] + 1):
        for kind in (ATTEND, KEYS, QUERIES):
            tile = choose_tile(kind, element, width, architecture)
            # Triton multiplies matrices of 16 numbers and more along each axis.
            assert min(tile.rows, tile.columns) >= 16 and tile.rows * tile.columns <= 32 * tile.warps * 128


def test_a_trace_keeps_whole_what_kernels_take() -> None:
    """Without a library; what no kernel takes is decomposed, as on other devices."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    q, out, lse = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6)
    table = tracing_table()
    with library_ops(Libraries(kernels=("attention",))):
        assert table[attend](q, q, q, 0.0, True) is NotImplemented
        assert table[backward](out, q, q, q, out, lse, 0.0, True, attn_mask=q[0, 0, :1, :1]) is NotImplemented
        assert isinstance(table[attend](q.double(), q.double(), q.double())[0], Tensor)
    with library_ops(Libraries(kernels=("products",))):
        assert isinstance(table[attend](q, q, q)[0], Tensor)
    assert LIBRARY_OPS[torch.ops.aten.mm.default].takes is None


def test_what_no_kernel_takes_is_noted() -> None:
    graph_module = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    with library_ops(Libraries(kernels=("attention",))):
        assert (
            take_attention(CALL)
            and not take_attention(replace(CALL, dropout=0.5))
            and not take_attention(replace(CALL, dropout=0.5))
        )
        note_refusals(graph_module)
    line = "attention of tensor<2x4x5x8xbf16> and tensor<2x2x7x8xbf16>: IREE's code, it has dropout of 0.5"
    assert graph_module.meta[REFUSED] == (line,)
    with library_ops(Libraries()):
        assert not take_attention(CALL)
        note_refusals(graph_module)
    assert graph_module.meta[REFUSED] == ()
