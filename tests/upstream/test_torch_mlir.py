# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Faults of stock torch-mlir that this project mends. A test that fails here says that one is gone: the mend that it
names can go too."""

from __future__ import annotations

import pytest
from faulty_programs import (
    CLAMP_AND_MAXIMUM,
    INDEX_PUT,
    LARGEST_AND_PLACE,
    NEGATIVE_REMAINDER,
    NEGATIVE_SCALAR,
    SUM_OF_CONDITIONS,
    WHOLE_QUOTIENT,
    WITH_ITSELF,
)
from torch import Tensor
from torch_mlir.dialects import torch
from torch_mlir.extras.fx_importer import RefTracker
from torch_mlir.ir import Context, Module
from torch_mlir.passmanager import PassManager


def lower_stock(text: str) -> str:
    """Lower a module to linalg, with no pass of ours."""
    with Context() as context:
        torch.register_dialect(context)
        module = Module.parse(text)
        PassManager.parse("builtin.module(torch-backend-to-linalg-on-tensors-backend-pipeline)").run(module.operation)
        return str(module)


def test_writes_are_said_to_go_to_places_that_all_differ() -> None:
    """Which nobody promised: ``bwd-order-scatters``."""
    assert "unique_indices(true)" in lower_stock(INDEX_PUT)


@pytest.mark.parametrize(
    ("program", "folded"),
    [(NEGATIVE_SCALAR, "1.84467441E+19"), (SUM_OF_CONDITIONS, "false"), (NEGATIVE_REMAINDER, "-5.000000e-01")],
)
def test_folds_of_constants_read_numbers_as_something_else(program: str, folded: str) -> None:
    """``frontend/preparation/scalar_types.py``. Comparisons are not tried: they may end the process."""
    assert f"arith.constant dense<{folded}>" in lower_stock(program)


def test_nans_are_numbers_when_they_are_clamped_or_compared() -> None:
    """``bwd-keep-nans``: a bound is taken where the comparison holds or nothing is known, the other where it fails."""
    lowered = lower_stock(CLAMP_AND_MAXIMUM)
    assert "arith.cmpf ult" in lowered and "arith.cmpf ugt" in lowered and "arith.cmpf ogt" in lowered


def test_the_place_of_the_largest_is_that_of_a_number() -> None:
    """``bwd-keep-nans``: a comparison with NaN fails."""
    assert "arith.cmpf ogt" in lower_stock(LARGEST_AND_PLACE)


def test_a_quotient_is_rounded_twice() -> None:
    """``frontend/decompositions/quotients.py``."""
    lowered = lower_stock(WHOLE_QUOTIENT)
    assert "arith.divf" in lowered and "math.floor" in lowered and "arith.remf" not in lowered


def test_a_tensor_is_taken_to_equal_itself() -> None:
    """``bwd-keep-itself``."""
    assert "arith.constant dense<true>" in lower_stock(WITH_ITSELF)


def test_the_importer_gives_a_tensor_the_literal_of_one_that_is_gone() -> None:
    """Its tracker knows tensors by address: ``KeptTensors`` in frontend/preparation/importer.py."""
    tracker = RefTracker()
    taken = 0
    for number in range(100):
        known = tracker.track(Tensor([number]))
        taken += not known.is_empty
        known.value = number
    assert taken
