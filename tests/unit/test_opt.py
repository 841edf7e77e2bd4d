# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Running pipelines, what a failure says, and retrograd-opt's driver."""

import gc
import shlex
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.pipelines.infra.diagnostics import Diagnostic, PipelineError, find_position
from retrograd.pipelines.infra.expected_diagnostics import find_expected, find_mismatches
from retrograd.pipelines.infra.opt_driver import OptOptions, Source, UsageError, format_rows, list_passes, process
from retrograd.pipelines.infra.pass_page import describe_passes
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.infra.registry import PASSES
from retrograd.pipelines.infra.runner import run_pipeline

FUNCTION = "func.func @f() {\n  return\n}\n"


def fail(module: ir.Operation) -> NoReturn:
    raise PassFailure(module.regions[0].blocks[0].operations[0], "it is public", "make it private")


def fail_on_module(module: ir.Operation) -> NoReturn:
    raise PassFailure(module, "bwd-sample: there is no main", "add one")


def crash(module: ir.Operation) -> NoReturn:
    raise ZeroDivisionError("by zero")


def interrupt(module: ir.Operation) -> NoReturn:
    raise KeyboardInterrupt


def break_module(module: ir.Operation) -> None:
    del module.regions[0].blocks[0].operations[0].attributes["function_type"]


def mark(module: ir.Operation) -> None:
    module.attributes["bwd.mark"] = ir.UnitAttr.get()


