# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Options that there are not: what is said of each, before anything is traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import retrograd

CHOICES = [
    ("target", "cpx", "'cpx' is not one of cpu, cuda, vulkan, hip; did you mean 'cpu'"),
    ("target", 3, "target 3"),
    ("target", "", "target '' is not one of cpu"),
    ("cache", "no", r"cache is True or False, got 'no'; did you mean cache=False\?"),
    ("cache", 1, r"cache is True or False, got 1; did you mean cache=True\?"),
    ("cache", None, "cache is True or False, got None$"),
    ("fallback", "islands", r"'islands' is not one of island, error; did you mean 'island'\?"),
    ("fallback", True, "fallback True is not one of island, error"),
    ("fallback", None, "fallback None is not one of island, error"),
]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        *CHOICES,
        ("target", ["cpu", 3], r"target \['cpu', 3\] is no name, nor several; write 'cpu'"),
        ("target", [], "no target is given"),
        ("partition", "max-cut", "'max-cut' is not one of default, min-cut, budget; did you mean 'min-cut'"),
        ("partition", "best", "'best' is not one of default, min-cut, budget$"),
        ("partition", 3, "partition 3 is not one of default"),
        ("partition", None, "partition None is not one of default"),
        ("verify", "yes", r"verify is 'first', True or False, got 'yes'; did you mean verify=True\?"),
        ("verify", 0, r"verify is 'first', True or False, got 0; did you mean verify=False\?"),
        ("verify", "cpu", "verify is 'first', True or False, got 'cpu'$"),
        ("save_policy", "bf16", "save_policy 'bf16' is no SavePolicy"),
        ("dynamic_shapes", "batch", "dynamic_shapes is 'batch'"),
        ("dynamic_shapes", 3, "dynamic_shapes is 3"),
        ("progress", True, r"progress is a function .*, or None; got True"),
    ],
)
def test_options_that_there_are_not(option: str, value: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError, retrograd.CaptureError), match=message):
        retrograd.compile_backward(nn.Linear(2, 2), (torch.randn(1, 2),), **{option: value})


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        *CHOICES,
        ("target", ["cpu"], r"target \['cpu'\]: a backward runs on one device"),
        ("target", "cpu,cuda", "target 'cpu,cuda': a backward runs on one device"),
        ("hook_schedule", "fewest", r"'fewest' is not one of eager-order, .*; did you mean 'fewest-stages'\?"),
        ("hook_schedule", 3, "hook_schedule 3 is not one of eager-order"),
        ("hook_schedule", None, "hook_schedule None is not one of eager-order"),
        ("background", "yes", r"background is True or False, got 'yes'; did you mean background=True\?"),
        ("background", None, "background is True or False, got None$"),
    ],
)
def test_options_of_enable_that_there_are_not(option: str, value: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        retrograd.enable(**{option: value})


def test_a_policy_and_something_else() -> None:
    with pytest.raises(TypeError, match=r"unsupported operand.*'SavePolicy' and 'str'"):
        retrograd.must_save(op="mm") | "bf16"  # type: ignore[operator]
