# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What holds for every test: a share of the cores, a compile cache that starts empty, a folder for temporary files that
goes with the run, numbers that are the same in each run, and few walks for garbage."""

import contextlib
import gc
import logging
import os
import random
import resource
import shutil
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from _pytest import logging as logging_plugin

CACHE_VARIABLE = "RETROGRAD_CACHE_DIR"
CPU_SECONDS = "cpu_seconds"
# Objects that are made, less those that go, between two walks for garbage: with Python's 700 the walks took a tenth of
# the tests' own time.
GARBAGE_WALK = 20_000
# What finds the holders of a refused trace's tensors.
HOLDERS = "retrograd.frontend.python.holders"
# Files and tests that `--cpu-times` lists, and files that `--cpu-total` does.
LISTED, SLOWEST = 40, 12

# torch reads this when it is imported; without it each of pytest-xdist's workers would start a thread on every core.
# The process that starts them leaves it unset: they would inherit what it sets for itself, all cores.
if (workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT")) is not None:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-times", action="store_true", help="CPU seconds of files and tests, those of the tools they run included"
    )
    parser.addoption(
        "--cpu-total", action="store_true", help="the same of all that ran, and of the files that took most"
    )


def pytest_configure(config: pytest.Config) -> None:
    # Workers inherit the variables, so that one run shares one cache, no run sees what an earlier one left, and what is
    # kept for the user to replay (of the failures that tests provoke) does not stay.
    if "PYTEST_XDIST_WORKER" not in os.environ:
        # What pytest keeps of the last runs, `tmp_path`, stays where it was.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        folder = tempfile.mkdtemp(prefix="retrograd-tests-")
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        os.environ[CACHE_VARIABLE] = os.path.join(folder, "cache")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    config.pluginmanager.register(FewCollections())
    logging_plugin.__dict__["catching_logs"] = RootLogs
    if config.getoption("--cpu-times") or config.getoption("--cpu-total"):
        config.pluginmanager.register(CpuTimes(is_whole=config.getoption("--cpu-times")))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    # `-m integration`, say: a test is marked with its folder's name.
    for item in items:
        item.add_marker(item.path.relative_to(Path(__file__).parent).parts[0])
    # Where single cases are asked for, others are not here to be named.
    mark_long_cases(items, is_whole=not any("::" in argument for argument in config.args))


def mark_long_cases(items: Sequence[pytest.Item], *, is_whole: bool) -> None:
    """Mark as `long` those cases that `long_cases` names, and those that `short_cases` does not name.

    ``is_whole`` says that all cases of each test are among ``items``.

    Raises:
        pytest.UsageError: a test names a case that it does not have.
    """
    unknown: dict[str, set[str]] = {}
    for item in items:
        test, _, rest = item.nodeid.partition("[")
        case = rest.removesuffix("]")
        for mark in item.iter_markers():
            if mark.name in ("long_cases", "short_cases"):
                unknown.setdefault(test, set(mark.args)).discard(case)
                if (case in mark.args) == (mark.name == "long_cases"):
                    item.add_marker("long")
    unknown = {test: names for test, names in unknown.items() if names}
    if unknown and is_whole:
        raise pytest.UsageError(f"long_cases or short_cases name cases that there are not: {unknown}")


def pytest_collectstart(collector: pytest.Collector) -> None:
    # Models that a file makes when it is imported.
    _seed(collector.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _seed(item.nodeid)


def _seed(name: str) -> None:
    """Seeds Python's, NumPy's and PyTorch's generators from a name, so that a test that fails once fails again."""
    number = zlib.crc32(name.encode())
    random.seed(number)
    # Most unit tests of pure data import neither.
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number)
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "manual_seed"):
        # Where no CUDA device was asked for, `torch.manual_seed` notes for each kind of device, with the whole stack,
        # what is to be done when it is: longer than most unit tests take.
        torch.default_generator.manual_seed(number)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(number)


