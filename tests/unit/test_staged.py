# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The staged pipeline: what each stage leaves, how a refusal reads, and when an executable is compiled at all."""

import contextlib
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from retrograd.contract.plan import StagePlan, insert_frees, whole_plan
from retrograd.contract.tensors import FunctionSpec, TensorSpec
from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.pipelines.devices.targets import CPU, Target
from retrograd.pipelines.infra.diagnostics import PipelineError
from retrograd.pipelines.infra.errors import CompileError
from retrograd.pipelines.stages import staged
from retrograd.pipelines.stages.kept_stages import KeptStages, Staging
from retrograd.pipelines.stages.stage_steps import STAGES
from retrograd.pipelines.stages.staged import Progress, StagedModule, build_executable, stage_module
from retrograd.pipelines.toolchain.executable import Executable
from retrograd.pipelines.toolchain.timeline import Step

JOINT = """
!one = !torch.vtensor<[4],f32>
!places = !torch.vtensor<[4],si64>
func.func @joint(%x: !one {bwd.role = "input", bwd.name = "x"}, %i: !places {bwd.role = "input", bwd.name = "i"},
                 %t: !one {bwd.role = "tangent", bwd.name = "t"})
    -> (!one {bwd.role = "output", bwd.name = "out"}, !one {bwd.role = "grad", bwd.name = "grad.x"}) {
  %zero = torch.constant.int 0
  %s = torch.aten.scatter_add %x, %zero, %i, %x {bwd.values = ["s"]} : !one, !torch.int, !places, !one -> !one
  %out = torch.aten.neg %s : !one -> !one
  %grad = torch.aten.mul.Tensor %t, %s : !one, !one -> !one
  return %out, %grad : !one, !one
}
"""
FORWARD_ONLY = """
!one = !torch.vtensor<[4],f32>
func.func @forward(%x: !one {bwd.role = "input", bwd.name = "x"}) -> (!one {bwd.role = "output", bwd.name = "out"}) {
  %out = torch.aten.neg %x : !one -> !one
  return %out : !one
}
"""
MADE = Executable(
    b"\x00vmfb\n\xff",
    ("--flag", "--other"),
    {"forward": 64, "backward": 0},
    1.5,
    timelines={"forward": (Step("matmul", "model.py:3", 64),)},
)


