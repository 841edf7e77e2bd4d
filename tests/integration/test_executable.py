# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Executables: flags tried in turn, scratch bytes per function, and how a compilation fails."""

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from faulty_programs import ONE_WINDOW

from retrograd.contract.archive import part_member
from retrograd.pipelines.devices.device_targets import (
    DATA_TILING,
    FEWER_FUSIONS,
    IN_ORDER,
    PACKING_MARK,
    PLAIN_REDUCTIONS,
    SHARED_BINDINGS,
)
from retrograd.pipelines.devices.targets import CPU, Target, find_target
from retrograd.pipelines.infra.errors import CompileError
from retrograd.pipelines.toolchain import executable
from retrograd.pipelines.toolchain.compiler_parts import UNVERIFIED
from retrograd.pipelines.toolchain.executable import (
    Kernel,
    compile_executable,
    compile_to_phase,
    iree_tool,
    measure_scratch,
    widest_kernel,
)
from retrograd.pipelines.toolchain.lowering import lower_to_linalg
from retrograd.pipelines.toolchain.subprocesses import ToolResult, run_tool
from retrograd.pipelines.toolchain.warm_tool import WarmTool
from retrograd.runtime.programs.executor import Program

GOOD = """
func.func @forward(%x: tensor<64x64xf32>) -> tensor<64x64xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<64x64xf32>
  %start = linalg.fill ins(%zero : f32) outs(%empty : tensor<64x64xf32>) -> tensor<64x64xf32>
  %square = linalg.matmul ins(%x, %x : tensor<64x64xf32>, tensor<64x64xf32>)
      outs(%start : tensor<64x64xf32>) -> tensor<64x64xf32>
  %out = linalg.matmul ins(%square, %square : tensor<64x64xf32>, tensor<64x64xf32>)
      outs(%start : tensor<64x64xf32>) -> tensor<64x64xf32>
  return %out : tensor<64x64xf32>
}
func.func @backward(%x: tensor<4xf32>) -> tensor<4xf32> {
  %out = math.exp %x : tensor<4xf32>
  return %out : tensor<4xf32>
}
"""
BAD = "func.func @forward() {\n  no.such_op\n  return\n}\n"
EXPORTS = """
#two = #hal.pipeline.layout<bindings = [#hal.pipeline.binding<storage_buffer>, #hal.pipeline.binding<storage_buffer, "ReadOnly|Indirect">], flags = Indirect>
#three = #hal.pipeline.layout<constants = 9, bindings = [#hal.pipeline.binding<storage_buffer>, #hal.pipeline.binding<storage_buffer>, #hal.pipeline.binding<storage_buffer>]>
module {
  hal.executable.export public @first ordinal(0) layout(#two) count(%arg0: !hal.device) -> (index) {
  hal.executable.export public @second ordinal(1) layout(#three) count(%arg0: !hal.device) -> (index) {
}
"""  # noqa: E501


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder that temporary files go to."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def with_ladder(*ladder: tuple[str, ...]) -> Target:
    return Target(CPU.devices, ladder)


def test_our_own_compiler_gives_the_same_when_it_is_forked(scratch: Path) -> None:
    """The first in a process is started by itself."""
    tool = WarmTool("retrograd.tools.iree_compile", server="retrograd.tools.iree_compile_server")
    made = []
    for name in ("started", "forked"):
        folder = scratch / name
        folder.mkdir()
        (folder / "f.mlir").write_text(GOOD, encoding="utf-8")
        result = tool.run(["f.mlir", "-o", "f.vmfb", *CPU.flags, IN_ORDER], folder=folder)
        assert (result.returncode, result.stderr) == (0, "")
        made.append((folder / "f.vmfb").read_bytes())
    assert tool.is_served
    tool.close()
    assert made[0] == made[1]


def test_an_executable(scratch: Path) -> None:
    made = compile_executable(GOOD, with_ladder(()))
    assert zipfile.is_zipfile(BytesIO(made.vmfb))
    assert made.flags == ()
    # The square of the operand stands in scratch memory, and the exponential needs none.
    assert made.transients == {"forward": 64 * 64 * 4, "backward": 0}
    assert made.seconds > 0
    assert list(scratch.iterdir()) == []


HALVES = (("forward",), ("backward",))


