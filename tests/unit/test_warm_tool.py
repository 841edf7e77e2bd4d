# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tools that are forked: what they say, how they end, and what becomes of the server."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import FAMILY, is_alive, read_numbers, wait_for

from retrograd.pipelines.toolchain import warm_tool
from retrograd.pipelines.toolchain.subprocesses import ToolLimits, ToolResult
from retrograd.pipelines.toolchain.warm_tool import WarmTool

TOOL = """
import sys
def main(arguments):
    # An argument is code to run; what is said of it is which process said it.
    exec(arguments[0], {"SERVED": __name__ != "__main__"})
    return 0
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""
SERVER = """
import sys
from retrograd.pipelines.toolchain.fork_server import ForkServer
from example_tool import main
ForkServer(int(sys.argv[1]), int(sys.argv[2]), main).serve()
"""
WHO = "import os, sys; print(f'{SERVED} {os.getppid()}', file=sys.stderr)"
LIMITS = ToolLimits(2**34, 60.0)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="servers are for Linux")


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WarmTool]:
    """A tool that has run once, as after the first compilation."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "example_tool.py").write_text(TOOL, encoding="utf-8")
    (modules / "example_server.py").write_text(SERVER, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(modules), prepend=os.pathsep)
    tool = WarmTool("example_tool", server="example_server")
    assert tool.run([WHO], folder=tmp_path).stderr == f"False {os.getpid()}\n"
    yield tool
    tool.close()


def server_of(tool: WarmTool, folder: Path) -> int:
    """The number of the process that forks the tool."""
    served, number = tool.run([WHO], folder=folder, limits=LIMITS).stderr.split()
    assert served == "True"
    return int(number)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; print('lost'); print('kept', file=sys.stderr); sys.exit(3)", ToolResult(3, "kept\n")),
        ("import sys; sys.exit(sys.stdin.read() != '')", ToolResult(0, "")),
        ("import sys; sys.exit('a reason')", ToolResult(1, "a reason\n")),
        (r"import sys; sys.stderr.buffer.write(b'\xff!')", ToolResult(0, "\ufffd!")),
        ("import os; os.kill(os.getpid(), 11)", ToolResult(-signal.SIGSEGV, "")),
        ("import os; os.abort()", ToolResult(-signal.SIGABRT, "")),
    ],
)
def test_it_ends_as_it_does_by_itself(tool: WarmTool, tmp_path: Path, code: str, expected: ToolResult) -> None:
    server = server_of(tool, tmp_path)
    assert tool.run([code], folder=tmp_path, limits=LIMITS) == expected
    # However it ended, the next one comes of the same server.
    assert server_of(tool, tmp_path) == server


