# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Verdicts as a page of documentation."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from op_check import Verdict

OUTCOMES = ("native", "islands", "refused", "wrong", "crashed")
_ORDER = ("wrong", "crashed", "refused", "islands")


def read_verdicts(path: Path) -> dict[str, Verdict]:
    """The verdicts that were kept, by name, the last of each; none where there is no such file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = map(_read_verdict, filter(None, lines))
    return {verdict.name: verdict for verdict in found}


def _read_verdict(line: str) -> Verdict:
    fields = json.loads(line)
    fields["failures"] = [tuple(f) for f in fields["failures"]]
    return Verdict(**fields)


def write_table(verdicts: Sequence[Verdict], samples: int | None, cases: int, device: str = "cpu") -> str:
    """Markdown: counts, one line each; then what is not native, the worst first, each with its first reason.

    ``cases`` is how many there are in all, of which these verdicts may be a part; ``device`` what they ran on.
    """
    counts = Counter(v.outcome for v in verdicts)
    lines = [f"{outcome}: {counts[outcome]}" for outcome in OUTCOMES]
    lines = ["# Coverage", "", "```", *lines, "```", ""]
    if len(verdicts) < cases:
        lines += [
            f"A partial sweep: {len(verdicts)} of {cases}, in a random order; `make coverage` goes on with the rest.",
            "",
        ]
    most = "all their samples" if samples is None else f"at most {samples} samples each, spread over all that there are"
    where = "the CPU" if device == "cpu" else "CUDA"
    total = sum(v.samples for v in verdicts)
    good, islands = sum(v.native for v in verdicts), sum(v.islands for v in verdicts)
    lines += [
        "Ops of PyTorch's operator database (`op_db`) and modules of `module_db` that have a gradient in f32 on",
        f"{where} (PyTorch {torch.__version__}), with {most}:",
        f"{total} samples, of which {good} compile and agree with eager, and {islands} more with ops that run in torch",
        "(eager islands). An op counts by the worst of its samples.",
        f"{counts['none']} more have no sample with a gradient in eager there.",
        "",
    ]
    rest = sorted((v for v in verdicts if v.outcome in _ORDER), key=lambda v: (_ORDER.index(v.outcome), v.name))
    lines += ["| op | outcome | native samples | first reason |", "| --- | --- | ---: | --- |"]
    lines += [f"| `{v.name}` | {v.outcome} | {v.native} of {v.samples} | {_cell(v)} |" for v in rest]
    lines += ["", "Native:", "", *_wrapped(f"`{v.name}`" for v in verdicts if v.outcome == "native")]
    return "\n".join(lines) + "\n"


def read_native(text: str) -> frozenset[str]:
    """The names that a table lists as native."""
    _, _, listed = text.partition("\nNative:\n")
    return frozenset(re.findall(r"`([^`]+)`", listed))


def read_islands(text: str) -> list[str]:
    """The names of what runs in torch in part, by a table."""
    return re.findall(r"^\| `([^`]+)` \| islands \|", text, flags=re.MULTILINE)


def _cell(verdict: Verdict) -> str:
    worst = next((f for f in verdict.failures if f[0] == verdict.outcome), ("", "", ""))
    return worst[2].replace("|", "\\|").replace("<", "&lt;")


def _wrapped(names: Iterable[str], width: int = 120) -> list[str]:
    lines = [""]
    for name in names:
        if lines[-1] and len(lines[-1]) + len(name) + 2 > width:
            lines.append("")
        lines[-1] += f"{', ' if lines[-1] else ''}{name}"
    return lines
