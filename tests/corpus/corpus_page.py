# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Verdicts on the corpus as a page of documentation."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from corpus_doors import DOORS
from corpus_examine import OUTCOMES, Verdict
from page import markdown_table, measured_with, number, write_page

Verdicts = Mapping[tuple[str, str], Verdict]
OURS = tuple(door for door in DOORS if door != "inductor")
_LISTED = """\
Architectures of Hugging Face transformers and timm, from configurations of small sizes with random parameters, and
training steps as people write them around torch.nn: forward, loss and backward through each door, on the {device}.
"""
_UNLISTED = """\
Programs that nobody chose: every architecture of transformers' auto classes that [models.md](models.md) has not, made
small by what its sizes are called (`tests/corpus/corpus_shrunk.py`), more of timm's by name, and torchvision's where it
is installed. What eager does not run when shrunk so, or not to within 1e-3 of float64, is left out.
"""
_TERMS = """\
- *right*: the loss, every gradient and every buffer of three steps, with other inputs and other parameters each, are
  those of float64, but for what rounding does to eager too (twenty times of it, or 2e-5). *ran*: the program draws
  random numbers, so that there is nothing to compare. *refused*: not compiled, for the reason below. *crashed*: any
  other error, or no result within the limits of time and memory.
- The numbers behind: the time of a step (forward, loss, backward) to eager's, medians of steps in turn; and the seconds
  from the source to the end of the first step, with no cache of either compiler. The first table has that of backwards
  alone too: under `enable()` the forward is eager's.
- *peak*: the most bytes that a step through `compile_backward` holds to those of an eager one, {counted};
  parameters and inputs are not counted.
- *islands* are ops that run in torch between compiled functions; *graphs* the parts that Dynamo cuts a program into.
"""


@dataclass(frozen=True)
class Page:
    """A page of verdicts in the folder of documents, and what it begins with."""

    file: str
    title: str
    explanation: str


_COUNTED = {
    "cpu": "by PyTorch's profiler, which is shown what compiled functions work in",
    "cuda": "both by PyTorch's count of the device's memory",
}


def _page(file: str, title: str, explanation: str, device: str) -> Page:
    text = f"{explanation}\n{_TERMS}".format(device={"cpu": "CPU", "cuda": "GPU"}[device], counted=_COUNTED[device])
    return Page(file, title, text)


# By whether nobody chose the programs, and the device.
PAGES = {
    (False, "cpu"): _page("models.md", "Programs that others wrote", _LISTED, "cpu"),
    (False, "cuda"): _page("models-cuda.md", "Programs that others wrote, on a GPU", _LISTED, "cuda"),
    (True, "cpu"): _page("unlisted.md", "Programs on no list", _UNLISTED, "cpu"),
    (True, "cuda"): _page("unlisted-cuda.md", "Programs on no list, on a GPU", _UNLISTED, "cuda"),
}
UNTIMED = """\
The machine had other work at the time: times are left out but for the seconds that processors spent on compiling, which
are those of all processes that took part together.
"""


