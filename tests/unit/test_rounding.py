# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The error that rounding explains: by dtype, by what a value is computed from, by what may be of TF32."""

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from retrograd.frontend.verification.first_comparison import TOLERANCES, tolerance_of
from retrograd.frontend.verification.rounding import find_tolerances

aten = torch.ops.aten
F32, F16, BF16 = (TOLERANCES[dtype] for dtype in (torch.float32, torch.float16, torch.bfloat16))


@pytest.fixture
def settings() -> Iterator[None]:
    """Settings of precision as they are at first, which a test may change."""
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    yield
    torch.backends.cudnn.allow_tf32 = before[0]
    torch.set_float32_matmul_precision(before[1])


def tolerances(device: str, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Of a convolution, what is computed from it, a product, and ops that depend on neither."""
    graph = Graph()
    with FakeTensorMode():
        images, matrix = torch.empty(2, 3, 4, 4, device=device, dtype=dtype), torch.empty(4, 4, device=device)
    x, w = (graph.placeholder(name) for name in "xw")
    x.meta["val"], w.meta["val"] = images, matrix
    kernel = graph.placeholder("kernel")
    kernel.meta["val"] = images
    ops = {
        "conv": (aten.convolution.default, (x, kernel, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1), images),
        "product": (aten.mm.default, (w, w), matrix),
        "gamma": (aten.polygamma.default, (1, w), matrix),
        "converted": (torch.ops.prims.convert_element_type.default, (w, torch.float32), matrix),
    }
    for name, (op, args, value) in ops.items():
        node = graph.create_node("call_function", op, args, name=name)
        node.meta["val"] = value
    conv = next(node for node in graph.nodes if node.name == "conv")
    behind = graph.create_node("call_function", aten.relu.default, (conv,), name="behind")
    behind.meta["val"] = images
    return {node.name: error for node, error in find_tolerances(graph, tolerance_of).items()}


def test_convolutions_on_cuda_may_be_of_tf32_unless_told_otherwise(settings: None) -> None:
    torch.backends.cudnn.allow_tf32 = True
    found = tolerances("cuda")
    assert found == {
        "x": 0,
        "w": 0,
        "kernel": 0,
        "conv": F16,
        "product": F32,
        "gamma": F32,
        "converted": F32,
        "behind": F16,
    }
    assert set(tolerances("cpu").values()) == {0, F32}
    assert tolerances("cuda", torch.bfloat16)["conv"] == BF16
    torch.backends.cudnn.allow_tf32 = False
    assert set(tolerances("cuda").values()) == {0, F32}


def test_products_may_be_where_the_user_allows_it(settings: None) -> None:
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("high")
    found = tolerances("cuda")
    assert found["product"] == F16 and found["conv"] == found["gamma"] == F32