def test_parts_are_one_program(scratch: Path) -> None:
    whole, apart = compile_executable(GOOD, CPU), compile_executable(GOOD, CPU, parts=HALVES)
    assert (apart.transients, apart.placed, apart.flags) == (whole.transients, whole.placed, whole.flags)
    assert set(apart.timelines) == set(whole.timelines)
    assert list(scratch.iterdir()) == []
    programs = [Program.load(made.vmfb) for made in (whole, apart)]
    assert sorted(programs[1].function_names) == sorted(programs[0].function_names)
    with zipfile.ZipFile(BytesIO(apart.vmfb)) as archive:
        assert Program.load(archive.read(part_member(1))).function_names == ["backward"]


SIDE_BY_SIDE = """
import os, signal, sys, time
from pathlib import Path
from retrograd.pipelines.stream.compiler import Dumps
from retrograd.pipelines.stream.side_by_side import compile_parts

def compile_part(output, dumps, part):
    output.write_text(f"{part.module} {part.functions[0]} {dumps.layout}")
    if part.functions[0] == "slow":
        time.sleep(60)
    if part.functions[0] == "crashing":
        os.kill(os.getpid(), signal.SIGSEGV)
    if part.functions[0] == "raising":
        raise KeyError("no such op")
    return part.functions[0] == "failing"

parts = tuple((name,) for name in sys.argv[1].split(","))
sys.exit(compile_parts(parts, Path("out.vmfb"), Dumps(layout=Path("layout.mlir")), compile_part))
"""


@pytest.mark.parametrize(
    ("names", "status", "said"),
    [
        ("a,b", 0, ""),
        ("slow,failing", 1, ""),
        ("slow,raising", 1, "KeyError: 'no such op'"),
        ("crashing,slow", -signal.SIGSEGV, ""),
    ],
)
def test_parts_end_together(scratch: Path, names: str, status: int, said: str) -> None:
    """Where one fails or crashes, the others do not go on, and the program ends as it did."""
    result = run_tool([sys.executable, "-c", SIDE_BY_SIDE, names], folder=scratch)
    assert result.returncode == status
    assert said in result.stderr
    if status == 0:
        assert (scratch / "out.vmfb").read_text(encoding="utf-8") == "part0 a layout.mlir"
        assert (scratch / "out.1.vmfb").read_text(encoding="utf-8") == "part1 b layout.1.mlir"


def test_what_fails_in_parts_is_replayed_whole(scratch: Path) -> None:
    with pytest.raises(CompileError, match="no-such-flag") as caught:
        compile_executable(GOOD, replace(CPU, ladder=(("--no-such-flag",),)), parts=HALVES)
    assert "--parts" not in caught.value.replay


EMBEDDING = """
func.func @backward(%x: TAKEN {bwd.role = "tangent", bwd.name = "x"},
                    %rows: !torch.vtensor<[8],si64> {bwd.role = "input", bwd.name = "rows"})
    -> (GIVEN {bwd.role = "grad", bwd.name = "weight"}) {
  %zero = torch.constant.float 0.0
  %none = torch.constant.none
  %true = torch.constant.bool true
  %height = torch.constant.int 1000
  %width = torch.constant.int 64
  %sizes = torch.prim.ListConstruct %height, %width : (!torch.int, !torch.int) -> !torch.list<int>
  %zeros = torch.aten.full %sizes, %zero, %none, %none, %none, %none :
    !torch.list<int>, !torch.float, !torch.none, !torch.none, !torch.none, !torch.none -> GIVEN
  %places = torch.prim.ListConstruct %rows : (!torch.vtensor<[8],si64>) -> !torch.list<vtensor>
  %sum = torch.aten.index_put.hacked_twin %zeros, %places, %x, %true :
    GIVEN, !torch.list<vtensor>, TAKEN, !torch.bool -> GIVEN
  return %sum : GIVEN
}
""".replace("TAKEN", "!torch.vtensor<[8,64],f32>").replace("GIVEN", "!torch.vtensor<[1000,64],f32>")


def test_the_gradient_of_an_embedding_takes_scratch_memory_for_its_places_alone() -> None:
    """Those of the table's rows: 64 bits each, once they are known to be within the table."""
    linalg = lower_to_linalg(EMBEDDING.encode(), CPU, twins_alone=True)
    assert measure_scratch(linalg, CPU) == {"backward_into": 8 * 8}