class FewCollections:
    """Keeps what lives longer than a file of tests out of the garbage collector's sight.

    To walk a million objects of torch's again and again took a quarter of the tests' own time. What a test itself makes
    is collected as ever.

    Where a trace is refused, the search for what holds its tensors would read them all as well, up to sixteen times:
    a tenth of the tests' time. It does so in tests that are marked ``whole_heap``, and else reads what the file's tests
    made.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._thawed: Callable[[], AbstractContextManager[None]] | None = None
        # No garbage worth the walk comes of imports.
        gc.disable()

    def pytest_collection_finish(self) -> None:
        gc.freeze()
        gc.set_threshold(GARBAGE_WALK)
        gc.enable()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.path != self._path:
            # First what is garbage: nobody looks for it any more among what is frozen.
            gc.collect()
            gc.freeze()
            self._path = item.path
        if (holders := sys.modules.get(HOLDERS)) is not None and hasattr(holders, "find_holdings"):
            self._thawed = self._thawed or holders._thawed
            is_whole = item.get_closest_marker("whole_heap") is not None
            holders.__dict__["_thawed"] = self._thawed if is_whole else contextlib.nullcontext


class RootLogs(logging_plugin.catching_logs[logging.Handler]):
    """Has pytest read what reaches the root of all loggers, for tests that ask for it, and no other.

    It would read each logger that does not propagate, PyTorch's seventy: to set them up took as long as ten tests of
    pure data, and that the structured one among them then wrote out each graph and each tensor of a trace, which nobody
    read, a twentieth of the tests' own time.
    """

    def __enter__(self) -> logging.Handler:
        root = logging.getLogger()
        root.addHandler(self.handler)
        self.attached_loggers.append(root)
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.orig_level = root.level
            root.setLevel(min(root.level, self.level))
        return self.handler


class CpuTimes:
    """Measures the CPU seconds of each test, of this process and of those that it started, and lists them.

    Unlike a test's wall time they say little of what else runs on the machine.
    """

    def __init__(self, *, is_whole: bool) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._is_whole = is_whole
        self._last = self._of_workers = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> None:
        self._last = _cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        # Once for each test, not for each of its phases: there are thousands of them.
        if call.when != "teardown":
            return report
        now = _cpu_seconds()
        # A worker's report brings this to the process that lists it.
        report.user_properties.append((CPU_SECONDS, now - self._last))
        self._last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        used = [v for name, v in report.user_properties if name == CPU_SECONDS and isinstance(v, float)]
        self.seconds[report.nodeid] += sum(used)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # A worker's own, with what it imported and collected.
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output[CPU_SECONDS] = _cpu_seconds()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        # One that crashed left nothing.
        self._of_workers += getattr(node, "workeroutput", {}).get(CPU_SECONDS, 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        folders: dict[str, float] = defaultdict(float)
        files: dict[str, float] = defaultdict(float)
        for name, seconds in self.seconds.items():
            path = name.partition("::")[0]
            files[path] += seconds
            folders[path.rpartition("/")[0]] += seconds
        listed: list[tuple[str, dict[str, float], int]] = [("files", files, SLOWEST)]
        if self._is_whole:
            listed = [("folders", folders, LISTED), ("files", files, LISTED), ("tests", self.seconds, LISTED)]
        for what, found, most in listed:
            terminalreporter.section(f"CPU seconds of {what}")
            for name, seconds in sorted(found.items(), key=lambda pair: -pair[1])[:most]:
                terminalreporter.write_line(f"{seconds:8.1f}  {name}")
        # What workers that ended took is among this process's children's too.
        own = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        whole = own + self._of_workers if self._of_workers else _cpu_seconds()
        terminalreporter.write_line(
            f"{whole:8.1f}  in all: {sum(self.seconds.values()):.1f} of tests, and what they import"
        )


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used) + _seconds_of_servers()


def _seconds_of_servers() -> float:
    """CPU seconds of the processes that were started here and run on, and of those that they waited for: the servers
    that tools are forked from."""
    ticks = 0
    # Linux alone tells which they are. A thread, or a server, may end meanwhile, and its file with it.
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text(encoding="ascii").split():
                with contextlib.suppress(OSError):
                    # After the name, which may hold anything: user and system time, and the same of its children.
                    fields = Path(f"/proc/{child}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                    ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
