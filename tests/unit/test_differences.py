# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reasons for a recompilation, in words."""

from __future__ import annotations

import logging
import re
import weakref
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from retrograd.frontend.autograd.steps.history import History, Recompiles
from retrograd.frontend.autograd.steps.recompile_reasons import Situation, explain_difference, name_tensors

BASE = Situation(
    line="train.py:7",
    nodes=("SumBackward0", "SinBackward0", "AccumulateGrad"),
    hooks=("hook (model.py:3)",),
    inlined=(),
    tensors=(("parameter weight of Linear", (3, 3), torch.float32), ("saved tensor 1", (2, 3), torch.float32)),
    gradients=0,
    returned=0,
    sizes=(2,),
    numbers=(("leaky_relu_backward0", 0.5),),
    options="cpu",
)


def test_the_first_and_the_unlike() -> None:
    assert explain_difference(BASE, []) == ("it is the first",)
    other = replace(BASE, nodes=("A", "B"))
    assert explain_difference(other, [BASE]) == ("nothing like it ran at this line before",)
    elsewhere = replace(other, line="train.py:9")
    assert explain_difference(elsewhere, [BASE]) == ("it is the first at this line",)


def test_what_is_as_before() -> None:
    assert explain_difference(BASE, [BASE]) == ("it is like one before, and PyTorch traced it anew",)
    elsewhere = replace(BASE, line="train.py:9")
    assert explain_difference(elsewhere, [BASE]) == ("it is like that at train.py:7, and PyTorch traced it anew",)


def test_what_changed_is_named() -> None:
    changes = {
        "node CosBackward0 is where SinBackward0 was": replace(
            BASE, nodes=("SumBackward0", "CosBackward0", "AccumulateGrad")
        ),
        "node MulBackward0 is new": replace(BASE, nodes=(*BASE.nodes, "MulBackward0")),
        "node AccumulateGrad is gone": replace(BASE, nodes=BASE.nodes[:2]),
        "nodes A, B, C and 1 more are new": replace(BASE, nodes=(*BASE.nodes, *"ABCD"), sizes=(3,)),
        "hook other (model.py:9) is new": replace(BASE, hooks=(*BASE.hooks, "other (model.py:9)")),
        "an inlined hook is another one, or reads another number or tensor than before": replace(BASE, inlined=(1,)),
        "saved tensor 1 has shape [5, 3] instead of [2, 3]": replace(
            BASE, tensors=(BASE.tensors[0], ("saved tensor 1", (5, 3), torch.float32))
        ),
        "parameter weight of Linear is torch.bfloat16 instead of torch.float32": replace(
            BASE, tensors=(("parameter weight of Linear", (3, 3), torch.bfloat16), BASE.tensors[1])
        ),
        "it adds to 1 gradient that is there (none before)": replace(BASE, gradients=1),
        "it returns 2 gradients (none before)": replace(BASE, returned=2),
        "a size is 5 instead of 2": replace(BASE, sizes=(5,)),
        "saved tensor 1 has shape [4, 3] instead of [2, 3]": replace(
            BASE, tensors=(BASE.tensors[0], ("saved tensor 1", (4, 3), torch.float32)), sizes=(4,)
        ),
        "a number of leaky_relu_backward0 is 0.75 instead of 0.5": replace(
            BASE, numbers=(("leaky_relu_backward0", 0.75),)
        ),
        "options are cuda": replace(BASE, options="cuda"),
        "tensors share or repeat memory that did not, or the other way round": replace(BASE, shared=((1, 0),)),
    }
    for reason, now in changes.items():
        assert explain_difference(now, [BASE]) == (reason,)


def test_the_most_alike_is_compared_with() -> None:
    near = replace(BASE, sizes=(4,), tensors=(BASE.tensors[0], ("saved tensor 1", (4, 3), torch.float32)))
    far = replace(BASE, nodes=(*BASE.nodes, "MulBackward0"))
    now = replace(near, numbers=(("leaky_relu_backward0", 0.75),))
    assert explain_difference(now, [far, near, BASE]) == ("a number of leaky_relu_backward0 is 0.75 instead of 0.5",)


def test_entries_print_as_lines_with_the_users_line_first() -> None:
    history = History(logging.getLogger("test"))
    nodes = [f"Node{number}Backward0" for number in range(300)]
    history.add("compiled", nodes, ["an op fails\n  remedy: none", "an op fails\n  remedy: none"])
    for _ in range(2):
        history.add_reason(
            "runs eagerly", "not implemented: Identity\nException raised from f (most recent call first):"
        )
    printed = repr(Recompiles(history.entries)).splitlines()
    place = rf"{Path(__file__).name}:\d+: a backward"
    assert [re.sub(place, "...", line) for line in printed] == [
        "... of 300 nodes compiled: an op fails; remedy: none",
        "... runs eagerly: not implemented: Identity",
    ]
    assert history.entries[0].nodes == tuple(nodes)


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


def test_names_are_known_while_nothing_refers_to_the_parameters() -> None:
    layer, alone = nn.Linear(2, 2), torch.ones(2, requires_grad=True)
    weight, model = layer.weight, nn.Sequential(layer)
    for _ in range(2):
        assert name_tensors([alone, weight]) == ["saved tensor 0", "parameter 0.weight of Sequential"]
        assert weakref.getweakrefcount(weight) == weakref.getweakrefcount(alone) == 0
    # The same object with other memory is looked for anew.
    renamed = nn.Sequential(model)
    torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros(2, 2)))
    assert name_tensors([weight]) == ["parameter 0.0.weight of Sequential"] and len(renamed) == 1
