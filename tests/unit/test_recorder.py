# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Captured backwards made to run as eager does, in the forms that several versions of torch give them."""

import pytest
import torch
from torch._dynamo.external_utils import call_accumulate_grad

from retrograd.frontend.autograd.engine.python_calls import accumulate_into
from retrograd.frontend.autograd.steps.recorder import make_runnable


@pytest.mark.parametrize("at_capture", [(), (None,)], ids=["torch 2.11", "torch 2.13"])
def test_accumulation_takes_its_arguments_in_one_order(at_capture: tuple[None, ...]) -> None:
    graph = torch.fx.Graph()
    variable, gradient = graph.placeholder("variable"), graph.placeholder("gradient")
    graph.call_function(call_accumulate_grad, (variable, *at_capture, gradient, True))
    graph.output(())
    run = make_runnable(torch.fx.GraphModule(torch.nn.Module(), graph))
    (node,) = run.graph.find_nodes(op="call_function", target=accumulate_into)
    assert [str(argument) for argument in node.args] == ["variable", "None", "gradient", "True"]