def test_the_next_set_of_flags_is_tried_where_one_fails(scratch: Path) -> None:
    tried: list[tuple[str, ...]] = []
    target = with_ladder(("--no-such-flag",), ("--iree-opt-level=O1",), ())
    made = compile_executable(GOOD, target, on_attempt=tried.append)
    assert tried == [("--no-such-flag",), ("--iree-opt-level=O1",)]
    assert made.flags == ("--iree-opt-level=O1",)
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("said", "skipped"),
    [("LLVM ERROR: Do not know how to split this operator's operand!", True), ("PLEASE submit a bug report", False)],
)
def test_where_llvm_lacks_instructions_for_packed_operands_no_other_flags_pack_them(
    monkeypatch: pytest.MonkeyPatch, said: str, skipped: bool
) -> None:
    packing, plain = [(DATA_TILING, "--iree-opt-level=O1"), (DATA_TILING,)], ("--iree-opt-level=O1",)

    own = WarmTool.run

    def run(tool: WarmTool, arguments: Sequence[str], **options: Any) -> ToolResult:
        return ToolResult(-signal.SIGABRT, said) if DATA_TILING in arguments else own(tool, arguments, **options)

    monkeypatch.setattr(WarmTool, "run", run)
    tried: list[tuple[str, ...]] = []
    marked = GOOD.replace("linalg.matmul", f"linalg.matmul {{{PACKING_MARK}}}")
    made = compile_executable(marked, with_ladder(*packing, plain), on_attempt=tried.append)
    assert made.flags == plain
    assert tried == ([packing[0], plain] if skipped else [*packing, plain])


def test_where_tiles_of_elementwise_kernels_fail_the_flags_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts: list[str] = []

    compiler = executable._run_compiler

    def run(target: Target, arguments: Sequence[str], *more: Any) -> ToolResult:
        scripts.append(next((Path(a).name for a in arguments if "transform-dialect-library" in a), ""))
        return ToolResult(1, "tiling failed") if scripts[-1] == "maps.mlir" else compiler(target, arguments, *more)

    monkeypatch.setattr(executable, "_run_compiler", run)
    tried: list[tuple[str, ...]] = []
    target = find_target("cuda:sm_90")
    assert compile_executable(GOOD, target, on_attempt=tried.append).flags == target.ladder[0]
    assert scripts == ["maps.mlir", ""]
    assert set(tried) == {target.ladder[0]}


@pytest.mark.parametrize("flags", [(), (IN_ORDER,)], ids=["iree-compile", "our passes in it"])
def test_where_all_fail_the_last_is_reported(scratch: Path, flags: tuple[str, ...]) -> None:
    tried: list[tuple[str, ...]] = []
    with pytest.raises(CompileError) as caught:
        compile_executable(BAD, with_ladder(("--no-such-flag", *flags), flags), on_attempt=tried.append)
    error = caught.value
    assert tried == [("--no-such-flag", *flags), flags]
    assert error.phase == "iree-compile"
    (kept,) = scratch.iterdir()
    assert error.message.startswith(f"{kept}:2:3: error: ")
    assert "no.such_op" in error.message
    assert "no-such-flag" not in error.replay
    assert str(error) == f"iree-compile: {error.message}\n  replay: {error.replay}"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    replayed = subprocess.run(
        shlex.split(error.replay),
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path},
        cwd=scratch,
        check=False,
    )
    assert replayed.returncode != 0
    assert error.message in replayed.stderr


@pytest.mark.parametrize("phase", ["global-optimization", "flow"])
@pytest.mark.parametrize("target", [CPU, CPU.in_order(), find_target("cuda:sm_80")], ids=["cpu", "in order", "cuda"])
def test_a_phase_before_our_passes(target: Target, phase: str) -> None:
    compile_to_phase(GOOD, target, phase)
    with pytest.raises(CompileError, match="iree-compile: "):
        compile_to_phase(GOOD.replace("linalg.matmul", "linalg.matmull"), target, phase)


def put_in_place(monkeypatch: pytest.MonkeyPatch, tool: Path, script: str) -> None:
    """Have a shell script run in place of our compiler."""
    tool.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setattr(WarmTool, "run", lambda _, arguments, **options: run_tool([tool, *arguments], **options))


