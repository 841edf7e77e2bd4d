# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A function of a program, to be called many times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import getrefcount

import torch

from retrograd.contract.roles import INTO
from retrograd.contract.tensors import FunctionSpec
from retrograd.runtime.executor import Argument, Program


class BoundFunction:
    """Calls a function of the program on tensors, and numbers for its sizes, in its order; the results are new tensors
    that torch allocated. What is the same at each call is looked up and checked at the first one.

    ``same_step`` is as for ``Program.invoke``: a backward finds on the device what its forward copied there.

    What the function overwrites it is given if nobody else has it, and else a copy: ``held`` are the lists and tuples
    of the caller's that have an argument, that of the call included.
    """

    __slots__ = ("_allocators", "_function", "_held", "_name", "_overwritten", "_program", "_same_step")

    def __init__(self, program: Program, function: FunctionSpec, *, same_step: bool = False, held: int = 1) -> None:
        self._program, self._function, self._same_step = program, function, same_step
        self._name = function.name + INTO
        self._overwritten, self._held = program.overwritten.get(self._name, ()), held
        self._allocators: Sequence[Callable[[], torch.Tensor]] | None = None

    def __call__(self, arguments: Sequence[Argument]) -> list[torch.Tensor]:
        """Call it.

        Raises:
            ExecutionError, OutOfDeviceMemory: as ``Program.invoke``.
        """
        if self._overwritten:
            arguments = self._give_up(arguments)
        if self._allocators is not None:
            results = [allocate() for allocate in self._allocators]
            short = self._program.short_calls.get(self._name)
            if short is not None and short(arguments, results):
                return results
        else:
            results = self._allocate(arguments)
        self._program.invoke_on_new(self._name, arguments, results, same_step=self._same_step)
        return results

    def _give_up(self, arguments: Sequence[Argument]) -> Sequence[Argument]:
        """The arguments, with copies of those that are overwritten and that somebody else has. So they are at the first
        call, in which it may turn out that IREE has to be called once more."""
        is_first = self._allocators is None
        copied = [n for n in self._overwritten if is_first or _has_others(arguments, n, self._held)]
        if not copied:
            return arguments
        given = list(arguments)
        for number in copied:
            tensor = given[number]
            if isinstance(tensor, torch.Tensor):
                given[number] = tensor.clone()
        return given

    def _allocate(self, arguments: Sequence[Argument]) -> list[torch.Tensor]:
        """Results of the first call, or of one that decides on their sizes."""
        specs = self._function.results_at(arguments)
        results = self._program.allocate(specs)
        self._program.check_results(self._name, results)
        if not self._function.is_dynamic:
            self._allocators = self._program.make_allocators(specs)
        return results


def _has_others(arguments: Sequence[Argument], number: int, held: int) -> bool:
    """Whether somebody has an argument's memory besides ``held`` lists: as that tensor, in Python or in autograd, or as
    another one."""
    # As the argument of the question, too.
    if getrefcount(arguments[number]) > held + 1:
        return True
    tensor = arguments[number]
    if not isinstance(tensor, torch.Tensor) or tensor._use_count() != 1:  # type: ignore[attr-defined]
        return True
    storage = tensor.untyped_storage()
    # In the tensor and in Python's object, which the storage has, and this function.
    return torch._C._storage_Use_Count(storage._cdata) != 2 or getrefcount(storage) > 3
