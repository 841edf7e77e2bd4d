# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What islands run in the place of ops that PyTorch computes in Python."""

from typing import Any

import pytest
import torch

from retrograd.frontend.libraries.run_as import RUN_AS

prims = torch.ops.prims
X = torch.arange(24.0).reshape(2, 1, 12).transpose(0, 2)
CASES: dict[Any, tuple[Any, ...]] = {
    prims.squeeze.default: (X, [1]),
    prims.transpose.default: (X, [2, 0, 1]),
    prims.convert_element_type.default: (X, torch.float64),
}


def test_every_op_has_a_case() -> None:
    assert {op for op in RUN_AS if op.namespace == "prims"} == CASES.keys()


@pytest.mark.parametrize("op", CASES, ids=str)
def test_they_give_what_the_op_gives(op: Any) -> None:
    arguments = CASES[op]
    found, expected = RUN_AS[op](*arguments), op(*arguments)
    assert torch.equal(found, expected)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
    shares = [t.untyped_storage().data_ptr() == X.untyped_storage().data_ptr() for t in (found, expected)]
    assert shares[0] == shares[1]
