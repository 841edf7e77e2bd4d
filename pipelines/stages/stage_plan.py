# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Stage plans as attributes of a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrograd.contract.plan import StagePlan
from retrograd.dialects import ir

PLAN_ATTRIBUTE = "bwd.plan"
# Of functions that were cut at their islands: a plan under the name of each.
ISLAND_PLANS_ATTRIBUTE = "bwd.island_plans"


def write_plan(module: ir.Operation, plan: StagePlan) -> None:
    """Leave the plan on a module."""
    module.attributes[PLAN_ATTRIBUTE] = _attribute(plan.to_dict())


def read_plan(module: ir.Operation) -> StagePlan:
    """The plan that ``bwd-outline-stages`` left on a module.

    Raises:
        ValueError: there is none.
    """
    if PLAN_ATTRIBUTE not in module.attributes:
        raise ValueError("the module has no stage plan; run bwd-outline-stages first")
    return StagePlan.from_dict(_plain(module.attributes[PLAN_ATTRIBUTE]))


def write_island_plans(module: ir.Operation, plans: Mapping[str, StagePlan]) -> None:
    """Leave on a module the plans of functions that were cut at their islands, by name."""
    module.attributes[ISLAND_PLANS_ATTRIBUTE] = _attribute({name: plan.to_dict() for name, plan in plans.items()})


def read_island_plans(module: ir.Operation) -> dict[str, StagePlan]:
    """The plans that ``bwd-outline-islands`` left on a module, by the name of the function; none where it cut none.

    Raises:
        ValueError: one of them is no plan.
    """
    if ISLAND_PLANS_ATTRIBUTE not in module.attributes:
        return {}
    plans = _plain(module.attributes[ISLAND_PLANS_ATTRIBUTE])
    return {name: StagePlan.from_dict(plan) for name, plan in plans.items()}


def _attribute(value: Any) -> ir.Attribute:
    match value:
        case dict():
            return ir.DictAttr.get({key: _attribute(item) for key, item in value.items()})
        case list():
            return ir.ArrayAttr.get([_attribute(item) for item in value])
        case int():
            return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
        case _:
            return ir.StringAttr.get(value)


def _plain(attribute: ir.Attribute) -> Any:
    if isinstance(attribute, ir.DictAttr):
        return {entry.name: _plain(entry.attr) for entry in attribute}
    if isinstance(attribute, ir.ArrayAttr):
        return [_plain(item) for item in attribute]
    return attribute.value
