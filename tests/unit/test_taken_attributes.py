# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which attributes a model has set to other tensors, and whether it reads them again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from retrograd.frontend.python.kept_attributes import KeptAttribute, contained, is_of_type, is_read_again
from retrograd.frontend.python.source_locations import CaptureError


def make_model() -> Any:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].table = torch.zeros(2)
    model[0].listed = []
    return model


def test_what_was_set_is_taken_and_put_back() -> None:
    model = make_model()
    table, mean = model[0].table, model[1].running_mean
    with contained(model, lambda _: "") as containment:
        model[0].table = torch.ones(2)
        model[0].pair = (torch.ones(1), 2)
        model[0].number = 3
        model[1].running_mean = torch.ones(2)
        found = {kept.qualified: (kept.is_buffer, before) for kept, before in containment.take()}
    assert found.keys() == {"0.table", "0.pair", "1.running_mean"}
    assert found["0.table"] == (False, table) and found["1.running_mean"] == (True, mean)
    assert model[0].table is table and model[1].running_mean is mean and not hasattr(model[0], "pair")


def test_what_is_not_taken_is_refused() -> None:
    model = make_model()
    with pytest.raises(CaptureError, match=r"attribute '0.listed\[0\]'"), contained(model, lambda _: "") as containment:
        model[0].listed.append(torch.ones(2))
        assert containment.take() == []
    with pytest.raises(CaptureError, match=r"its parameter '0\.weight'"), contained(model, lambda _: "") as of:
        model[0].weight = nn.Parameter(torch.ones(2, 2))
        assert of.take() == []
    assert model[0].listed == []


def test_what_is_read_again() -> None:
    model = make_model()
    kept = KeptAttribute(model, "", "last", False)
    given = torch.ones(2)

    def sets() -> None:
        model.last = given * 2

    def reads() -> None:
        sets() if not hasattr(model, "last") else kept.put(model.last * 2)

    def counts() -> None:
        model.last = (given * 2, len(getattr(model, "last", ())))

    def keeps_what_it_is_given() -> None:
        model.last = given
        given.mul(2)

    for call, expected in ((sets, False), (reads, True), (counts, True), (keeps_what_it_is_given, False)):
        vars(model).pop("last", None)
        assert is_read_again(call, [kept], [given]) is expected, call


def test_types() -> None:
    one = torch.ones(2)
    assert is_of_type(torch.zeros(2), one)
    assert not is_of_type(torch.zeros(3), one) and not is_of_type(torch.zeros(2, dtype=torch.int64), one)