def write(
    verdicts: Verdicts,
    path: Path,
    facts: Mapping[str, str],
    command: str,
    programs: int,
    *,
    timed: bool = True,
    page: Page = PAGES[False, "cpu"],
) -> None:
    """Write the page of these verdicts; ``programs`` is how many programs there are in all. Without ``timed`` it tells
    nothing that other work on the machine disturbs."""
    names = dict.fromkeys(name for name, _ in verdicts)
    lines = [f"# {page.title}", "", "```", command, "```", "", page.explanation]
    if not timed:
        lines += [UNTIMED]
        verdicts = {
            key: replace(v, compile_seconds=None, ratio=None, backward_ratio=None, eager_ms=None)
            for key, v in verdicts.items()
        }
    if len(names) < programs:
        lines += [f"A part of the corpus: {len(names)} of {programs} programs.", ""]
    lines += [*_summary(verdicts), ""]
    reasons: list[str] = []
    for family in dict.fromkeys(v.family for v in verdicts.values()):
        members = [name for name in names if any(v.program == name and v.family == family for v in verdicts.values())]
        rows = [_row(name, verdicts, reasons) for name in members]
        columns = ("program", "eager ms", *map(_title, DOORS), "peak")
        lines += [f"## {family}", "", *markdown_table(columns, 1, rows), ""]
    if reasons:
        lines += ["## Reasons", "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)), ""]
    write_page(path, [*lines, *measured_with(dict(facts))])


def _title(door: str) -> str:
    return {"enable": "`enable()`", "inductor": "Inductor"}.get(door, f"`{door}`")


def _summary(verdicts: Verdicts) -> list[str]:
    times = ("step to eager (worst)", "backward (worst)")
    columns = ("door", *OUTCOMES, *times, "compile to Inductor", "in processor time", "longest s")
    rows = []
    for door in DOORS:
        found = [v for v in verdicts.values() if v.door == door]
        if not found:
            continue
        counts = Counter(v.outcome for v in found)
        good = [v for v in found if v.outcome in ("right", "ran")]
        ratios = ([v.ratio for v in good if v.ratio], [v.backward_ratio for v in good if v.backward_ratio])
        pairs = [(v, verdicts[v.program, "inductor"]) for v in good if (v.program, "inductor") in verdicts]
        wall = [v.compile_seconds / i.compile_seconds for v, i in pairs if v.compile_seconds and i.compile_seconds]
        work = [v.compile_cpu / i.compile_cpu for v, i in pairs if v.compile_cpu and i.compile_cpu]
        longest = max((v.compile_seconds for v in good if v.compile_seconds), default=None)
        steps = [f"{geometric_mean(r):.2f} ({max(r):.2f})" if r else "-" for r in ratios]
        means = [f"{geometric_mean(r):.2f}" if r else "-" for r in (wall, work)]
        rows.append([_title(door), *(str(counts[o]) for o in OUTCOMES), *steps, *means, number(longest, ".0f")])
    return markdown_table(columns, 1, rows)


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _row(name: str, verdicts: Verdicts, reasons: list[str]) -> list[str]:
    found = [verdicts.get((name, door)) for door in DOORS]
    eager = [v.eager_ms for v in found if v and v.eager_ms]
    ours = found[0]
    peak = "-"
    if ours and ours.peak_bytes and ours.eager_peak_bytes:
        peak = f"{ours.peak_bytes / ours.eager_peak_bytes:.2f}"
    return [name, f"{min(eager):.1f}" if eager else "-", *(_cell(v, reasons) for v in found), peak]


def _cell(verdict: Verdict | None, reasons: list[str]) -> str:
    if verdict is None:
        return "-"
    parts = [verdict.outcome if verdict.outcome in ("right", "ran") else f"**{verdict.outcome}**"]
    if verdict.ratio is not None and verdict.compile_seconds is not None:
        parts += [f"{verdict.ratio:.2f}", f"{verdict.compile_seconds:.0f} s"]
    elif verdict.compile_cpu is not None:
        parts += [f"{verdict.compile_cpu:.0f} s"]
    told = [t for t in (verdict.reason, *_named(verdict.islands), *verdict.notes) if t]
    if verdict.islands:
        parts.append("islands")
    if told:
        text = "; ".join(told)
        reasons.append(f"{verdict.program}, {_title(verdict.door)}: {_plain(text)}")
        parts.append(f"[{len(reasons)}]")
    return " ".join([", ".join(parts[:-1]), parts[-1]]) if told else ", ".join(parts)


def _named(islands: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(re.sub(r'(, at| at)? File ".*', "", line) for line in islands))[:4]


def _plain(text: str, most: int = 300) -> str:
    """A line of Markdown without places in folders of the machine."""
    line = re.sub(r"/\S*site-packages/", "", " ".join(text.split()))
    line = re.sub(r"(?<![\w.])/\S+/(?=[\w.-]+)", "", line)
    return line[:most].replace("|", "\\|").replace("<", "&lt;")
