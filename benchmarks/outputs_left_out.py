# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What it saves to leave an output out of the backward: a language model that returns its loss and its logits, whose
loss alone is used. Given zeros for the logits, as a gradient of an output that counts, the backward is the whole one.

python benchmarks/outputs_left_out.py
python benchmarks/outputs_left_out.py --size test --repeats 3
"""

from __future__ import annotations

import argparse
import ctypes
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from models import MODELS, SIZES
from models.gpt import LanguageModel
from torch import Tensor

import retrograd


class WithLogits(torch.nn.Module):
    """A language model that returns its loss and its logits, float32 [batch * tokens, vocabulary]."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        model = self.model
        logits = model.head(model.norm(model.blocks(model.embedding(tokens) + model.position))).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten()), logits


def run(call: Callable[..., Any], args: Sequence[Tensor], *, zeros: bool, trim: bool) -> tuple[float, int]:
    """Seconds of one backward, and bytes of memory of the process that it took at most, on top of what was there.

    ``trim``: malloc gives what it keeps back to the system first, so that all that is taken counts; it takes time.
    """
    loss, logits = call(*args)
    if trim:
        ctypes.CDLL(None).malloc_trim(0)
    before = _resident("VmRSS", reset=True)
    start = time.perf_counter()
    if zeros:
        torch.autograd.backward([loss, logits], [torch.ones(()), torch.zeros_like(logits)])
    else:
        loss.backward()
    return time.perf_counter() - start, _resident("VmHWM") - before


def _resident(field: str, *, reset: bool = False) -> int:
    """A line of Linux's ``/proc/self/status`` in bytes; ``reset`` starts the peak, ``VmHWM``, anew."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return 1024 * int(found[1]) if found else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time a backward that leaves out the logits, and the whole one.")
    parser.add_argument("--size", choices=SIZES, default="bench")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    case = MODELS["language_model"].make(options.size)
    assert isinstance(case.model, LanguageModel)
    model = WithLogits(case.model)
    step = retrograd.compile_backward(model, case.args)
    keys = [(name, zeros) for name in ("eager", "retrograd") for zeros in (True, False)]
    rounds = list[dict[tuple[str, bool], tuple[float, int]]]()
    for number in range(2 * options.repeats + 2):
        trim, results = number > options.repeats, {}
        for name, zeros in keys:
            model.zero_grad()
            results[name, zeros] = run(step if name == "retrograd" else model, case.args, zeros=zeros, trim=trim)
        rounds.append(results)
    print("| backward | logits | ms, median | MiB more at most, median |\n| --- | --- | ---: | ---: |")
    for name, zeros in keys:
        # The first round of each kind is not counted: backwards are compiled in it.
        seconds = statistics.median(r[name, zeros][0] for r in rounds[1 : options.repeats + 1])
        size = statistics.median(r[name, zeros][1] for r in rounds[options.repeats + 2 :])
        print(f"| {name} | {'zeros' if zeros else 'left out'} | {1e3 * seconds:.1f} | {size / 2**20:.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
