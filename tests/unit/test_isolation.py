# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How far trials compile that find the ops which a compilation fails for; the compiler itself is left out."""

from collections.abc import Callable
from typing import Any

import pytest

from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.pipelines.devices.targets import CPU
from retrograd.pipelines.infra.errors import CompileError
from retrograd.pipelines.stages import failing_ops
from retrograd.pipelines.stages.failing_ops import find_failed_ops
from retrograd.pipelines.stages.staged import Progress, stage_module

FORWARD = """
!one = !torch.vtensor<[4],f32>
func.func @forward(%x: !one {bwd.role = "input", bwd.name = "x"}) -> (!one {bwd.role = "output", bwd.name = "out"}) {
  %0 = torch.aten.neg %x {bwd.values = ["fine"]} : !one -> !one
  %1 = torch.aten.exp %0 {bwd.values = ["refused"]} : !one -> !one
  %2 = torch.aten.sin %1 {bwd.values = ["fine too"]} : !one -> !one
  return %2 : !one
}
"""


def find_failed(
    monkeypatch: pytest.MonkeyPatch, text: str, to_phase: Callable[..., None], to_the_end: Callable[..., None]
) -> list[tuple[str, tuple[str, ...]]]:
    """The ops that are found to fail, with these in the place of the compiler."""
    monkeypatch.setattr(failing_ops, "lower_to_linalg", lambda staged, target, **_: staged.decode())
    monkeypatch.setattr(failing_ops, "compile_to_phase", to_phase)
    monkeypatch.setattr(failing_ops, "compile_executable", to_the_end)
    with make_context(), ir.Location.unknown():
        staged = stage_module(ir.Module.parse(text), "min-cut", Progress(None))
        failed = find_failed_ops(staged, CPU, CompileError("iree-compile", "error: no code for it", "", ""))
    return [(op.op, op.values) for op in failed]


@pytest.mark.parametrize("early", [True, False])
def test_trials_go_as_far_as_the_failure(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code for all other ops is not made where the failure comes before there is any."""
    tried = {True: 0, False: 0}

    def compile_part(linalg: str, is_early: bool) -> None:
        tried[is_early] += 1
        if "aten.exp" in linalg and is_early == early:
            raise CompileError("iree-compile", "error: no code for it", "", "")

    def to_phase(linalg: str, target: Any, phase: str, **_: Any) -> None:
        compile_part(linalg, True)

    def to_the_end(linalg: str, target: Any, **_: Any) -> None:
        compile_part(linalg, False)

    assert find_failed(monkeypatch, FORWARD, to_phase, to_the_end) == [("torch.aten.exp", ("refused",))]
    assert tried[not early] == (0 if early else 1)


def test_a_layout_of_our_own_compiles_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def to_phase(*_: Any, **__: Any) -> None:
        raise AssertionError("it takes no such phase")

    monkeypatch.setattr(failing_ops, "lower_to_linalg", lambda staged, target, **_: staged.decode())
    monkeypatch.setattr(failing_ops, "compile_to_phase", to_phase)
    monkeypatch.setattr(failing_ops, "compile_executable", lambda linalg, target, **_: None)
    with make_context(), ir.Location.unknown():
        staged = stage_module(ir.Module.parse(FORWARD), "min-cut", Progress(None))
        assert find_failed_ops(staged, CPU.in_order(), CompileError("iree-compile", "error: why", "", "")) == []


NUMBERS = "0x040000000000803F00000040"
CONSTANT = f"""
!one = !torch.vtensor<[2],f32>
func.func @forward(%x: !one {{bwd.role = "input", bwd.name = "x"}})
    -> (!one {{bwd.role = "output", bwd.name = "out"}}) {{
  %c = torch.vtensor.literal(dense_resource<numbers> : tensor<2xf32>) : !one
  %0 = torch.aten.mul.Tensor %x, %c {{bwd.values = ["fine"]}} : !one, !one -> !one
  %1 = torch.aten.exp %0 {{bwd.values = ["refused"]}} : !one -> !one
  return %1 : !one
}}
{{-#
  dialect_resources: {{ builtin: {{ numbers: "{NUMBERS}" }} }}
#-}}
"""


def test_trials_have_the_numbers_of_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op that reads some is else refused for their absence."""

    def compile_parts(linalg: str, *_: Any, **__: Any) -> None:
        lacks_numbers = "dense_resource<numbers>" in linalg and NUMBERS not in linalg
        if lacks_numbers or "aten.exp" in linalg:
            raise CompileError("iree-compile", "error: no code for it", "", "")

    assert find_failed(monkeypatch, CONSTANT, compile_parts, compile_parts) == [("torch.aten.exp", ("refused",))]


OPEN = """
!rows = !torch.vtensor<[?,4],f32>
module attributes {bwd.sizes = {rows = 6 : i64}} {
  func.func @forward(%x: !rows {bwd.role = "input", bwd.name = "x", bwd.shape = "rows, 4"},
      %rows: !torch.int {bwd.role = "size", bwd.name = "rows"})
      -> (!rows {bwd.role = "output", bwd.name = "out", bwd.shape = "rows, 4"}) {
    %0 = torch.aten.exp %x {bwd.values = ["refused"], bwd.shapes = ["rows, 4"]} : !rows -> !rows
    return %0 : !rows
  }
}
"""


def test_trials_have_the_sizes_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view of open sizes is else refused for their absence."""

    def compile_parts(linalg: str, *_: Any, **__: Any) -> None:
        module = ir.Module.parse(linalg)
        if "bwd.sizes" in module.operation.attributes:
            raise CompileError("iree-compile", "error: no code for it", "", "")

    assert find_failed(monkeypatch, OPEN, compile_parts, compile_parts) == [("torch.aten.exp", ("refused",))]
