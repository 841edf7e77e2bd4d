# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kinds of ops: what the table says, and what holds for ops that are not in it."""

import pytest
import torch

from retrograd.contract.attention import BACKWARD, FORWARD
from retrograd.dialects.context import make_context
from retrograd.pipelines.analysis.partition.op_kinds import KINDS, OpKind, op_kind


def test_every_name_is_an_op_of_the_torch_dialect_or_an_op_of_pytorchs_that_it_lacks() -> None:
    context = make_context()
    names = [name for name in KINDS if not name.startswith("torch.retrograd.")]
    lacking = {name for name in names if not context.is_registered_operation(name)}
    assert lacking == {BACKWARD, FORWARD}
    assert all(hasattr(torch.ops.aten, name.removeprefix("torch.aten.")) for name in lacking)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("torch.aten.mm", OpKind.COMPUTE),
        ("torch.aten.convolution", OpKind.COMPUTE),
        ("torch.aten.exp", OpKind.POINTWISE),
        ("torch.aten.transpose.int", OpKind.VIEW),
        ("torch.aten.cat", OpKind.DATA_MOVEMENT),
        ("torch.aten.sum.dim_IntList", OpKind.REDUCTION),
        ("torch.aten.scatter_add", OpKind.SCATTER),
        ("torch.aten.bernoulli", OpKind.RANDOM),
        ("torch.vtensor.literal", OpKind.CONSTANT),
    ],
)
def test_kinds_of_well_known_ops(name: str, kind: OpKind) -> None:
    assert op_kind(name, has_tensor_result=True) is kind


def test_scalars_and_lists_are_constants() -> None:
    assert op_kind("torch.constant.int", has_tensor_result=False) is OpKind.CONSTANT
    assert op_kind("torch.prim.ListConstruct", has_tensor_result=False) is OpKind.CONSTANT


@pytest.mark.parametrize(
    ("name", "has_tensor_result"),
    [
        ("torch.aten.no_such_op", True),
        ("torch.operator", True),
        ("torch.aten.Int.Tensor", False),
        ("torch.prim.no_such_op", True),
        ("bwd.call_hook", True),
        ("bwd.create_token", False),
    ],
)
def test_what_is_unknown_is_opaque(name: str, has_tensor_result: bool) -> None:
    assert op_kind(name, has_tensor_result=has_tensor_result) is OpKind.OPAQUE