def test_a_crash_is_an_error_that_names_the_signal(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch, scratch / "tool", "kill -SEGV $$")
    with pytest.raises(CompileError, match="iree-compile: the tool was ended by SIGSEGV: no message"):
        compile_executable(GOOD, with_ladder(()))
    assert len(list(scratch.iterdir())) == 2


def test_where_it_crashes_unverified_what_a_check_of_the_ir_says_is_told(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = "echo 'f.mlir:1:1: error: does not verify' >&2; exit 1"
    put_in_place(monkeypatch, scratch / "tool", f'case "$*" in *--verify=false*) kill -SEGV $$;; esac\n{says}')
    with pytest.raises(CompileError, match=r"error: does not verify"):
        compile_executable(GOOD, replace(with_ladder(()), is_compared=True))


@pytest.mark.parametrize("own", [False, True], ids=["iree-compile", "our passes in it"])
def test_without_checks_between_passes_the_same_is_compiled(scratch: Path, own: bool) -> None:
    source, made = scratch / "f.mlir", scratch / "f.vmfb"
    source.write_text(GOOD, encoding="utf-8")
    tool = [sys.executable, "-m", "retrograd.tools.iree_compile"] if own else [iree_tool("iree-compile")]
    results = []
    for extra in ([], [UNVERIFIED]):
        result = run_tool([*tool, str(source), "-o", str(made), *CPU.flags, *extra], folder=scratch)
        assert (result.returncode, result.stderr) == (0, "")
        results.append(made.read_bytes())
    assert results[0] == results[1]


def test_what_kernels_are_formed_of_is_always_checked(scratch: Path) -> None:
    """What is wrong there is computed without a word, and written to memory of others."""
    source = scratch / "f.mlir"
    source.write_text(ONE_WINDOW, encoding="utf-8")
    tool = [sys.executable, "-m", "retrograd.tools.iree_compile"]
    result = run_tool([*tool, str(source), "-o", str(scratch / "f.vmfb"), *CPU.flags, UNVERIFIED], folder=scratch)
    assert result.returncode == 1
    assert "to be 3, but found 2" in result.stderr


def test_a_kernel_that_no_driver_loads_is_not_taken(scratch: Path) -> None:
    """Where what it writes makes one buffer it may be loaded; else compilation fails, and not the program's loading."""
    tried: list[tuple[str, ...]] = []
    narrow = Target(tuple(replace(device, max_bindings=1) for device in CPU.devices), ((),))
    expected = r"kernel @backward_dispatch_0\w* takes 2 buffers, and drivers of cpu load none that takes more than 1; "
    with pytest.raises(CompileError, match=expected) as caught:
        compile_executable(GOOD[GOOD.index("func.func @backward") :], narrow, on_attempt=tried.append)
    assert tried == [(), (SHARED_BINDINGS,)]
    assert SHARED_BINDINGS in caught.value.replay


def test_flags_that_fuse_the_same_ops_are_not_tried_where_a_kernel_takes_too_many_buffers(scratch: Path) -> None:
    """Code generation makes other code of a kernel, and reads the same buffers in it."""
    tried: list[tuple[str, ...]] = []
    ladder = ((), (PLAIN_REDUCTIONS,), (FEWER_FUSIONS,))
    narrow = Target(tuple(replace(device, max_bindings=1) for device in CPU.devices), ladder)
    with pytest.raises(CompileError, match="takes 2 buffers"):
        compile_executable(GOOD[GOOD.index("func.func @backward") :], narrow, on_attempt=tried.append)
    assert tried == [(), (SHARED_BINDINGS,), (FEWER_FUSIONS,), (FEWER_FUSIONS, SHARED_BINDINGS)]


def test_the_kernel_that_takes_the_most_buffers() -> None:
    assert widest_kernel(EXPORTS) == Kernel("second", 3)
    assert widest_kernel("module {\n}\n") is None


def test_tools_are_those_of_the_compiler_package() -> None:
    assert iree_tool("iree-compile").is_file()
    with pytest.raises(FileNotFoundError, match="no-such-tool not found: pip install iree-base-compiler"):
        iree_tool("no-such-tool")


def test_without_the_compiler_package_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="iree-compile not found: pip install iree-base-compiler"):
        iree_tool.__wrapped__("iree-compile")