@pytest.fixture(autouse=True)
def replay_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where failed pipelines leave their modules."""
    folder = tmp_path / "replay"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture
def use_pass(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[ir.Operation], None]], None]:
    """Register a pass `bwd-sample` that does what the given function does."""

    def use(action: Callable[[ir.Operation], None]) -> None:
        class BwdSample(ModulePass):
            description = "A sample"

            def apply(self, module: ir.Operation) -> None:
                action(module)

        holder: Any = types.ModuleType("sample_passes")
        holder.BwdSample = BwdSample
        monkeypatch.setitem(sys.modules, "sample_passes", holder)
        monkeypatch.setitem(PASSES, "bwd-sample", "sample_passes:BwdSample")

    return use


def parse(text: str = FUNCTION) -> Any:
    return ir.Module.parse(text, make_context())


def run_failing(pipeline: str, **options: Any) -> PipelineError:
    with pytest.raises(PipelineError) as caught:
        run_pipeline(parse(), pipeline, **options)
    return caught.value


def test_native_and_own_passes_run_in_order(use_pass: Any) -> None:
    seen: list[str] = []
    use_pass(lambda module: seen.append(str(module)))
    module = parse("func.func @f() { %0 = arith.constant 1 : i32 return }")
    run_pipeline(module, "builtin.module(bwd-sample,func.func(canonicalize),bwd-sample)")
    assert ["arith.constant" in text for text in seen] == [True, False]


def test_own_pass_rewrites(use_pass: Any) -> None:
    use_pass(mark)
    module = parse()
    run_pipeline(module, "builtin.module(bwd-sample,cse)")
    assert "attributes {bwd.mark}" in str(module)


def test_failure_of_an_own_pass(use_pass: Any) -> None:
    use_pass(fail)
    error = run_failing("builtin.module(cse,bwd-sample,canonicalize)")
    assert error.pass_name == "bwd-sample"
    (diagnostic,) = error.diagnostics
    assert (diagnostic.severity, diagnostic.line, diagnostic.column) == ("error", 1, 1)
    assert diagnostic.message == "bwd-sample: 'func.func' op: it is public; make it private"
    assert isinstance(error.__cause__, PassFailure)


def test_failure_on_the_module_names_the_pass_once(use_pass: Any) -> None:
    use_pass(fail_on_module)
    (diagnostic,) = run_failing("builtin.module(bwd-sample)").diagnostics
    assert diagnostic.message == "bwd-sample: there is no main; add one"
    assert diagnostic.location == "unknown"


def test_an_error_inside_a_pass_is_told_from_a_failure(use_pass: Any) -> None:
    use_pass(crash)
    error = run_failing("builtin.module(bwd-sample)")
    assert "bwd-sample: internal error, ZeroDivisionError: by zero" in str(error)
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_an_interrupt_comes_through(use_pass: Any) -> None:
    use_pass(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_pipeline(parse(), "builtin.module(bwd-sample)")


def test_no_cycles_are_looked_for_while_passes_run(use_pass: Any) -> None:
    seen: list[bool] = []

    def observe(module: ir.Operation) -> NoReturn:
        seen.append(gc.isenabled())
        raise ZeroDivisionError("by zero")

    use_pass(observe)
    run_failing("builtin.module(bwd-sample)")
    assert (seen, gc.isenabled()) == ([False], True)
    # Another thread may train meanwhile.
    thread = threading.Thread(target=run_failing, args=["builtin.module(bwd-sample)"])
    thread.start()
    thread.join()
    assert seen == [False, True]
    gc.disable()
    try:
        run_failing("builtin.module(bwd-sample)")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_module_that_a_pass_broke_is_that_pass_s_failure(use_pass: Any) -> None:
    use_pass(break_module)
    error = run_failing("builtin.module(cse,bwd-sample,cse)")
    assert error.pass_name == "bwd-sample"
    assert "function_type" in error.diagnostics[0].message


def test_failure_of_a_native_pass_names_it() -> None:
    with pytest.raises(PipelineError) as caught:
        run_pipeline(
            parse('func.func @f(%x: i32) { "bwd.save"(%x) {name = "x"} : (i32) -> () return }'),
            "builtin.module(cse,torch-backend-to-linalg-on-tensors-backend-pipeline,cse)",
        )
    assert caught.value.pass_name == "torch-backend-to-linalg-on-tensors-backend-pipeline"
    assert "bwd.save" in caught.value.diagnostics[0].message


def test_the_replay_command_replays(replay_folder: Path) -> None:
    error = run_failing("builtin.module(bwd-partition)")
    assert error.replay is not None
    assert f"replay: {error.replay}" in str(error)
    program, *arguments = shlex.split(error.replay)
    assert program == "retrograd-opt"
    again = subprocess.run(
        [sys.executable, "-m", "retrograd.tools.opt", *arguments], capture_output=True, text=True, check=False
    )
    assert again.returncode == 1
    assert error.diagnostics[0].message in again.stderr
    # Failing again writes no second file.
    assert run_failing("builtin.module(bwd-partition)").replay == error.replay
    assert len(list(replay_folder.iterdir())) == 1


def test_no_replay_where_none_is_wanted_or_possible(replay_folder: Path) -> None:
    assert run_failing("builtin.module(bwd-partition)", replay=False).replay is None
    replay_folder.rmdir()
    assert run_failing("builtin.module(bwd-partition)").replay is None


def test_an_unknown_pass_is_an_error_that_names_near_ones() -> None:
    error = run_failing("builtin.module(func.func(canonicalise))")
    assert error.pass_name is None
    assert "there is no pass 'canonicalise'; did you mean canonicalize?" in error.diagnostics[0].message
    assert error.diagnostics[0].location == "<pipeline>:1:26"


def test_positions_of_composed_locations() -> None:
    module = parse('func.func private @f() loc(fused<"x">["n"(unknown), callsite("g"("a.py":3:4) at "b.py":5:6)])')
    assert find_position(module.body.operations[0].location) == ("a.py", 3, 4)
    module = parse("func.func private @f() loc(unknown)")
    assert find_position(module.body.operations[0].location) == (None, 0, 0)


def process_text(text: str, **options: Any) -> Any:
    return process(Source("in.mlir", text.encode()), OptOptions(**options))


def test_process_writes_text_and_bytecode() -> None:
    plain = process_text(FUNCTION)
    assert (plain.ok, plain.diagnostics) == (True, ())
    assert plain.output == b"module {\n  func.func @f() {\n    return\n  }\n}\n"
    bytecode = process_text(FUNCTION, emit_bytecode=True).output
    assert bytecode.startswith(b"ML\xefR")
    assert process(Source("in.mlirbc", bytecode), OptOptions()).output == plain.output


def test_one_bad_part_leaves_no_output_but_all_diagnostics() -> None:
    text = "func.func private @f(\n// -----\n" + FUNCTION + "// -----\nfunc.func private @g(\n"
    result = process_text(text, split_input_file=True)
    assert not result.ok
    assert result.output == b""
    assert [diagnostic.line for diagnostic in result.diagnostics] == [1, 7]
    assert all(diagnostic.file == "in.mlir" for diagnostic in result.diagnostics)


def test_traceback_of_internal_errors_alone(use_pass: Any) -> None:
    use_pass(crash)
    assert "ZeroDivisionError" in process_text(FUNCTION, pipeline="builtin.module(bwd-sample)").traceback
    use_pass(fail)
    assert process_text(FUNCTION, pipeline="builtin.module(bwd-sample)").traceback == ""
    assert process_text(FUNCTION, pipeline="builtin.module(bwd-nothing)").traceback == ""


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (b"\xff\xfe", OptOptions(), "neither MLIR bytecode nor UTF-8 text"),
        (b"ML\xefR", OptOptions(split_input_file=True), "bytecode holds no comments"),
        (b"ML\xefR", OptOptions(verify_diagnostics=True), "bytecode holds no comments"),
        (b"", OptOptions(split_input_file=True, emit_bytecode=True), "do not go together"),
    ],
)
def test_usage_errors(data: bytes, options: OptOptions, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        process(Source("in", data), options)


def test_damaged_bytecode_is_an_error() -> None:
    bytecode = process_text(FUNCTION, emit_bytecode=True).output
    for damaged in (bytecode[:-5], bytecode[:10], b"ML\xefRnothing"):
        result = process(Source("in.mlirbc", damaged), OptOptions())
        assert not result.ok
        assert result.diagnostics[0].location == "in.mlirbc"


def test_expected_diagnostics_are_found_with_their_lines() -> None:
    text = """\
