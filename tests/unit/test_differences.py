# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reasons for a recompilation, in words."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from retrograd.frontend.autograd.steps.recompile_reasons import Situation, explain_difference, name_tensors

BASE = Situation(
    nodes=("SumBackward0", "SinBackward0", "AccumulateGrad"),
    hooks=("hook (model.py:3)",),
    inlined=(),
    tensors=(("parameter weight of Linear", (3, 3), torch.float32), ("saved tensor 1", (2, 3), torch.float32)),
    gradients=0,
    sizes=(2,),
    numbers=(0.5,),
    options="cpu",
)


def test_the_first_and_the_unlike() -> None:
    assert explain_difference(BASE, []) == ("it is the first",)
    other = replace(BASE, nodes=("A", "B"))
    assert explain_difference(other, [BASE]) == ("nothing like it was compiled before",)


def test_what_changed_is_named() -> None:
    changes = {
        "node CosBackward0 is where SinBackward0 was": replace(
            BASE, nodes=("SumBackward0", "CosBackward0", "AccumulateGrad")
        ),
        "node MulBackward0 is new": replace(BASE, nodes=(*BASE.nodes, "MulBackward0")),
        "node AccumulateGrad is gone": replace(BASE, nodes=BASE.nodes[:2]),
        "hook other (model.py:9) is new": replace(BASE, hooks=(*BASE.hooks, "other (model.py:9)")),
        "an inlined hook is another one, or reads another number or tensor than before": replace(BASE, inlined=(1,)),
        "saved tensor 1 has shape [5, 3] instead of [2, 3]": replace(
            BASE, tensors=(BASE.tensors[0], ("saved tensor 1", (5, 3), torch.float32))
        ),
        "parameter weight of Linear is torch.bfloat16 instead of torch.float32": replace(
            BASE, tensors=(("parameter weight of Linear", (3, 3), torch.bfloat16), BASE.tensors[1])
        ),
        "1 gradients are there already, where it were 0": replace(BASE, gradients=1),
        "a size is 5 instead of 2": replace(BASE, sizes=(5,)),
        "a number is 0.75 instead of 0.5": replace(BASE, numbers=(0.75,)),
        "options are cuda": replace(BASE, options="cuda"),
    }
    for reason, now in changes.items():
        assert explain_difference(now, [BASE]) == (reason,)


def test_the_most_alike_is_compared_with() -> None:
    near = replace(BASE, sizes=(4,), tensors=(BASE.tensors[0], ("saved tensor 1", (4, 3), torch.float32)))
    far = replace(BASE, nodes=(*BASE.nodes, "MulBackward0"))
    now = replace(near, numbers=(0.75,))
    assert explain_difference(now, [far, near, BASE]) == ("a number is 0.75 instead of 0.5",)


def test_parameters_have_the_name_in_the_outermost_module() -> None:
    inner, last = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(inner), last)
    tensors = [last.bias, torch.ones(2), inner.weight]
    assert name_tensors(tensors) == [
        "parameter 1.bias of Sequential",
        "saved tensor 1",
        "parameter 0.0.weight of Sequential",
    ]
    assert len(model) == 2
