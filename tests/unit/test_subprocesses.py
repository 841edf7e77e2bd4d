# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tools as child processes: what they say, how they end, and that none is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import FAMILY, is_alive, wait_for

from retrograd.pipelines.toolchain.subprocesses import (
    ToolLimits,
    ToolResult,
    machine_memory,
    run_tool,
    tool_environment,
)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_what_a_tool_says_and_how_it_ends(tmp_path: Path) -> None:
    result = run_tool(python("import sys; print('lost'); print('kept', file=sys.stderr); sys.exit(3)"), folder=tmp_path)
    assert result == ToolResult(3, "kept\n")
    assert result.crashed is None


def test_output_that_is_no_text_is_no_error(tmp_path: Path) -> None:
    result = run_tool(python(r"import sys; sys.stderr.buffer.write(b'\xff!')"), folder=tmp_path)
    assert result == ToolResult(0, "\ufffd!")


def test_a_tool_runs_in_its_folder(tmp_path: Path) -> None:
    assert run_tool(python("open('here', 'w')"), folder=tmp_path).returncode == 0
    assert (tmp_path / "here").exists()


def test_a_tool_does_not_read_what_is_typed(tmp_path: Path) -> None:
    (tmp_path / "typed").write_text("yes\n", encoding="utf-8")
    old = os.dup(0)
    typed = os.open(tmp_path / "typed", os.O_RDONLY)
    try:
        os.dup2(typed, 0)
        result = run_tool(python("import sys; sys.exit(len(sys.stdin.read()))"), folder=tmp_path)
    finally:
        os.dup2(old, 0)
        os.close(typed)
        os.close(old)
    assert result.returncode == 0


def test_the_end_is_noticed_as_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError("looks from time to time whether it has ended")

    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        pytest.skip("the kernel tells of a child's end on Linux")
    monkeypatch.setattr(subprocess.time, "sleep", sleep)  # type: ignore[attr-defined]
    assert run_tool(python("pass"), folder=tmp_path) == ToolResult(0, "")


def test_where_the_kernel_does_not_tell_of_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    assert run_tool(python("import sys; sys.exit(3)"), folder=tmp_path).returncode == 3
    assert run_tool(python(FAMILY), folder=tmp_path, limits=ToolLimits(2**34, 0.5)).crashed == "SIGKILL"


@pytest.mark.parametrize("name", ["SIGABRT", "SIGSEGV", "SIGKILL"])
def test_a_crash_is_named_by_its_signal(tmp_path: Path, name: str) -> None:
    result = run_tool(python(f"import os, signal; os.kill(os.getpid(), signal.{name})"), folder=tmp_path)
    assert result.crashed == name


def test_a_tool_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-tool"):
        run_tool([tmp_path / "no-such-tool"], folder=tmp_path)


def test_an_interrupt_leaves_no_process(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers"

    def interrupt() -> None:
        wait_for(numbers.exists)
        os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        helper.start()
        with pytest.raises(KeyboardInterrupt):
            run_tool(python(FAMILY), folder=tmp_path)
    finally:
        helper.join()
        signal.signal(signal.SIGINT, old)
    family = [int(number) for number in numbers.read_text(encoding="utf-8").split()]
    assert len(family) == 2
    # The child was waited for; its own child is init's to wait for.
    assert not is_alive(family[0])
    assert wait_for(lambda: not is_alive(family[1]))


def test_an_interrupt_while_the_lock_of_the_child_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's ``Popen.wait`` leaves it taken where a signal comes right behind its taking."""
    children: list[subprocess.Popen[bytes]] = []

    def interrupted(child: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        assert not children, "waits for the lock that the first wait took"
        children.append(child)
        child._waitpid_lock.acquire()  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    # As where the kernel does not tell of a child's end: all the time is spent in that wait.
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_tool(python("import time; time.sleep(600)"), folder=tmp_path)
    assert children[0].returncode == -signal.SIGKILL
    assert not is_alive(children[0].pid)


def test_tools_do_not_start_interactively(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONINSPECT", "1")
    monkeypatch.setenv("RETROGRAD_TEST", "kept")
    assert "PYTHONINSPECT" not in tool_environment()
    assert tool_environment()["RETROGRAD_TEST"] == "kept"


def test_what_the_user_tells_glibc_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert "tcache_count" in tool_environment()["GLIBC_TUNABLES"]
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    assert tool_environment()["GLIBC_TUNABLES"] == "glibc.malloc.check=0"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells a child of its parent's end on Linux only")
def test_a_parent_that_is_killed_takes_its_tool_along(tmp_path: Path) -> None:
    parent = f"""
import sys
from pathlib import Path
from retrograd.pipelines.toolchain.subprocesses import run_tool
run_tool([sys.executable, "-c", {FAMILY!r}], folder=Path({str(tmp_path)!r}))
"""
    process = subprocess.Popen(python(parent))
    numbers = tmp_path / "numbers"
    assert wait_for(numbers.exists)
    process.kill()
    process.wait()
    child, grandchild = (int(number) for number in numbers.read_text(encoding="utf-8").split())
    os.kill(grandchild, signal.SIGKILL)
    assert wait_for(lambda: not is_alive(child))


def test_a_tool_that_takes_too_long(tmp_path: Path) -> None:
    start = time.monotonic()
    result = run_tool(python(FAMILY), folder=tmp_path, limits=ToolLimits(2**34, 1.0))
    assert time.monotonic() - start < 60
    assert result.exceeded == "its limit of 1 s; set RETROGRAD_TOOL_SECONDS to allow more"
    assert result.crashed == "SIGKILL"


def test_a_tool_that_takes_too_much_memory(tmp_path: Path) -> None:
    result = run_tool(python("bytearray(2**28)"), folder=tmp_path, limits=ToolLimits(2**27, 60.0))
    assert result.exceeded == "its limit of 128 MiB of memory; set RETROGRAD_TOOL_MEMORY to allow more"
    assert run_tool(python("bytearray(2**28)"), folder=tmp_path).exceeded is None


def test_limits_by_environment() -> None:
    limits = ToolLimits.from_environment({"RETROGRAD_TOOL_MEMORY": "3GiB", "RETROGRAD_TOOL_SECONDS": "7.5"})
    assert limits == ToolLimits(3 * 2**30, 7.5)
    half = ToolLimits.from_environment({"RETROGRAD_TOOL_MEMORY": "0.5"})
    assert half == ToolLimits(machine_memory() // 2, 1800.0)
    assert machine_memory() // 2 < ToolLimits.from_environment({}).memory < machine_memory()


@pytest.mark.parametrize(
    "environment",
    [
        {"RETROGRAD_TOOL_MEMORY": "plenty"},
        {"RETROGRAD_TOOL_SECONDS": "soon"},
        {"RETROGRAD_TOOL_SECONDS": "-1"},
        {"RETROGRAD_TOOL_SECONDS": "nan"},
    ],
)
def test_limits_that_are_none(environment: dict[str, str]) -> None:
    (name,) = environment
    with pytest.raises(ValueError, match=name):
        ToolLimits.from_environment(environment)
