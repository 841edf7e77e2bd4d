# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which attributes of a model were set to plain values, and values of which the program does the same for each."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from retrograd.frontend.python.plain_attributes import has_symbols, is_set_plain, noting_stores
from retrograd.frontend.python.python_contents import EitherOf, as_it_was, is_same_value
from retrograd.frontend.python.python_functions import names_read


class Sets(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own: Any = 0
        self.other = 1

    def run(self) -> None:
        self.own = self.own
        setattr(self, "other", self.other)  # noqa: B010


def test_what_statements_set() -> None:
    model = Sets()
    untouched = torch.nn.Module.__setattr__
    with noting_stores() as found:
        model.run()
    assert found == {(id(model), "own")} and torch.nn.Module.__setattr__ is untouched
    model.run()
    assert len(found) == 1


def test_names_that_code_reads() -> None:
    def run(model: Any) -> Any:
        model.written = model.read
        model.both = model.both + 1
        return lambda: getattr(model, "text")  # noqa: B009

    assert {"read", "both", "text", "getattr"} <= names_read(run.__code__)
    assert "written" not in names_read(run.__code__)


class Number(float):
    """A number of another class, as draws of a trace are."""


@pytest.mark.parametrize(
    ("value", "is_plain"),
    [
        (torch.Size([3, 4]), True),
        ({"a": [1, None], "b": (torch.float32, 2.0)}, True),
        ((1, torch.ones(1)), False),
        (Number(1.0), False),
        (OrderedDict(a=1), False),
        ({1, 2}, False),
    ],
)
def test_what_is_plain(value: Any, is_plain: bool) -> None:
    assert is_set_plain(value, None, is_stored=False) is is_plain
    assert not has_symbols(value)


def test_what_is_set_to_the_same() -> None:
    size, contents = (3, 4), [1]
    assert is_set_plain(size, size, is_stored=True)
    assert not is_set_plain(size, size, is_stored=False)
    # Others may have written to it.
    assert not is_set_plain(contents, contents, is_stored=True)


def test_either_of_two_values() -> None:
    either = EitherOf((None, as_it_was((3, 4))))
    assert is_same_value(None, either) and is_same_value((3, 4), either)
    assert not is_same_value((3, 5), either) and not is_same_value([3, 4], either)
    assert is_same_value(EitherOf((None, as_it_was((3, 4)))), either)
    assert not is_same_value(EitherOf((None, 3)), either)
    assert repr(either) == "None or (3, 4)"
