# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Trains two small networks on handwritten digits, through retrograd and in eager PyTorch beside it.

    python examples/digits.py

Both start from the same parameters and see the same batches. Ends with exit code 1 if their losses part, or if IREE's
own `iree-run-module` does not get eager's gradients from the file that is written.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from digits_data import ConvNet, Digits, RowTransformer
from digits_display import Display, EpochRow, Summary
from digits_replay import replay
from torch import Tensor, nn

import retrograd

BATCH = 64
LEARNING_RATE = 0.05
MOMENTUM = 0.9
# Rounding differs, and training carries the difference on; gradients that are off by 5 % part further than this.
TOLERANCE = 0.002


@dataclass(frozen=True)
class Task:
    """A network to train, and for how many epochs."""

    name: str
    make: Callable[[], nn.Module]
    epochs: int


TASKS = (Task("convolutional network", ConvNet, 5), Task("transformer", RowTransformer, 8))


@dataclass
class Trainer:
    """A model in training: ``step`` is the model, or what stands for it in forward and backward."""

    model: nn.Module
    step: Callable[[Tensor], Tensor]
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    def train_on(self, images: Tensor, labels: Tensor) -> float:
        """One step on one batch; its loss before the step. Forward and backward are timed, the optimizer is not."""
        self._optimizer.zero_grad()
        start = time.perf_counter()
        loss = F.cross_entropy(self.step(images), labels)
        loss.backward()
        self.seconds.append(time.perf_counter() - start)
        self._optimizer.step()
        return loss.item()

    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        """The share of images that the model reads right, with its batch normalization in eval mode."""
        self.model.eval()
        with torch.no_grad():
            right = float((self.model(images).argmax(dim=1) == labels).float().mean())
        self.model.train()
        return right


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train on handwritten digits, through retrograd and eagerly.")
    parser.add_argument("--output", type=Path, default=Path("digits.vmfb"), help="the artifact to write (%(default)s)")
    options = parser.parse_args(arguments)
    # Networks as small as these lose more than they gain by sharing a step among threads.
    torch.set_num_threads(1)
    display = Display()
    digits = Digits.load()
    summaries = [run_task(task, digits, display) for task in TASKS]
    replayed = write_and_replay(summaries[0], options.output, digits, display)
    display.summarize(summaries)
    losses_agree = all(summary.difference <= TOLERANCE for summary in summaries)
    display.verdict(losses_agree, f"in every epoch the losses agree within {TOLERANCE}")
    display.verdict(replayed, "iree-run-module got eager's gradients from the file")
    return 0 if losses_agree and replayed else 1


def run_task(task: Task, digits: Digits, display: Display) -> Summary:
    """Compile the task's network, then train it twice, batch by batch in turn."""
    torch.manual_seed(0)
    reference = task.make()
    model = copy.deepcopy(reference)
    with display.compiling(task.name) as progress:
        step = retrograd.compile_backward(model, (digits.images[:BATCH],), progress=progress)
    eager, ours = Trainer(reference, reference), Trainer(model, step)
    rows: list[EpochRow] = []
    with display.training(task.name, task.epochs) as show:
        for epoch in range(task.epochs):
            rows.append(train_epoch(epoch, eager, ours, digits))
            show(rows[-1])
    return Summary(
        name=task.name,
        step=step,
        model=model,
        epochs=rows,
        eager_ms=1e3 * statistics.median(eager.seconds),
        ours_ms=1e3 * statistics.median(ours.seconds),
    )


def train_epoch(epoch: int, eager: Trainer, ours: Trainer, digits: Digits) -> EpochRow:
    """Show every batch to both; the losses are means over the epoch."""
    losses = [(eager.train_on(*batch), ours.train_on(*batch)) for batch in digits.batches(BATCH, epoch)]
    eager_losses, our_losses = zip(*losses, strict=True)
    test = (digits.test_images, digits.test_labels)
    return EpochRow(
        epoch=epoch + 1,
        eager_loss=statistics.fmean(eager_losses),
        our_loss=statistics.fmean(our_losses),
        eager_accuracy=eager.accuracy(*test),
        our_accuracy=ours.accuracy(*test),
    )


def write_and_replay(summary: Summary, path: Path, digits: Digits, display: Display) -> bool:
    """Save what was compiled, and run its backward without us; whether that gave the expected gradients."""
    summary.step.save(path)
    display.say(f"{summary.name}: forward and backward written to {path.resolve()} ({path.stat().st_size:,} bytes)")
    result = replay(path, summary.model, digits.images[:BATCH], digits.labels[:BATCH])
    display.replayed(result)
    return result.succeeded


if __name__ == "__main__":
    sys.exit(main())
