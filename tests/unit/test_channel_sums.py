# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sums over all but the channels: by rows first, in a batch norm's gradients and in a convolution's bias."""

from __future__ import annotations

import pytest
import torch
from decomposition_checks import assert_close, targets, trace

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (4, 3, 5, 2), (2, 3, 2, 3, 4)])
def test_gradients_of_a_batch_norm(shape: tuple[int, ...], weighted: bool, training: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    weight = torch.randn(3, dtype=dtype) if weighted else None
    mean, var = torch.randn(3, dtype=dtype), torch.rand(3, dtype=dtype) + 0.5
    _, saved, invstd = aten.native_batch_norm(x, weight, None, mean.clone(), var.clone(), training, 0.1, 1e-5)
    op = aten.native_batch_norm_backward.default
    arguments = (grad, x, weight, mean, var, saved, invstd, training, 1e-5, [True, True, True])
    graph, tensors = trace(op, *arguments)
    assert op not in targets(graph)
    assert_close(graph(*tensors), op(*arguments))


@pytest.mark.parametrize("shape", [(4, 8, 14, 14), (32, 8, 7, 7)])
def test_terms_are_added_up_by_rows(shape: tuple[int, ...]) -> None:
    grad, x = torch.randn(shape), torch.randn(shape)
    op = aten.convolution_backward.default
    weight = torch.randn(shape[1], shape[1], 1, 1)
    mask = [False, False, True]
    arguments = (grad, x, weight, [shape[1]], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask)
    graph, tensors = trace(op, *arguments)
    sums = [node.args[1] for node in graph.graph.nodes if node.target == aten.sum.dim_IntList]
    assert sums == [[-1], [0, 2]]
    assert_close(graph(*tensors)[2], grad.sum((0, 2, 3)))


def test_on_other_devices_they_are_added_up_at_once() -> None:
    """A GPU's threads have a part of a sum each; the graph is traced on a device that computes nothing."""
    x, one = torch.empty(4, 8, 14, 14, device="meta"), torch.empty(8, device="meta")
    op = aten.native_batch_norm_backward.default
    graph, _ = trace(op, x, x, one, one, one, one, one, True, 1e-5, [True, True, True])
    sums = [node.args[1] for node in graph.graph.nodes if node.target == aten.sum.dim_IntList]
    assert sums == [[0, 2, 3], [0, 2, 3]]