def test_an_exception_is_told_of(tool: WarmTool, tmp_path: Path) -> None:
    server_of(tool, tmp_path)
    result = tool.run(["raise ValueError('no such thing')"], folder=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("Traceback")
    assert result.stderr.endswith("ValueError: no such thing\n")


def test_folder_and_environment_are_those_of_the_call(
    tool: WarmTool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server_of(tool, tmp_path)
    monkeypatch.setenv("RETROGRAD_TEST", "later")
    code = "import os, sys; print(os.getcwd(), os.environ['RETROGRAD_TEST'], file=sys.stderr)"
    (tmp_path / "here").mkdir()
    assert tool.run([code], folder=tmp_path / "here").stderr == f"{tmp_path / 'here'} later\n"


def test_several_run_at_once(tool: WarmTool, tmp_path: Path) -> None:
    server = server_of(tool, tmp_path)
    folders = [tmp_path / str(number) for number in range(8)]

    def meet(folder: Path) -> ToolResult:
        """Each waits for all others."""
        folder.mkdir()
        code = f"""
import os, sys, time
open("here", "w").close()
while not all(os.path.exists(f"{{folder}}/here") for folder in {[str(folder) for folder in folders]}):
    time.sleep(0.01)
sys.exit({folder.name})
"""
        return tool.run([code], folder=folder, limits=LIMITS)

    with ThreadPoolExecutor(len(folders)) as pool:
        assert [result.returncode for result in pool.map(meet, folders)] == [*range(8)]
    assert server_of(tool, tmp_path) == server


def test_one_that_takes_too_long(tool: WarmTool, tmp_path: Path) -> None:
    server = server_of(tool, tmp_path)
    result = tool.run([FAMILY], folder=tmp_path, limits=ToolLimits(2**34, 2.0))
    assert result.exceeded == "its limit of 2 s; set RETROGRAD_TOOL_SECONDS to allow more"
    assert result.crashed == "SIGKILL"
    child, grandchild = read_numbers(tmp_path)
    assert not is_alive(child)
    assert wait_for(lambda: not is_alive(grandchild))
    assert server_of(tool, tmp_path) == server


def test_one_that_takes_too_much_memory(tool: WarmTool, tmp_path: Path) -> None:
    server_of(tool, tmp_path)
    result = tool.run(["bytearray(2**28)"], folder=tmp_path, limits=ToolLimits(2**27, 60.0))
    assert result.exceeded == "its limit of 128 MiB of memory; set RETROGRAD_TOOL_MEMORY to allow more"
    assert tool.run(["bytearray(2**28)"], folder=tmp_path).exceeded is None


def test_an_interrupt_leaves_no_process(tool: WarmTool, tmp_path: Path) -> None:
    server = server_of(tool, tmp_path)

    def interrupt() -> None:
        wait_for((tmp_path / "numbers").exists)
        os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        helper.start()
        with pytest.raises(KeyboardInterrupt):
            tool.run([FAMILY], folder=tmp_path)
    finally:
        helper.join()
        signal.signal(signal.SIGINT, old)
    child, grandchild = read_numbers(tmp_path)
    assert not is_alive(child)
    assert wait_for(lambda: not is_alive(grandchild))
    assert server_of(tool, tmp_path) == server


def test_a_parent_that_is_killed_takes_server_and_tool_along(tool: WarmTool, tmp_path: Path) -> None:
    parent = f"""
from pathlib import Path
from retrograd.pipelines.toolchain.warm_tool import WarmTool
tool = WarmTool("example_tool", server="example_server")
tool.run(["pass"], folder=Path({str(tmp_path)!r}))
tool.run([{FAMILY!r}], folder=Path({str(tmp_path)!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", parent])
    child, grandchild = read_numbers(tmp_path)
    server = int(Path(f"/proc/{child}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    process.kill()
    process.wait()
    os.kill(grandchild, signal.SIGKILL)
    assert wait_for(lambda: not is_alive(server))
    assert wait_for(lambda: not is_alive(child))


def test_a_server_that_is_lost_is_no_loss(tool: WarmTool, tmp_path: Path) -> None:
    server = server_of(tool, tmp_path)
    # The first kills its server, and is run once more by itself.
    code = f"import os\nif os.getppid() == {server}: os.kill({server}, 9)"
    assert tool.run([f"{code}\n{WHO}"], folder=tmp_path, limits=LIMITS).stderr == f"False {os.getpid()}\n"
    other = server_of(tool, tmp_path)
    assert other != server
    # Between two calls, too.
    os.kill(other, signal.SIGKILL)
    assert wait_for(lambda: not is_alive(other))
    assert server_of(tool, tmp_path) != other


def test_a_server_that_does_not_start_is_tried_once(
    tool: WarmTool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "modules" / "example_server.py").write_text("open('tried', 'a').write('x'); raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    for _ in range(3):
        assert tool.run([WHO], folder=tmp_path, limits=LIMITS).stderr == f"False {os.getpid()}\n"
    assert (tmp_path / "tried").read_text(encoding="utf-8") == "x"


def test_where_there_are_no_servers(tool: WarmTool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_tool, "_HAS_SERVERS", False)
    tool = WarmTool("example_tool", server="example_server")
    for _ in range(3):
        assert tool.run([WHO], folder=tmp_path).stderr == f"False {os.getpid()}\n"


def test_a_forked_process_has_a_server_of_its_own(tool: WarmTool, tmp_path: Path) -> None:
    server = server_of(tool, tmp_path)
    child = os.fork()
    if child == 0:
        try:
            (tmp_path / "own").mkdir()
            tool.run([WHO], folder=tmp_path / "own", limits=LIMITS)
            other = server_of(tool, tmp_path / "own")
            tool.close()
            os._exit(0 if other != server else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert server_of(tool, tmp_path) == server


def test_closing_ends_the_server(tool: WarmTool, tmp_path: Path) -> None:
    server = server_of(tool, tmp_path)
    tool.close()
    assert not is_alive(server)
    # Another one starts where it is needed.
    assert server_of(tool, tmp_path) != server


def test_less_memory_than_is_taken_already_is_said(tool: WarmTool, tmp_path: Path) -> None:
    for _ in range(20):
        result = tool.run(["pass"], folder=tmp_path, limits=ToolLimits(2**20, 60.0))
        assert result.returncode == 1
        assert "MemoryError" in result.stderr