class Store:
    """Keeps what is put, by the parts of its key."""

    def __init__(self) -> None:
        self.data: dict[tuple[tuple[str, str], ...], bytes] = {}

    def get(self, parts: dict[str, str]) -> bytes | None:
        return self.data.get(tuple(parts.items()))

    def put(self, parts: dict[str, str], data: bytes) -> None:
        self.data[tuple(parts.items())] = data

    def making(self, _parts: dict[str, str]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def stage(text: str = JOINT, policy: str = "min-cut", listener: Callable[[str], None] | None = None) -> StagedModule:
    with make_context(), ir.Location.unknown():
        return stage_module(ir.Module.parse(text), policy, Progress(listener))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compiled; the compiler itself is left out."""
    modules: list[str] = []

    def lower(module: bytes, target: Target, *, twins_alone: bool, donating: bool) -> str:
        assert donating is twins_alone
        modules.append(module.decode())
        return "linalg"

    monkeypatch.setattr(staged, "lower_to_linalg", lower)
    monkeypatch.setattr(staged, "compile_executable", lambda linalg, target, *, parts: MADE)
    return modules


def test_each_stage_is_kept_as_text() -> None:
    module = stage()
    assert list(module.texts) == list(STAGES)
    assert "@joint" in module.texts["imported"]
    assert "@joint" not in module.texts["partitioned"]
    assert "bwd.save" in module.texts["partitioned"]
    assert '"bwd.' not in module.texts["scheduled"]
    assert "loc(" in module.source
    assert "loc(" not in module.texts["scheduled"]


def test_interfaces_and_what_was_decided() -> None:
    module = stage()
    assert [f.name for f in module.functions] == ["forward", "backward"]
    assert [r.name for r in module.function("forward").results] == ["out", "saved.s"]
    assert [(a.name, a.role) for a in module.function("backward").arguments] == [("saved.s", "saved"), ("t", "tangent")]
    assert (module.partition["policy"], module.partition["saved_bytes"]) == ("min-cut", 16)
    assert module.partition["recomputed"] == []


def test_the_policy_is_passed_on() -> None:
    assert stage(policy="default").partition["policy"] == "default"


def test_phases_are_announced_and_timed() -> None:
    heard: list[str] = []
    module = stage(listener=heard.append)
    assert heard == ["verify", "partition", "schedule"]
    assert list(module.seconds) == heard


def test_a_forward_alone_is_not_partitioned() -> None:
    module = stage(FORWARD_ONLY)
    assert list(module.texts) == ["imported", "scheduled"]
    assert module.partition == {}
    assert [f.name for f in module.functions] == ["forward"]
    assert (module.saved, stage(FORWARD_ONLY.replace("@forward", "@backward")).saved) == ([], [])
    assert stage().saved == ["s"]


def test_a_refusal_names_the_pass_and_leaves_a_replay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(PipelineError) as caught:
        stage(JOINT.replace('bwd.role = "grad"', 'bwd.role = "output"'))
    assert caught.value.pass_name == "bwd-partition"
    assert "nothing to differentiate" in str(caught.value)
    assert caught.value.replay is not None
    command, file, _ = shlex.split(caught.value.replay)
    assert (command, [Path(file)]) == ("retrograd-opt", list(tmp_path.iterdir()))


def test_linalg_of_ops_that_the_context_does_not_know() -> None:
    text = stage().linalg()
    assert "tm_tensor.scatter" in text
    assert "func.func @backward_into(" in text
    assert "loc(" not in text


def test_what_was_compiled_is_found_again(compiled: list[str]) -> None:
    store, heard = Store(), list[str]()
    versions = {"torch": "2"}
    for expected in (False, True):
        assert build_executable(stage(), CPU, versions, Progress(heard.append), store) == (MADE, expected)
    assert len(compiled) == 1
    assert "loc(" in compiled[0]
    assert heard == ["lower", "iree-compile"]


def test_what_another_process_made_meanwhile_is_taken(compiled: list[str]) -> None:
    class Waiting(Store):
        def making(self, parts: dict[str, str]) -> contextlib.AbstractContextManager[None]:
            self.data = made.data
            return contextlib.nullcontext()

    made = Store()
    build_executable(stage(), CPU, {}, Progress(), made)
    assert build_executable(stage(), CPU, {}, Progress(), Waiting()) == (MADE, True)
    assert len(compiled) == 1


def test_stages_are_found_again_by_the_module_and_how_it_was_staged() -> None:
    """By each of: the module, where its ops come from, how it is staged, and with what."""
    staging, versions = Staging("min-cut", for_loss=False, cut_gain=None), {"torch": "2"}
    ways = [replace(staging, policy="default"), replace(staging, for_loss=True), replace(staging, cut_gain=0)]
    moved, other = "\n" + JOINT, JOINT.replace("aten.neg", "aten.exp")
    store, made = Store(), replace(stage(), whole=stage())
    with make_context(), ir.Location.unknown():
        kept, *others = (
            KeptStages.of(store, ir.Module.parse(text), way, made_with)
            for text, way, made_with in (
                (JOINT, staging, versions),
                (moved, staging, versions),
                (other, staging, versions),
                *((JOINT, way, versions) for way in ways),
                (JOINT, staging, {"torch": "3"}),
            )
        )
        assert KeptStages.of(None, ir.Module.parse(JOINT), staging, versions).get(Progress()) is None
    later = Progress()
    assert kept.get(later) is None
    kept.put(made)
    found = kept.get(later)
    assert found == replace(made, seconds={}, whole=replace(stage(), seconds={}))
    assert found.seconds is later.seconds
    assert [another.get(later) for another in others] == [None] * 6


def test_kept_stages_have_open_sizes_and_plans() -> None:
    """What JSON has no word for comes back as it was."""
    size = ("mul", "s0", 2)
    tensor = TensorSpec("x", "saved", (size, 3), "float32", "view", (8, 3))
    function = FunctionSpec("backward.stage_0", (tensor,), (), 64)
    plan = insert_frees(whole_plan(function))
    made = replace(stage(), stages=(function,), plans={"backward": plan}, memory_budget=64, merged={"a": "b"})
    with make_context(), ir.Location.unknown():
        kept = KeptStages.of(Store(), ir.Module.parse(JOINT), Staging("budget", for_loss=False, cut_gain=None), {})
    kept.put(made)
    assert kept.get(Progress()) == replace(made, seconds={})


def test_a_change_of_place_in_the_source_is_no_change(compiled: list[str]) -> None:
    store = Store()
    for text in (JOINT, "\n\n" + JOINT):
        build_executable(stage(text), CPU, {}, Progress(), store)
    assert len(compiled) == 1


def test_what_only_the_runtime_calls_is_an_executable_of_its_own(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[bool, bool]] = []

    def lower(_source: bytes, _target: Target, **options: bool) -> str:
        asked.append((options["twins_alone"], options["donating"]))
        return "linalg"

    monkeypatch.setattr(staged, "lower_to_linalg", lower)
    store = Store()
    for standalone in (True, False):
        assert build_executable(stage(), CPU, {}, Progress(), store, standalone=standalone) == (MADE, False)
    # Cut by islands, it cannot be written to a file either.
    cut = replace(stage(), plans={"backward": StagePlan((), (), ())})
    assert build_executable(cut, CPU, {}, Progress(), None) == (MADE, False)
    assert asked == [(False, False), (True, True), (True, True)]


@pytest.mark.parametrize("change", ["module", "target", "version", "cpu"])
def test_what_it_depends_on_is_part_of_the_key(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    store = Store()
    build_executable(stage(), CPU, {"iree": "1"}, Progress(), store)
    module = stage(JOINT.replace("torch.aten.neg", "torch.aten.exp") if change == "module" else JOINT)
    target = replace(CPU, ladder=(("--other",),)) if change == "target" else CPU
    if change == "cpu":
        monkeypatch.setattr(staged, "host_cpu", lambda: "another")
    _, found = build_executable(module, target, {"iree": "2" if change == "version" else "1"}, Progress(), store)
    assert not found
    assert len(store.data) == 2


def test_nothing_is_kept_of_a_failure(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(linalg: str, target: object, *, parts: object) -> Executable:
        raise CompileError("iree-compile", "message", "log", "replay")

    monkeypatch.setattr(staged, "compile_executable", fail)
    store = Store()
    with pytest.raises(CompileError):
        build_executable(stage(), CPU, {}, Progress(), store)
    assert store.data == {}


def test_without_a_store_it_is_compiled_each_time(compiled: list[str]) -> None:
    for _ in range(2):
        assert build_executable(stage(), CPU, {}, Progress(), None) == (MADE, False)
    assert len(compiled) == 2


def test_a_phase_that_fails_is_timed_too() -> None:
    progress = Progress()
    with pytest.raises(KeyError), progress.phase("lower"):
        raise KeyError
    assert list(progress.seconds) == ["lower"]
