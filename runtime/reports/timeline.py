# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Shows what is in memory while a step runs, kernel by kernel: as a picture, or as a trace that opens in Perfetto."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrograd.contract.roles import BACKWARD, FORWARD, GRAD, MUTATION, OUTPUT, SAVED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HALVES = (FORWARD, BACKWARD)
# What one stage of a function that is cut gives to another.
BETWEEN = "between stages"
USED, RESERVED = "scratch in use", "scratch reserved"
HELD = {OUTPUT: "outputs", MUTATION: "updated buffers", SAVED: "residuals", GRAD: "gradients"}
"""What the results of a function are called, by their roles."""

SERIES = (*HELD.values(), BETWEEN, USED, RESERVED)
"""Kinds of memory, from the bottom of the picture to the top."""

_COLORS = ("#8da0cb", "#e5c494", "#fc8d62", "#66c2a5", "#a6d854", "#e78ac3", "#eeeeee")
_STEP_MICROSECONDS = 1000
_MIB = 2**20


@dataclass(frozen=True)
class Moment:
    """Kernels that run at one time, the line of a source that they come from, and what is in memory meanwhile, in bytes
    by the names of ``SERIES``."""

    half: str
    kernels: str
    source: str
    bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        """The bytes of all that is allocated."""
        return sum(self.bytes.values())

    def __str__(self) -> str:
        return f"{self.half}: {self.kernels}{f' ({self.source})' if self.source else ''}"


@dataclass(frozen=True)
class MemoryTimeline:
    """A step, forward then backward; ``name`` is what it is called in a picture or trace.

    Steps are counted, not timed: how long each takes is not known. Results have their storage before a function, or a
    stage of one that is cut, runs; residuals keep theirs until the last stage that takes them returns. Scratch memory
    is one block for each, of which the part in use changes from step to step; where little of it lies idle at the
    fullest moment, IREE packed it well. What a loop carries from round to round is not seen, and counts as idle.
    """

    name: str
    moments: tuple[Moment, ...]

    @classmethod
    def from_report(cls, report: Mapping[str, Any]) -> MemoryTimeline:
        """Returns what ``Report.to_dict`` has under ``timeline``: for each stage of a half what it holds, its scratch
        memory, and its steps.

        Raises:
            ValueError: there is none: sizes are dynamic, parts run in torch, or the report is of another release.
        """
        if "islands" in report:
            raise ValueError("parts run in torch, and what is in memory meanwhile is not known: see explain() for them")
        if "sizes" in report:
            raise ValueError(
                "what is in memory differs with the sizes: compile without dynamic_shapes, for the sizes to look at"
            )
        if "timeline" not in report:
            raise ValueError("the report has no timeline of memory: compile the model again with this release")
        moments: list[Moment] = []
        for half in HALVES:
            found = report["timeline"][half]
            # Files of earlier releases have halves in one piece alone.
            for data in found if isinstance(found, list) else [found]:
                # A function that computes nothing still holds what it was given storage for.
                for kernels, source, used in data["steps"] or [["nothing", "", 0]]:
                    taken = {**data["held"], USED: used, RESERVED: data["scratch"] - used}
                    moments.append(Moment(half, kernels, source, {**dict.fromkeys(SERIES, 0), **taken}))
        return cls(f"{report['name']}, {report['partition']}", tuple(moments))

    @property
    def peak(self) -> int:
        """The most bytes allocated at a time."""
        return max(m.total for m in self.moments)

    def fullest(self) -> Moment:
        """The moment at which most is in use, in the half that has most allocated."""
        return max(self.moments, key=lambda m: (m.total, m.bytes[USED]))

    def save(self, path: str | os.PathLike[str], *, before: MemoryTimeline | None = None) -> None:
        """Write a Chrome trace to a path that ends in ``.json``, else a picture, in the format of its ending.

        ``before`` is put beside it: above it in a picture, to the same scale, as a process of its own in a trace.

        Raises:
            ValueError: matplotlib knows no format of that ending.
            ModuleNotFoundError: a picture, and matplotlib is not installed (``pip install retrograd[plot]``).
            OSError: the file cannot be written.
        """
        path = Path(path)
        shown = [self] if before is None else [before, self]
        if path.suffix == ".json":
            path.write_text(json.dumps(to_trace(shown)) + "\n", encoding="utf-8")
        else:
            save_picture(shown, path)


def to_trace(timelines: Sequence[MemoryTimeline]) -> dict[str, Any]:
    """The timelines in Chrome's trace event format, each as a process: a slice for each step, a counter of all bytes
    and one for each of ``SERIES``. A step is drawn a millisecond long.

    Format: "Trace Event Format" (Google, 2016), which https://ui.perfetto.dev opens.
    """
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines, 1):
        common = {"pid": process, "tid": 1}
        events.append({"ph": "M", "name": "process_name", "args": {"name": timeline.name}, **common})
        for number, moment in enumerate(timeline.moments):
            at = {"ts": number * _STEP_MICROSECONDS, **common}
            what = {"half": moment.half, "source": moment.source, **moment.bytes}
            events.append(
                {"ph": "X", "name": moment.kernels, "cat": moment.half, "dur": _STEP_MICROSECONDS, "args": what, **at}
            )
            events.append({"ph": "C", "name": "bytes allocated", "args": {"bytes": moment.total}, **at})
            events += [{"ph": "C", "name": s, "args": {"bytes": moment.bytes[s]}, **at} for s in SERIES]
        # A counter keeps its last value: at the end of the step all is freed.
        end = {"ts": len(timeline.moments) * _STEP_MICROSECONDS, **common}
        events += [{"ph": "C", "name": s, "args": {"bytes": 0}, **end} for s in ("bytes allocated", *SERIES)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_picture(timelines: Sequence[MemoryTimeline], path: Path) -> None:
    """Draw the timelines one above the other, to the same scale."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot, which would look for a display and keep the figure.
    figure = Figure(figsize=(9.0, 0.6 + 2.6 * len(timelines)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(timelines), 1, squeeze=False)[:, 0]
    for axis, timeline in zip(axes, timelines, strict=True):
        draw(axis, timeline)
        axis.set_ylim(0, 1.12 * max(t.peak for t in timelines) / _MIB)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize="small")
    figure.savefig(path, dpi=110)


def draw(axes: Axes, timeline: MemoryTimeline) -> None:
    """Draw a timeline as stacked areas, in MiB over steps, with a line where the backward begins."""
    edges = range(len(timeline.moments) + 1)
    layers = [[m.bytes[s] / _MIB for m in timeline.moments] for s in SERIES]
    # A step reaches from its edge to the next.
    axes.stackplot(edges, [[*layer, layer[-1]] for layer in layers], labels=SERIES, colors=_COLORS, step="post")
    turn = next((i for i, m in enumerate(timeline.moments) if m.half == HALVES[1]), 0)
    axes.axvline(turn, color="black", linewidth=0.8, linestyle=":")
    corner: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "xytext": (4, -4), "textcoords": "offset points"}
    axes.annotate(HALVES[1], (turn, 1), va="top", fontsize="small", **corner)
    axes.axhline(timeline.peak / _MIB, color="black", linewidth=0.8)
    axes.set_title(f"{timeline.name}: peak {timeline.peak / _MIB:.2f} MiB", loc="left", fontsize="medium")
    axes.set_xlim(0, len(timeline.moments))
    axes.set_xlabel("steps", fontsize="small")
    axes.set_ylabel("MiB", fontsize="small")
