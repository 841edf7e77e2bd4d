# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Measures tiles on a CUDA device for a parent, whose own work on the device a kernel must not bring down.

JSON goes in and out. A line in is a list of `Work`, one for each choice of tiles, the first of which are taken unasked;
a line out is what :func:`measure` found.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict

import torch

from retrograd.contract.reading import read_plain
from retrograd.contract.trials import Work
from retrograd.pipelines.kernels.measuring import find_tolerance, measure
from retrograd.runtime.cuda.trials import Bench, Prepared, find_difference
from retrograd.runtime.programs.errors import ExecutionError


class DeviceTimer:
    """Times the works of one question on a device; as `Timer`."""

    def __init__(self, bench: Bench, works: Sequence[Work], stack: ExitStack) -> None:
        self._bench, self._works, self._stack = bench, works, stack
        self._inputs: list[torch.Tensor] = []
        self._prepared: dict[int, Prepared] = {}
        self._expected: list[torch.Tensor] = []
        self._tolerance = find_tolerance({b.element for b in works[0].inputs}, works[0].element)

    def find_fault(self, number: int) -> str | None:
        """As `Timer`; what the device does not take for its memory is out too."""
        try:
            if number == 0:
                return self._find_first_fault()
            prepared, found = self._prepare(number)
        except (ExecutionError, torch.cuda.OutOfMemoryError) as error:
            return str(error)
        if (difference := find_difference(found, self._expected)) > self._tolerance:
            return f"what it gives differs by {difference:.1e}"
        self._prepared[number] = prepared
        return None

    def _find_first_fault(self) -> str | None:
        """Of numbers of both signs logarithms and roots are none: then those that are not negative are taken."""
        for positive in (False, True):
            self._inputs = self._bench.make_inputs(self._works[0].inputs, positive=positive)
            self._prepared[0], self._expected = self._prepare(0)
            if all(bool(tensor.isfinite().all()) for tensor in self._expected):
                return None
        return "what it gives on random numbers is not finite"

    def _prepare(self, number: int) -> tuple[Prepared, list[torch.Tensor]]:
        prepared = self._stack.enter_context(self._bench.prepare(self._works[number], self._inputs))
        return prepared, prepared.results()

    def time(self, numbers: Sequence[int], rounds: int) -> list[list[float]]:
        """As `Timer`."""
        return self._bench.time([self._prepared[number] for number in numbers], rounds)


def main() -> int:
    """Answer one line after the other, until there are none."""
    bench = Bench(torch.device("cuda", int(sys.argv[1])))
    print(json.dumps(bench.name), flush=True)
    for line in sys.stdin:
        works = [read_plain(Work, fields, "work") for fields in json.loads(line)]
        with ExitStack() as stack:
            found = measure(len(works), DeviceTimer(bench, works, stack))
        print(json.dumps(asdict(found)), flush=True)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
