# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Floating-point operations by shapes."""

import pytest

from retrograd.pipelines.analysis.partition.read_graph import Shape, count_flops


@pytest.mark.parametrize(
    ("name", "operands", "result", "flops"),
    [
        # Two for each multiply-add.
        ("mm", [(3, 5), (5, 7)], (3, 7), 2 * 3 * 5 * 7),
        ("bmm", [(2, 3, 5), (2, 5, 7)], (2, 3, 7), 2 * 2 * 3 * 5 * 7),
        ("matmul", [(2, 4, 3, 5), (5, 7)], (2, 4, 3, 7), 2 * 2 * 4 * 3 * 5 * 7),
        ("mv", [(3, 5), (5,)], (3,), 2 * 3 * 5),
        ("dot", [(5,), (5,)], (), 2 * 5),
        ("linear", [(2, 3, 5), (7, 5), (7,)], (2, 3, 7), 2 * 2 * 3 * 5 * 7),
        ("outer", [(3,), (5,)], (3, 5), 3 * 5),
        # And one more for each element of what is added.
        ("addmm", [(7,), (3, 5), (5, 7), None, None], (3, 7), 2 * 3 * 5 * 7 + 3 * 7),
        ("baddbmm", [(2, 3, 7), (2, 3, 5), (2, 5, 7)], (2, 3, 7), 2 * 2 * 3 * 5 * 7 + 2 * 3 * 7),
        ("addbmm", [(3, 7), (2, 3, 5), (2, 5, 7)], (3, 7), 2 * 2 * 3 * 5 * 7 + 3 * 7),
        # 16 filters on 4 channels, 3 by 3; in 2 groups each filter sees 2 channels.
        ("convolution", [(8, 4, 10, 10), (16, 4, 3, 3), (16,), None], (8, 16, 8, 8), 2 * 8 * 16 * 8 * 8 * 4 * 9),
        ("convolution", [(8, 4, 10, 10), (16, 2, 3, 3), (16,), None], (8, 16, 8, 8), 2 * 8 * 16 * 8 * 8 * 2 * 9),
        # Pointwise work by what it gives, reductions and scatters by what they take.
        ("add.Tensor", [(3, 1), (1, 5)], (3, 5), 15),
        ("sum.dim_IntList", [(3, 5), None], (3,), 15),
        ("scatter_add", [(3, 5), None, (2, 5), (2, 5)], (3, 5), 15),
        # What moves no numbers, or nobody knows.
        ("transpose.int", [(3, 5), None, None], (5, 3), 0),
        ("cat", [None], (3, 5), 0),
        ("no_such_op", [(3, 5)], (3, 5), 0),
    ],
)
def test_flops(name: str, operands: list[Shape], result: Shape, flops: int) -> None:
    assert count_flops(f"torch.aten.{name}", operands, [result]) == flops


def test_the_backward_of_a_convolution_costs_both_gradients() -> None:
    operands: list[Shape] = [(8, 16, 8, 8), (8, 4, 10, 10), (16, 4, 3, 3), None]
    results: list[Shape] = [(8, 4, 10, 10), (16, 4, 3, 3), (16,)]
    forward = count_flops("torch.aten.convolution", [(8, 4, 10, 10), (16, 4, 3, 3)], [(8, 16, 8, 8)])
    assert count_flops("torch.aten.convolution_backward", operands, results) == 2 * forward


def test_a_recurrent_layer_costs_a_product_with_its_state_at_each_step() -> None:
    """7 steps of 2 sequences, 4 gates of 3 features."""
    every, state, active, gates, weight = (7, 2, 3), (2, 3), (7, 4, 2, 3), (7, 2, 12), (12, 3)
    flops = 7 * 2 * 2 * 12 * 3
    assert count_flops("torch.retrograd.lstm", [gates, state, state, weight], [every, state, every, active]) == flops
    taken: list[Shape] = [every, state, state, weight, every, active]
    assert count_flops("torch.retrograd.lstm_backward", taken, [gates, state, state]) == flops
    gates, weight = (7, 2, 9), (9, 3)
    flops = 7 * 2 * 2 * 9 * 3
    assert count_flops("torch.retrograd.gru", [gates, state, weight, (9,)], [every, active]) == flops
    taken = [every, state, weight, every, active]
    assert count_flops("torch.retrograd.gru_backward", taken, [gates, every, state]) == flops
    weight = (3, 3)
    flops = 7 * 2 * 2 * 3 * 3
    assert count_flops("torch.retrograd.rnn_relu", [every, state, weight], [every]) == flops
    assert count_flops("torch.retrograd.rnn_tanh_backward", [every, weight, every], [every, state]) == flops


def test_what_gives_no_tensor_costs_nothing() -> None:
    assert count_flops("torch.constant.int", [], [None]) == 0
    assert count_flops("torch.aten.sum", [(3,)], []) == 0
