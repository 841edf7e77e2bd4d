# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reports what was compiled, saved and recomputed: as a table for people, as JSON for tools."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from retrograd.runtime.reports.timeline import MemoryTimeline

# Columns of the report as text.
_WIDTH = 100
_BYTES = (
    "saved_bytes",
    "narrowed_bytes",
    "offloaded_bytes",
    "peak_bytes_planned",
    "peak_bytes_predicted",
    "peak_bytes_measured",
    "vmfb_bytes",
    "forward_transient_bytes",
    "backward_transient_bytes",
    "eager_peak_bytes",
    "memory_budget",
)
# Lists of phrases, rather than of words.
_PHRASES = ("sizes", "backward_variants", "offload", "specializations", "checks", "left_attributes", "verification")
_TITLES = {
    "sizes": "sizes, as traced (and their bounds)",
    "forward_ops": "ops in forward",
    "backward_ops": "ops in backward",
    "saved_bytes": "saved between forward and backward",
    "narrowed_bytes": "bytes fewer than in their own types",
    "saved_values": "values saved",
    "offloaded_bytes": "of what is saved, on the host meanwhile",
    "offloaded_values": "values on the host",
    "offload": "copies of a step",
    "recomputed_ops": "ops recomputed",
    "recomputed_flops": "FLOPs recomputed",
    "stages": "stages",
    "backward_variants": "backwards for outputs left out",
    "specializations": "compiled once more, for other values",
    "verification": "first calls, compared with torch",
    "cuda_graphs": "CUDA graphs",
    "eager_peak_bytes": "peak of live bytes in eager",
    "peak_bytes_planned": "peak of live bytes, planned",
    "peak_bytes_predicted": "peak of live bytes, predicted",
    "peak_bytes_measured": "peak of live bytes, measured",
    "memory_budget": "memory budget",
    "recompute_seconds": "seconds recomputed, estimated",
    "recompute_seconds_gap": "of them at most avoidable",
    "plans_refused": "plans refused for IREE's scratch memory",
    "forward_transient_bytes": "scratch memory of forward",
    "backward_transient_bytes": "scratch memory of backward",
    "shared_gradient_bytes": "gradients in one storage, which each keeps",
    "vmfb_bytes": "size of the executable",
    "target": "target",
    "checks": "checks of the model's that raise",
    "left_attributes": "attributes that no call sets",
    "notes": "notes",
    "collectives": "collectives",
    "partition": "partition",
    "flags": "iree-compile flags",
    "cached": "taken from the cache",
}


@dataclass(frozen=True)
class Report:
    """Numbers about a compiled backward, in bytes, FLOPs and seconds; prints as a table."""

    data: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON values. ``peak_bytes_measured`` is ``None`` until a forward and its backward have run."""
        return dict(self.data)

    def table(self) -> Table:
        """The report as a rich table."""
        table = Table(title=f"retrograd: {self.data['name']}", title_justify="left", show_header=False)
        table.add_column("what")
        table.add_column("value", justify="right")
        for key, title in _TITLES.items():
            if key in self.data:
                value = self.data[key]
                table.add_row(title, self._why_unknown(key) if value is None else self._text(key, value))
        for line in self.data.get("kernels", ()):
            table.add_row("kernel", line)
        for phase, seconds in self.data["compile_seconds"].items():
            table.add_row(f"seconds in {phase}", f"{seconds:.2f}")
        for island in self.data.get("islands", ()):
            share = "not run yet" if island["share"] is None else f"{100 * island['share']:.1f}% of the time"
            table.add_row("runs in torch", f"{island['what']}: {share}")
        names = self.data["recomputed"]
        if names:
            table.add_row(
                "recomputed", ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            )
        if "timeline" in self.data and "islands" not in self.data:
            table.add_row("fullest moment", str(self.timeline().fullest()))
        for place, (size, text) in enumerate(self.data.get("fullest", ())):
            table.add_row("" if place else "in memory then", f"{text}: {format_bytes(size)}")
        if "pareto" in self.data:
            table.add_row("peak by seconds recomputed", plot_curve(self.data["pareto"]))
        return table

    def _text(self, key: str, value: Any) -> str:
        more = key == "peak_bytes_predicted" and "islands" in self.data
        return f"{_text(key, value)}, and what torch takes while it runs its parts" if more else _text(key, value)

    def _why_unknown(self, key: str) -> str:
        if key == "eager_peak_bytes":
            return "unknown: the model looks at the contents of tensors"
        if "collectives" in self.data and "measured" in key:
            return "unknown: other processes take part"
        if "islands" in self.data:
            return "unknown: parts run in torch"
        return "not run yet" if key == "peak_bytes_measured" else "differs with the sizes"

    def timeline(self) -> MemoryTimeline:
        """Lists what is in memory while a step runs, kernel by kernel.

        Raises:
            ValueError: sizes are dynamic, parts run in torch, or the report is of a release that did not record it.
        """
        return MemoryTimeline.from_report(self.data)

    def save_timeline(self, path: str | os.PathLike[str], *, before: Report | None = None) -> None:
        """Write what is in memory while a step runs: a Chrome trace, which Perfetto opens, to a path that ends in
        ``.json``, else a picture (``.png``, ``.svg``, ``.pdf``). ``before`` is another report to put beside it.

        Raises:
            ValueError, ModuleNotFoundError, OSError: as :meth:`MemoryTimeline.save`.
        """
        self.timeline().save(path, before=before.timeline() if before is not None else None)

    def __str__(self) -> str:
        buffer = io.StringIO()
        # As wide as the terminal, if that is narrower, whose lines would break the table; `COLUMNS` says so as well.
        width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 0)).columns)
        Console(file=buffer, width=width).print(self.table())
        return buffer.getvalue().rstrip()

    __repr__ = __str__


def plot_curve(points: Sequence[Sequence[float]], width: int = 24) -> str:
    """A curve of ``[peak in bytes, seconds]`` as text: a bar for the peak of each of at most eight points."""
    step = max(1, -(-len(points) // 8))
    shown = [*points[:-1:step], points[-1]] if points else []
    highest = max((peak for peak, _ in shown), default=1) or 1
    return "\n".join(
        f"{seconds:.1e} s {format_bytes(int(peak)):>9} {'#' * max(1, round(width * peak / highest)):<{width}}"
        for peak, seconds in shown
    )


def format_bytes(count: int) -> str:
    """``1536`` -> ``1.5 KiB``."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def _text(key: str, value: Any) -> str:
    if key in _BYTES:
        return format_bytes(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ("; " if key in _PHRASES else " ").join(value) or "none"
    if isinstance(value, float):
        return f"{value:.1e}"
    return f"{value:,}" if isinstance(value, int) else str(value)
