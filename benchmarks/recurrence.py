# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Recurrent layers by a library, as loops and written out, an op by step: seconds to compile, steps' times to eager's,
and peaks. From how many steps on a layer is a loop (`LEAST_STEPS` in frontend/layers/recurrence_ops.py) was decided by
this.

python benchmarks/recurrence.py
python benchmarks/recurrence.py --kinds gru --steps 16 64 --repeats 40
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from measure import WARM_UP_STEPS, Contender, eager, run_step, time_in_turn
from models import Case
from page import markdown_table
from torch import Tensor, nn

import retrograd
from retrograd.frontend.layers import recurrent

KINDS: dict[str, type[nn.LSTM] | type[nn.GRU] | type[nn.RNN]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
COLUMNS = ("layer", "steps", "form", "compiles in s", "forward", "backward", "step to eager's", "peak MiB")
# The fewest steps of a loop, and whose kernels, that have each form come out. LSTMs alone are in a library.
FORMS = {"library": (1, "library"), "loop": (1, "off"), "written out": (1 << 30, "off")}


def make_case(kind: str, steps: int, batch: int, width: int, layers: int) -> Case:
    """A mean of squares of all states."""

    def loss(results: tuple[Tensor, Any]) -> Tensor:
        return results[0].square().mean()

    torch.manual_seed(0)
    layer = KINDS[kind](width, width, layers)
    return Case(layer, (torch.randn(steps, batch, width, requires_grad=True),), loss)


def compile_form(case: Case, form: str) -> Contender:
    """The case in one form, compiled anew."""
    start = time.perf_counter()
    least, kernels = FORMS[form]
    with mock.patch.object(recurrent, "LEAST_STEPS", least):
        step = retrograd.compile_backward(
            case.model, case.args, cache=False, verify=False, fallback="error", kernels=kernels
        )
    seconds = time.perf_counter() - start
    return Contender(form, step, seconds, lambda: step.explain().to_dict())


def measure(kind: str, case: Case, repeats: int) -> list[list[str]]:
    """The rows of a case: eager's, and one for each form."""
    forms = [form for form in FORMS if form != "library" or kind == "lstm"]
    contenders = [eager(case), *(compile_form(case, form) for form in forms)]
    for contender in contenders:
        for _ in range(WARM_UP_STEPS):
            run_step(case, contender.call)
    time_in_turn(case, contenders, repeats)
    rows = []
    whole = [statistics.median(map(sum, zip(c.forward, c.backward, strict=True))) for c in contenders]
    for contender, seconds in zip(contenders, whole, strict=True):
        peak = contender.report().get("peak_bytes_predicted")
        rows.append(
            [
                kind,
                str(len(case.args[0])),
                contender.engine,
                "-" if contender.compile_seconds is None else f"{contender.compile_seconds:.1f}",
                f"{1000 * statistics.median(contender.forward):.2f}",
                f"{1000 * statistics.median(contender.backward):.2f}",
                f"{seconds / whole[0]:.2f}",
                "-" if peak is None else f"{peak / 2**20:.1f}",
            ]
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--steps", nargs="+", type=int, default=[8, 16, 32, 64])
    for name, default in (("batch", 16), ("width", 256), ("layers", 2), ("repeats", 30), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    rows = []
    for kind in given.kinds:
        for steps in given.steps:
            case = make_case(kind, steps, given.batch, given.width, given.layers)
            new = measure(kind, case, given.repeats)
            rows += new
            print("\n".join(markdown_table(COLUMNS, 3, new)), flush=True)


if __name__ == "__main__":
    main()
