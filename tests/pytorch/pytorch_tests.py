# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""PyTorch's own tests inside of ``retrograd.enable()``, beside eager.

``python tests/pytorch/pytorch_tests.py --tests PYTORCH/test/test_autograd.py --jobs 2`` with a checkout of PyTorch's
sources, of which nothing is in this repository; ``test/inductor/test_compiled_autograd.py`` is another such file. Each
test runs a few times eagerly and a few times inside of ``enable()``, in child processes (``pytorch_file.py``): where
one ends, or takes too long, the test that it was at is told, and the rest goes on. What differs from eager runs once
more in a process of its own. The exit status is 1 where a test differs, crashed or hung.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CASE = Path(__file__).with_name("pytorch_file.py")
BAD = ("differs", "crashed", "hung")
# Of what runs in one process: later tests have the earlier ones' compilers warm.
BATCH = 40


def run_tests(file: Path, names: Sequence[str], mode: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what became of each test of ``file`` in a mode, ``eager`` or ``enable``, in order."""
    done = 0
    while done < len(names):
        for found in _run_process(file, names[done:], mode, options):
            done += 1
            yield found


def _run_process(file: Path, names: Sequence[str], mode: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run tests in one process until it ends; the test that it ended at is counted."""
    command = [sys.executable, str(CASE), str(file), mode, str(options.times)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(json.dumps(list(names)).encode())
    child.stdin.close()
    try:
        # The first line says that all is imported.
        _read_line(child.stdout.fileno(), 300)
        for name in names:
            line = _read_line(child.stdout.fileno(), options.limit)
            if not line:
                kind = "hung" if line is None else "crashed"
                yield {"test": name, "kind": kind, "error": f"status {child.poll()}"}
                return
            yield {"test": name, **json.loads(line)}
    finally:
        # Its compilers with it.
        if child.poll() is None:
            os.killpg(child.pid, 9)
        child.wait()


def _read_line(source: int, seconds: float) -> bytes | None:
    """The next line, nothing at the end, None where time is up."""
    line = b""
    while not line.endswith(b"\n"):
        if not select.select([source], [], [], seconds)[0]:
            return None
        byte = os.read(source, 1)
        if not byte:
            return b""
        line += byte
    return line


def judge(eager: Mapping[str, Any], enabled: Mapping[str, Any]) -> str:
    """What became of a test inside of ``enable()``, by what it does in eager."""
    if eager["kind"] != "passed":
        return f"not counted: {eager['kind']} in eager"
    kind = str(enabled["kind"])
    return {"passed": "equal", "failed": "differs", "skipped": "differs"}.get(kind, kind)


def list_tests(file: Path) -> list[str]:
    """The names of a file's tests, ``Class.test``."""
    command = [sys.executable, str(CASE), str(file), "list", "0"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
    return [str(name) for name in json.loads(output.splitlines()[-1])]


def compare(file: Path, names: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run tests in both modes; those that differ once more, each by itself."""
    rows = []
    both = [run_tests(file, names, mode, options) for mode in ("eager", "enable")]
    for eager, enabled in zip(*both, strict=True):
        verdict = judge(eager, enabled)
        if verdict in BAD:
            enabled = next(run_tests(file, [enabled["test"]], "enable", options))
            verdict = judge(eager, enabled)
        rows.append({**enabled, "file": file.name, "verdict": verdict, "of eager": eager.get("error", "")})
        if options.write:
            with options.write.open("a") as log:
                log.write(json.dumps(rows[-1]) + "\n")
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many tests of each file came out how, then each that differs, and why others run eagerly."""
    lines = ["| tests | ran in eager | captured | compiled | equal | differ | crashed | hung |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for file in dict.fromkeys(row["file"] for row in rows):
        ran = [r for r in rows if r["file"] == file and not r["verdict"].startswith("not counted")]
        kinds = Counter(row["verdict"] for row in ran)
        captured, compiled = (sum(bool(row.get(key)) for row in ran) for key in ("captured", "compiled"))
        counts = [len(ran), captured, compiled, *(kinds[kind] for kind in ("equal", *BAD))]
        lines.append(" | ".join([f"| `{file}`", *map(str, counts)]) + " |")
    bad = [row for row in rows if row["verdict"] in BAD]
    lines += ["", *(f"{row['verdict']}: {row['test']}: {row.get('error', '')}" for row in bad)]
    reasons = Counter(r for row in rows if not row.get("compiled") for r in set(row.get("eager", ())))
    lines += ["", *(f"{count:4} {reason}" for reason, count in reasons.most_common())]
    return "\n".join(lines)


def main(arguments: Iterable[str] | None = None) -> int:
    """Run what the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tests", type=Path, action="append", required=True, help="a file of PyTorch's tests")
    parser.add_argument("--filter", default="", help="of the tests whose name this pattern is found in")
    parser.add_argument("--times", type=int, default=3, help="how often a test runs, in each mode")
    parser.add_argument("--limit", type=float, default=120, help="seconds that one test may take")
    parser.add_argument("--jobs", type=int, default=1, help="tests at a time")
    parser.add_argument("--write", type=Path, help="a file to which each verdict is added, a line of JSON")
    options = parser.parse_args(None if arguments is None else list(arguments))
    batches = []
    for file in options.tests:
        names = [name for name in list_tests(file.resolve()) if re.search(options.filter, name)]
        batches += [(file.resolve(), names[start : start + BATCH]) for start in range(0, len(names), BATCH)]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = [row for found in pool.map(lambda batch: compare(batch[0], batch[1], options), batches) for row in found]
    print(table(rows))
    return int(any(row["verdict"] in BAD for row in rows))


if __name__ == "__main__":
    sys.exit(main())
