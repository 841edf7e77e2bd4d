# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Policies as values, and passes that are given one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graph_text import JOINT

from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.pipelines.analysis.partition.pareto import InfeasibleBudget
from retrograd.pipelines.analysis.partition.policies import POLICIES, PointOfCurve, WithinBudget, find_curve
from retrograd.pipelines.infra.diagnostics import PipelineError
from retrograd.pipelines.infra.runner import run_passes, run_pipeline
from retrograd.pipelines.stages.staged import read_curve
from retrograd.pipelines.transforms.torch.bwd_partition import BwdPartition


@pytest.fixture
def points() -> list[PointOfCurve]:
    """Of the module, each point of its curve as a policy."""
    with make_context(), ir.Location.unknown():
        curve, graph = read_curve(ir.Module.parse(JOINT))
    return [PointOfCurve(point, curve, graph) for point in curve.points]


def partition(*passes: str | BwdPartition) -> str:
    with make_context(), ir.Location.unknown():
        module = ir.Module.parse(JOINT)
        run_passes(module, passes)
        return str(module)


def test_a_point_is_what_its_text_gives(points: list[PointOfCurve]) -> None:
    assert [point.budget for point in points] == ["4096", "3072"]
    for point in points:
        pass_ = BwdPartition.by(point)
        assert str(pass_) == f"bwd-partition{{policy=budget budget={point.budget}}}"
        assert partition(pass_) == partition(str(pass_))
        assert point.decide(point.graph) == WithinBudget(point.point.peak).decide(point.graph)


def test_policies_without_a_budget_are_what_their_names_give() -> None:
    for name, policy in POLICIES.items():
        assert policy.budget is None
        assert partition(BwdPartition.by(policy, in_order=True)) == partition(
            f"bwd-partition{{policy={name} in-order=true}}"
        )
    # What has its default is left out.
    assert str(BwdPartition.by(POLICIES["min-cut"])) == "bwd-partition"


def test_a_plan_is_for_its_graph_alone(points: list[PointOfCurve]) -> None:
    other = replace(points[0].graph, mutated=frozenset([0]))
    with pytest.raises(AssertionError, match="another graph"):
        points[0].decide(other)


def test_a_budget_that_cannot_be_kept(points: list[PointOfCurve]) -> None:
    graph = points[0].graph
    assert find_curve(graph).table() == points[0].curve.table()
    with pytest.raises(InfeasibleBudget) as caught:
        WithinBudget(100).decide(graph)
    assert caught.value.least == 3072
    assert WithinBudget(1.0).decide(graph).plan == points[0].point.plan


def test_a_value_is_no_option() -> None:
    assert "value" not in [option.name for option in BwdPartition.options()]
    with make_context(), ir.Location.unknown(), pytest.raises(PipelineError, match="no option 'value'"):
        run_pipeline(ir.Module.parse(JOINT), "builtin.module(bwd-partition{value=1})")


def test_the_replay_of_a_pass_that_was_made_has_its_options(points: list[PointOfCurve]) -> None:
    with make_context(), ir.Location.unknown():
        module = ir.Module.parse(JOINT.replace('bwd.role = "grad"', 'bwd.role = "output"'))
        with pytest.raises(PipelineError, match="nothing to differentiate") as caught:
            run_passes(module, [BwdPartition.by(points[1])])
    assert caught.value.replay is not None
    assert "bwd-partition{policy=budget budget=3072}" in caught.value.replay
