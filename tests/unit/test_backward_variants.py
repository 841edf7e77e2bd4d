# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Backwards without some tangents, of a module that went through all stages: what they take, give, and keep alive."""

from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.pipelines.stages.backward_variants import (
    find_left_out,
    find_tangents,
    stage_first,
    stage_variant,
    variant_peak,
)
from retrograd.pipelines.stages.peaks import step_peak
from retrograd.pipelines.stages.staged import Progress, StagedModule, stage_module

# Two outputs of 64 bytes, each with a gradient of its own; the second's slope is saved.
JOINT = """
!v = !torch.vtensor<[16],f32>
func.func @joint(%x: !v {bwd.role = "param", bwd.name = "x", bwd.value = "x"},
                 %w: !v {bwd.role = "param", bwd.name = "w", bwd.value = "w"},
                 %t: !v {bwd.role = "tangent", bwd.name = "tangent.a", bwd.value = "tangents_1"},
                 %u: !v {bwd.role = "tangent", bwd.name = "tangent.b", bwd.value = "tangents_2"})
    -> (!v {bwd.role = "output", bwd.name = "a"}, !v {bwd.role = "output", bwd.name = "b"},
        !v {bwd.role = "grad", bwd.name = "grad.x", bwd.value = "gx"},
        !v {bwd.role = "grad", bwd.name = "grad.w", bwd.value = "gw"}) {
  %zero = torch.constant.int 0
  %none = torch.constant.none
  %a = torch.aten.neg %x : !v -> !v
  %s = torch.aten.cumsum %w, %zero, %none {bwd.values = ["s"]} : !v, !torch.int, !torch.none -> !v
  %b = torch.aten.exp %s {bwd.values = ["b"]} : !v -> !v
  %gx = torch.aten.neg %t {bwd.values = ["gx"]} : !v -> !v
  %gw = torch.aten.mul.Tensor %u, %s {bwd.values = ["gw"]} : !v, !v -> !v
  return %a, %b, %gx, %gw : !v, !v, !v, !v
}
"""
VALUE = 64


def stage(joint: str = JOINT) -> StagedModule:
    with make_context(), ir.Location.unknown():
        return stage_module(ir.Module.parse(joint), "default", Progress())


def test_a_variant_is_a_backward_alone_that_takes_and_gives_less() -> None:
    staged, phases = stage(), list[str]()
    assert find_tangents(staged) == ("tangents_1", "tangents_2")
    variant = stage_variant(staged, {"tangents_2"}, Progress(phases.append))
    (backward,) = variant.functions
    assert [a.value for a in backward.arguments] == ["tangents_1"]
    assert [r.name for r in backward.results] == ["grad.x"]
    assert phases == ["drop tangents", "schedule"]
    assert "@forward" not in variant.texts["scheduled"]
    assert "bwd.joined" not in variant.texts["scheduled"]
    beside_joined = stage_variant(staged, {"tangents_2"}, Progress(), are_joined=True)
    assert "bwd.joined" in beside_joined.source
    # What it was made of is as it was.
    assert [r.name for r in staged.function("backward").results] == ["grad.x", "grad.w"]
    (backward,) = stage_variant(staged, {"tangents_1"}, Progress()).functions
    assert [a.value for a in backward.arguments] == ["s", "tangents_2"]


def test_without_any_tangent_nothing_is_left() -> None:
    (backward,) = stage_variant(stage(), {"tangents_1", "tangents_2"}, Progress()).functions
    assert (backward.arguments, backward.results) == ((), ())


def test_the_peak_of_a_step_with_a_variant() -> None:
    staged = stage()
    variant = stage_variant(staged, {"tangents_2"}, Progress())
    # Outputs and the residual, then gradients.
    assert step_peak(staged, {}) == 5 * VALUE
    assert variant_peak(staged, variant, {}) == 4 * VALUE
    assert variant_peak(staged, variant, {"backward_into": 1000}) == 4 * VALUE + 1000
    assert variant_peak(staged, variant, {"forward_into": 1000}) == 3 * VALUE + 1000


NUMBER = "!torch.vtensor<[],f32>"
OF_LOSS = {
    "%t: !v": f"%t: {NUMBER}",
    '(!v {bwd.role = "output", bwd.name = "a"}': f'({NUMBER} {{bwd.role = "output", bwd.name = "a"}}',
    "%a = torch.aten.neg %x : !v -> !v": f"%a = torch.aten.sum %x, %none : !v, !torch.none -> {NUMBER}",
    "torch.aten.neg %t": "torch.aten.mul.Tensor %x, %t",
    '["gx"]} : !v -> !v': f'["gx"]}} : !v, {NUMBER} -> !v',
    "%gw : !v,": f"%gw : {NUMBER},",
}


def with_loss() -> StagedModule:
    """The module with the sum of what was its first output."""
    joint = JOINT
    for old, new in OF_LOSS.items():
        joint = joint.replace(old, new)
    with make_context(), ir.Location.unknown():
        return stage_module(ir.Module.parse(joint), "default", Progress())


def test_the_backward_of_a_loss_leaves_out_what_is_no_number() -> None:
    assert find_left_out(stage()) == frozenset()
    assert find_left_out(with_loss()) == {"tangents_2"}
    # The first output is what an attribute is set to.
    assert find_left_out(stage(JOINT.replace('"tangent.a"', '"tangent.new.a"'))) == {"tangents_1"}


def test_the_first_module_has_the_whole_one() -> None:
    staged = with_loss()
    first = stage_first(staged, {"tangents_2"}, Progress())
    assert first.whole is staged
    assert [f.name for f in first.functions] == ["forward", "backward"]
    assert [r.name for r in first.function("backward").results] == ["grad.x"]
    # The forward saves what the backward of all outputs takes.
    assert first.function("forward") == staged.function("forward")
    assert first.texts["partitioned"] == staged.texts["partitioned"]


def test_a_loss_without_gradients_is_no_reason() -> None:
    staged = with_loss()
    assert stage_first(staged, {"tangents_1", "tangents_2"}, Progress()) is staged
