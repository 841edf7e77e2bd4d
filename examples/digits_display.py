# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the digits example prints: live tables on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from digits_replay import Replay
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import nn

import retrograd


@dataclass(frozen=True)
class EpochRow:
    """An epoch of both trainings: mean loss, and the share of held-out digits that are read right after it."""

    epoch: int
    eager_loss: float
    our_loss: float
    eager_accuracy: float
    our_accuracy: float

    def cells(self) -> list[str]:
        """The row as text."""
        losses = f"{self.eager_loss:.6f}", f"{self.our_loss:.6f}"
        return [str(self.epoch), *losses, f"{self.eager_accuracy:.1%}", f"{self.our_accuracy:.1%}"]


@dataclass(frozen=True)
class Summary:
    """A finished training: the compiled step, the model it trained, the epochs, median times of a step."""

    name: str
    step: retrograd.CompiledBackward
    model: nn.Module
    epochs: Sequence[EpochRow]
    eager_ms: float
    ours_ms: float

    @property
    def difference(self) -> float:
        """Between the losses of an epoch, where it is largest; NaN if a loss is."""
        differences = [abs(row.eager_loss - row.our_loss) for row in self.epochs]
        return math.nan if any(map(math.isnan, differences)) else max(differences)


class Display:
    """Where everything that the example prints goes through."""

    def __init__(self) -> None:
        self._console = Console()
        if not self._console.is_terminal:
            self._console = Console(width=120)

    def say(self, text: str) -> None:
        """One line, as it is."""
        self._console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def compiling(self, name: str) -> Iterator[Callable[[str], None]]:
        """Gives the callback that shows which phase a compilation is in."""
        start = time.perf_counter()
        with self._console.status(f"{name}: compiling") as status:

            def show(phase: str) -> None:
                text = f"{name}: compiling, {phase}"
                if self._console.is_terminal:
                    status.update(text)
                else:
                    self.say(text)

            yield show
        self.say(f"{name}: compiled in {time.perf_counter() - start:.1f} s")

    @contextmanager
    def training(self, name: str, epochs: int) -> Iterator[Callable[[EpochRow], None]]:
        """Gives the callback that shows an epoch."""
        table = Table(title=f"{name}, {epochs} epochs", title_justify="left")
        for column in ("epoch", "loss, eager", "loss, retrograd", "accuracy, eager", "accuracy, retrograd"):
            table.add_column(column, justify="right")
        if not self._console.is_terminal:
            self.say(f"{name}: epoch, loss eager / retrograd, accuracy eager / retrograd")
            yield lambda row: self.say("  {:>2}  {} / {}  {} / {}".format(*row.cells()))
            return
        with Live(table, console=self._console):
            yield lambda row: table.add_row(*row.cells())

    def replayed(self, result: Replay) -> None:
        """The command that ran the backward elsewhere, and what came of it."""
        self.say(
            f"the same backward, by IREE alone, on one batch; expected are eager's gradients:\n$ cd {result.folder}"
        )
        self.say(f"$ {result.command}")
        self.say(result.output)

    def summarize(self, summaries: Sequence[Summary]) -> None:
        """One table: what was compiled, saved and recomputed, and the times of a step; a column for each training."""
        table = Table(title="retrograd", title_justify="left")
        table.add_column("")
        reports: list[dict[Any, Any]] = []
        for summary in summaries:
            table.add_column(summary.name, justify="right")
            what, value = summary.step.explain().table().columns
            reports.append(dict(zip(what.cells, value.cells, strict=True)))
        titles = list(dict.fromkeys(title for report in reports for title in report))
        for title in titles:
            table.add_row(title, *(report.get(title, "") for report in reports), end_section=title == titles[-1])
        table.add_row("ms per step, eager (median)", *(f"{s.eager_ms:.2f}" for s in summaries))
        table.add_row("ms per step, retrograd (median)", *(f"{s.ours_ms:.2f}" for s in summaries))
        table.add_row("retrograd's time to eager's", *(f"{s.ours_ms / s.eager_ms:.2f}" for s in summaries))
        table.add_row("largest difference of losses", *(f"{s.difference:.1e}" for s in summaries))
        self._console.print(table)

    def verdict(self, is_good: bool, claim: str) -> None:
        """Whether the claim holds."""
        style = "green" if is_good else "bold red"
        self._console.print(f"{'yes' if is_good else 'NO'}: {claim}", style=style, markup=False)
