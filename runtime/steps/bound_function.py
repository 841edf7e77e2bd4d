# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A function of a program, to be called many times."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from retrograd.contract.roles import INTO
from retrograd.contract.tensors import FunctionSpec
from retrograd.runtime.programs.executor import Argument, Program


class BoundFunction:
    """Calls a function of the program on tensors, and numbers for its sizes, in its order; the results are new tensors
    that torch allocated. What is the same at each call is looked up and checked at the first one.

    ``same_step`` is as for ``Program.invoke``: a backward finds on the device what its forward copied there.
    """

    __slots__ = ("_allocators", "_function", "_name", "_program", "_same_step")

    def __init__(self, program: Program, function: FunctionSpec, *, same_step: bool = False) -> None:
        self._program, self._function, self._same_step = program, function, same_step
        self._name = function.name + INTO
        self._allocators: Sequence[Callable[[], torch.Tensor]] | None = None

    def __call__(self, arguments: Sequence[Argument]) -> list[torch.Tensor]:
        """Call it.

        Raises:
            ExecutionError, OutOfDeviceMemory: as ``Program.invoke``.
        """
        if self._allocators is not None:
            results = [allocate() for allocate in self._allocators]
            short = self._program.short_calls.get(self._name)
            if short is not None and short(arguments, results):
                return results
        else:
            results = self._allocate(arguments)
        self._program.invoke_on_new(self._name, arguments, results, same_step=self._same_step)
        return results

    def _allocate(self, arguments: Sequence[Argument]) -> list[torch.Tensor]:
        """Results of the first call, or of one that decides on their sizes."""
        specs = self._function.results_at(arguments)
        results = self._program.allocate(specs)
        self._program.check_results(self._name, results)
        if not self._function.is_dynamic:
            self._allocators = self._program.make_allocators(specs)
        return results
