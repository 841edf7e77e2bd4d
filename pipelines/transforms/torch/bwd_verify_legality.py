# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-verify-legality``: what may be in a module at each hand-over, stated in code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field
from itertools import chain
from typing import Any, Literal

from retrograd.contract.attributes import BWD_NAME, BWD_ROLE
from retrograd.contract.plan import find_plan_problems
from retrograd.contract.roles import ARGUMENT_ROLES, RESULT_ROLES
from retrograd.dialects import ir
from retrograd.dialects.bwd import show_attribute
from retrograd.pipelines.infra.functions import functions
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.stages.interface import read_interface
from retrograd.pipelines.stages.stage_plan import PLAN_ATTRIBUTE, read_island_plans, read_plan

_LEGAL: dict[str, tuple[str, ...]] = {
    "imported": ("builtin", "func", "torch", "bwd"),
    "staged": ("builtin", "func", "torch"),
    "linalg": (
        "builtin",
        "func",
        "affine",
        "arith",
        "cf",
        "complex",
        "linalg",
        "math",
        "memref",
        "ml_program",
        "scf",
        "tensor",
        "tm_tensor",
        "util",
    ),
}
_LEGAL_OPS = {
    # Split when functions are cut: what is not, is refused at the next level.
    "staged": ("bwd.collective",),
    "linalg": (
        "bwd.attention",
        "bwd.attention_backward",
        "bwd.convolution",
        "bwd.convolution_filter_gradient",
        "bwd.convolution_input_gradient",
        "bwd.dropped_attention",
        "bwd.dropped_attention_backward",
        "bwd.dropped_attention_backward_with_mask",
    ),
}
"""Ops that are legal though their dialect is not."""
_ILLEGAL_OPS = {"linalg": ("builtin.unrealized_conversion_cast",)}
"""Ops that are not though their dialect is: a conversion that nothing came of."""
_REMEDY = {
    "imported": "a captured graph holds torch and bwd ops only; raise or lower this op first",
    "staged": "run convert-bwd-to-func",
    "linalg": "torch-mlir does not lower this op: add a decomposition for it, or compute it outside the compiled model",
}


class BwdVerifyLegality(ModulePass):
    """Fails on the first op that has no place at this level, on arguments or results without a role, on a plan of
    stages that does not fit the functions, and on a lowering that fixed an open size.

    Whether a schedule of hooks is legal needs no check of its own: it is, exactly if tokens dominate their uses.
    """

    description = "Check that a module holds only what its level allows"

    level: Literal["imported", "staged", "linalg"] = field(
        default="staged", metadata={"help": "imported: torch and bwd; staged: no bwd left; linalg: no torch left"}
    )

    def apply(self, module: ir.Operation) -> None:
        for op in _walk(module):
            if not _is_legal(op.name, self.level):
                raise PassFailure(
                    op, f"bwd-verify-legality: {op.name} is not legal at level '{self.level}'", _REMEDY[self.level]
                )
        if self.level == "linalg":
            check_sizes(module)
            return
        for func in functions(module):
            problems = find_role_problems(func)
            if problems:
                raise PassFailure(
                    func, f"bwd-verify-legality: {problems[0]}", "set bwd.role and bwd.name when the function is built"
                )
        if self.level == "staged":
            _check_plans(module)


def _is_legal(name: str, level: str) -> bool:
    if name in _ILLEGAL_OPS.get(level, ()):
        return False
    return name.partition(".")[0] in _LEGAL[level] or name in _LEGAL_OPS.get(level, ())


def check_sizes(module: ir.Operation) -> None:
    """Refuse a lowering that took a size that differs from call to call for a number.

    Raises:
        PassFailure: at the cast that fixes a size.
    """
    for op in _walk(module):
        if op.name != "tensor.cast":
            continue
        source, result = ir.RankedTensorType(op.operands[0].type), ir.RankedTensorType(op.results[0].type)
        if any(source.is_dynamic_dim(i) and not result.is_dynamic_dim(i) for i in range(source.rank)):
            message = f"bwd-verify-legality: a size of {source} is taken for a number, in {result}"
            remedy = "torch-mlir cannot lower this op for sizes that differ: compile for fixed sizes along this axis"
            raise PassFailure(op, message, remedy)


def _check_plans(module: ir.Operation) -> None:
    try:
        plans = [read_plan(module)] if PLAN_ATTRIBUTE in module.attributes else []
        plans += read_island_plans(module).values()
    except ValueError as error:
        raise PassFailure(module, f"bwd-verify-legality: {error}", "let bwd-outline-stages write it") from error
    interfaces = [read_interface(func) for func in functions(module)] if plans else []
    for problem in chain.from_iterable(find_plan_problems(plan, interfaces) for plan in plans):
        raise PassFailure(module, f"bwd-verify-legality: in the plan, {problem}", "run bwd-outline-stages again")


def _walk(op: ir.Operation) -> Iterator[ir.Operation]:
    yield op
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _walk(inner.operation)


# -- Roles ------------------------------------------------------------------------------------------------------------

# Says what a function's arguments and results are to the user: ``bwd.role`` and ``bwd.name`` on them.


def find_role_problems(function: ir.Operation) -> list[str]:
    """Says what is wrong with the roles and names of a ``func.func``'s arguments and results; empty if all is well.
    Each must have a role out of `ARGUMENT_ROLES` or `RESULT_ROLES` and a name that is not empty."""
    signature = function.attributes["function_type"].value
    problems: list[str] = []
    for what, key, number, roles in (
        ("argument", "arg_attrs", len(signature.inputs), ARGUMENT_ROLES),
        ("result", "res_attrs", len(signature.results), RESULT_ROLES),
    ):
        attributes = function.attributes[key] if key in function.attributes else [{}] * number
        for index, entry in enumerate(attributes):
            problems += [f"{what} {index} {problem}" for problem in _find_entry_problems(entry, roles)]
    return problems


def _find_entry_problems(entry: Any, roles: Sequence[str]) -> Iterator[str]:
    role, name = (_find(entry, key) for key in (BWD_ROLE, BWD_NAME))
    if not (isinstance(role, ir.StringAttr) and role.value in roles):
        yield f"expects bwd.role to be one of {', '.join(roles)}, found {show_attribute(role)}"
    if not (isinstance(name, ir.StringAttr) and name.value):
        yield f"expects bwd.name to be a string that is not empty, found {show_attribute(name)}"


def _find(entry: Any, key: str) -> Any:
    # A DictAttr's `get` makes a new one.
    return entry[key] if key in entry else None  # noqa: SIM401
