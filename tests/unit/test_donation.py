# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which arguments a function may overwrite: residuals that are nothing else, and what a plan frees behind a stage."""

from retrograd.contract.plan import Free, RunIsland, RunStage, StagePlan
from retrograd.contract.tensors import FunctionSpec, TensorSpec
from retrograd.pipelines.stages.donation import find_donated, find_freed


def tensor(role: str, name: str) -> TensorSpec:
    return TensorSpec(name, role, (4,), "float32", value=name)


BACKWARD = FunctionSpec(
    "backward",
    (tensor("param", "weight"), tensor("saved", "saved.relu"), tensor("saved", "output"), tensor("tangent", "t")),
    (tensor("grad", "grad.weight"),),
)
FORWARD = FunctionSpec("forward", (tensor("input", "x"),), (tensor("saved", "saved.relu"),))


def test_residuals_of_a_whole_backward_less_those_that_are_outputs() -> None:
    assert find_donated([FORWARD, BACKWARD], {}) == {"backward_into": (1,)}


def test_a_forward_owns_nothing() -> None:
    assert find_donated([FORWARD], {}) == {}


def test_of_a_plan_what_is_freed_right_behind_a_stage() -> None:
    plan = StagePlan(
        ("w", "saved", "output", "t"),
        (
            RunStage("first", ("w", "saved", "t"), ("a", "b")),
            RunStage("second", ("a", "saved", "output"), ("c",)),
            Free(("a", "saved", "output")),
            RunStage("third", ("b", "c"), ("d",)),
            Free(("b",)),
        ),
        ("c", "d"),
    )
    assert find_donated([FORWARD, BACKWARD], {"backward": plan}) == {"second_into": (0, 1), "third_into": (0,)}


def test_what_torch_gave_and_what_is_taken_twice_is_nobodys_to_overwrite() -> None:
    plan = StagePlan(
        ("x",),
        (
            RunIsland(0, ("x",), ("view",), (16,)),
            RunStage("first", ("view",), ("a",)),
            Free(("view",)),
            RunStage("second", ("a", "a"), ("b",)),
            Free(("a",)),
        ),
        ("b",),
    )
    assert find_freed(plan, set()) == {"first_into": (), "second_into": ()}


def test_a_function_that_is_called_again_keeps_its_arguments() -> None:
    steps = (RunStage("f", ("x",), ("a",)), RunStage("f", ("a",), ("b",)), Free(("a",)))
    assert find_freed(StagePlan(("x",), steps, ("b",)), set()) == {}
