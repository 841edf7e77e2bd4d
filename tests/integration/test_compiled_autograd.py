# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What PyTorch's compiled autograd gets wrong or refuses is right under ``retrograd.enable()``."""

from __future__ import annotations

import pytest
from beside_compiled_autograd import CASES, ENGINES, compare, judge, scope_of


@pytest.mark.parametrize("name", ["reentrant checkpoint", "queue callback", "two threads"])
def test_what_stock_compiled_autograd_fails_is_right_here(name: str) -> None:
    assert judge(CASES[name], scope_of("retrograd")) == "right"


@pytest.mark.long
def test_stock_compiled_autograd_still_fails() -> None:
    """Should it be mended, the page that says so is out of date."""
    cases = ["reentrant checkpoint", "two threads"]
    stock = compare(cases, ENGINES[1:2])["compiled autograd"]
    assert all("right" not in stock[case] for case in cases), stock
