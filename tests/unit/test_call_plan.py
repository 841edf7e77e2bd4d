# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How a compiled function is called in the place of a graph: what of its results lies on the host."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from retrograd.frontend.doors.graph_calls import CompiledFunction, fixed_plan


class OnDevice(torch.Tensor):
    """Stands for a tensor on a device: what is brought to the host is plain."""

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor)


def two_results() -> torch.fx.GraphModule:
    """A graph of CUDA tensors, one of whose results eager has on the CPU."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.sin.default, (x,))
    z = graph.call_function(torch.ops.aten.arange.default, (3,))
    graph.output((y, z))
    with FakeTensorMode():
        places = {x: "cuda", y: "cuda", z: "cpu"}
        for node, place in places.items():
            node.meta["val"] = torch.empty(3, device=place)
    return torch.fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize(
    ("device", "restride", "hosted"),
    [("cuda", 2, [1]), ("cuda", 0, [1]), ("cuda", 1, []), ("cpu", 2, [])],
    ids=["outputs", "gradients", "what is saved", "a CPU"],
)
def test_results_that_eager_has_on_the_host(device: str, restride: int, hosted: list[int]) -> None:
    def call(tensors: object) -> list[torch.Tensor]:
        return [torch.zeros(3).as_subclass(OnDevice), torch.arange(3).as_subclass(OnDevice)]

    function = CompiledFunction(
        ("x",), ("sin_default", "arange_default"), frozenset(), call, device=torch.device(device)
    )
    found = fixed_plan(two_results(), function, restride)
    assert found is not None
    plan, has_seed = found
    assert (list(plan.on_host), has_seed) == (hosted, False)
    y, z = plan.caller(function.call, [])([torch.zeros(3)])
    assert [place for place, result in enumerate((y, z)) if type(result) is torch.Tensor] == hosted
    assert y.tolist() == [0, 0, 0] and z.tolist() == [0, 1, 2]