// expected-error @below {{one}}
// expected-warning @below {{two}}
op
// expected-note @above {{three}}
op // expected-remark {{four}}
// expected-error @-2 {{five}}
// expected-error @+10 {{six}}
// expected-error @unknown {{seven}}
"""
    found = [(one.severity, one.line, one.shown) for one in find_expected(text)]
    assert found == [
        ("error", 3, "one"),
        ("warning", 3, "two"),
        ("note", 3, "three"),
        ("remark", 5, "four"),
        ("error", 4, "five"),
        ("error", 17, "six"),
        ("error", 0, "seven"),
    ]


def test_patterns_and_plain_messages() -> None:
    (plain,) = find_expected("// expected-error {{a.c (x)}}")
    (pattern,) = find_expected("// expected-error-re {{a.{{[bc]+}} (x)}}")
    matches = [
        [one.matches(Diagnostic("error", message, "f", 1, 1)) for message in ("a.c (x)", "abc (x)", "a.bc (x)")]
        for one in (plain, pattern)
    ]
    assert matches == [[True, False, False], [True, False, True]]


def test_mismatches_are_told() -> None:
    expected = find_expected("// expected-error {{one}}\n// expected-error {{one}}")
    found = [Diagnostic("error", "one", "f", 1, 2), Diagnostic("warning", "two", "f", 9, 2)]
    assert [str(mismatch) for mismatch in find_mismatches(expected, found, "f")] == [
        "f:9:2: error: unexpected warning: two",
        'f:2:1: error: expected error "one" was not produced',
    ]
    assert find_mismatches(find_expected("// expected-error {{one}}"), found[:1], "f") == []


def test_the_page_of_passes_is_what_the_compiler_runs() -> None:
    page = Path(__file__).parents[2] / "docs" / "passes.md"
    remedy = "retrograd-opt --list-passes --markdown > docs/passes.md"
    assert page.read_text(encoding="utf-8") == describe_passes(), remedy


def test_rows_are_aligned() -> None:
    assert format_rows([("a", "x"), ("long", "y"), ("b", "")]) == "a     x\nlong  y\nb\n"
    starts = {line.index("(default") > 0 for line in list_passes().splitlines() if "(default" in line}
    assert starts == {True}


def test_retrograd_opt_never_imports_torch(tmp_path: Path) -> None:
    source = tmp_path / "in.mlir"
    source.write_text(FUNCTION)
    code = (
        "import sys; from retrograd.tools.opt import main; "
        f"status = main([{str(source)!r}, '-p', 'func.func(cse),bwd-verify-legality']) or main(['--list-passes']); "
        "assert 'torch' not in sys.modules, 'torch was imported'; sys.exit(status)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "func.func @f()" in ran.stdout
    assert "bwd-partition" in ran.stdout
