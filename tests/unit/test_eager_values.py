# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What rounding explains of a difference from eager's values."""

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.islands.eager_values import EagerValues, record_values
from retrograd.frontend.verification.first_comparison import relative_error, tolerance_of
from retrograd.frontend.verification.rounding import find_tolerances


def record() -> EagerValues:
    def compute(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = (x.bfloat16() + y.bfloat16()).float().exp()
        return wide, y.exp(), wide.argmax()

    primals = [torch.randn(4, 8), torch.randn(4, 8)]
    graph_module = make_fx(compute)(*primals)
    for node in graph_module.graph.find_nodes(op="placeholder"):
        node.meta["desc"] = None
    return record_values(graph_module, primals)


def test_what_is_computed_from_bfloat16_is_allowed_its_rounding() -> None:
    values = record()
    assert values.tolerances["exp"] == values.tolerances["add"] == 2e-2
    assert values.tolerances["exp_1"] == 1e-4
    assert values.find_difference(["exp"], [values.tensors["exp"] * 1.01], {}) is None
    assert "1e-04 is allowed" in (values.find_difference(["exp_1"], [values.tensors["exp_1"] * 1.01], {}) or "")


def test_widened_arguments_are_exact() -> None:
    graph = make_fx(lambda x: x.float())(torch.randn(3).bfloat16()).graph
    assert max(find_tolerances(graph, tolerance_of).values()) == tolerance_of(torch.float32)


def test_integers_have_to_be_equal() -> None:
    values = record()
    assert values.find_difference(["argmax"], [values.tensors["argmax"] + 1], {}) is not None


def test_what_cancels_out_may_be_as_far_from_float64_as_a_multiple_of_eagers() -> None:
    torch.manual_seed(0)
    x = torch.randn(1000, 3)
    graph_module = make_fx(lambda x: ((x - x.mean(0)).sum(0), x.sum(0)))(x)
    for node in graph_module.graph.find_nodes(op="placeholder"):
        node.meta["desc"] = None
    values = record_values(graph_module, [x])
    noise, number = values.tensors["sum_1"], values.tensors["sum_2"]
    assert 0 < noise.norm() < 1e-3
    assert values.find_difference(["sum_1"], [-noise], {}) is None
    assert values.find_difference(["sum_1"], [noise * 100], {}) is not None
    assert values.find_difference(["sum_1"], [noise * torch.nan], {}) is not None
    assert values.find_difference(["sum_2"], [number * 1.01], {}) is not None


def test_errors_of_complex_numbers() -> None:
    """Of both parts, conjugated or not, and as exact as these are."""
    z = torch.tensor([3 + 4j, 0j])
    assert relative_error(z, z.conj()) == pytest.approx(8 / 5)
    assert relative_error(z.conj(), torch.conj_physical(z)) == 0
    assert tolerance_of(torch.complex64) == tolerance_of(torch.float32) > 0
