# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A function of a program, to be called many times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from retrograd.contract.roles import INTO
from retrograd.contract.tensors import FunctionSpec
from retrograd.runtime.programs.arenas import Arena, ResultArena, result_arenas, take_joined
from retrograd.runtime.programs.copied_call import CopiedCall
from retrograd.runtime.programs.executor import Argument, Program
from retrograd.runtime.programs.placed import Placed, copy_out, place_results
from retrograd.runtime.programs.tensors import give_up


class BoundFunction:
    """Calls a function of the program on tensors, and numbers for its sizes, in its order; the results are new tensors
    that torch allocated. What is the same at each call is looked up and checked at the first one.

    ``same_step`` is as for ``Program.invoke``: a backward finds on the device what its forward copied there.

    A function that writes over some of its arguments gets copies of those that anybody else refers to. A list of
    arguments is empty after that. What the function ``after``, of the same program, takes one behind another lies so.
    """

    __slots__ = (
        "_after",
        "_allocators",
        "_arenas",
        "_donated",
        "_fresh",
        "_function",
        "_joined",
        "_name",
        "_placed",
        "_program",
        "_same_step",
    )

    def __init__(
        self, program: Program, function: FunctionSpec, *, same_step: bool = False, after: FunctionSpec | None = None
    ) -> None:
        self._program, self._function, self._same_step = program, function, same_step
        self._name = function.name + INTO
        self._allocators: Sequence[Callable[[], torch.Tensor]] | None = None
        # The same, where no result lies in an argument.
        self._fresh: Sequence[Callable[[], torch.Tensor]] = ()
        self._donated: tuple[int, ...] = ()
        self._arenas: tuple[Arena, ...] = ()
        self._placed: tuple[Placed, ...] = ()
        self._after = after
        self._joined: Sequence[ResultArena] = ()

    def __call__(self, arguments: Sequence[Argument]) -> list[torch.Tensor]:
        """Call it.

        Raises:
            ExecutionError, OutOfDeviceMemory: as ``Program.invoke``.
        """
        if self._allocators is None:
            results = self._allocate(arguments)
        elif self._donated and (given := self._call_on_copies(arguments)) is not None:
            return given
        else:
            results = [allocate() for allocate in self._allocators]
        for arena in self._joined:
            arena.allocate(results)
        if not self._donated and not self._arenas:
            return self._invoke(arguments, results)
        owned = arguments if isinstance(arguments, list) else [*arguments]
        give_up(owned, self._donated)
        take_joined(owned, self._arenas)
        own = [*results]
        place_results(self._placed, owned, results)
        try:
            results = self._invoke(owned, results)
        finally:
            # Nobody is to read what is written over.
            owned.clear()
        copy_out(self._placed, own, self._fresh, results)
        return results

    def short_call(self) -> ShortCall | None:
        """How it is called on copies of small tensors; None where it is not called so, or not yet."""
        short = self._program.short_calls.get(self._name)
        if self._allocators is None or not isinstance(short, CopiedCall):
            return None
        return ShortCall(self._program, self._name, short, self._fresh)

    @property
    def may_be_short(self) -> bool:
        """Whether it is not known yet whether it is called so."""
        return self._name not in self._program.short_calls and not self._function.is_dynamic

    def _call_on_copies(self, arguments: Sequence[Argument]) -> list[torch.Tensor] | None:
        """The results of a function that writes over arguments, called on copies of small ones, wherever that is how it
        is called; else None, and nothing has run."""
        short = self._program.short_calls.get(self._name)
        if not isinstance(short, CopiedCall):
            return None
        results = [allocate() for allocate in self._fresh]
        if not short(arguments, results):
            return None
        if isinstance(arguments, list):
            arguments.clear()
        return results

    def _invoke(self, arguments: Sequence[Argument], results: list[torch.Tensor]) -> list[torch.Tensor]:
        short = self._program.short_calls.get(self._name) if self._allocators is not None else None
        if short is None or not short(arguments, results):
            self._program.invoke_on_new(self._name, arguments, results, same_step=self._same_step)
        return results

    def _allocate(self, arguments: Sequence[Argument]) -> list[torch.Tensor]:
        """Results of the first call, or of one that decides on their sizes."""
        specs = self._function.results_at(arguments)
        results = self._program.allocate(specs)
        self._program.check_results(self._name, results)
        self._donated, self._placed = self._program.donated(self._name)
        self._arenas = self._program.arenas(self._name)
        if self._after is not None:
            taken = self._program.arenas(self._after.name + INTO)
            self._joined = result_arenas(taken, self._function, self._after)
        if not self._function.is_dynamic:
            allocators = self._program.make_allocators(specs)
            self._fresh = [*allocators]
            for placed in self._placed:
                allocators[placed.result] = _form_of(results[placed.result])
            for place in (place for arena in self._joined for place in arena.members):
                allocators[place] = _form_of(results[place])
            self._allocators = allocators
        return results


class ShortCall:
    """A function that is called on copies of small tensors."""

    __slots__ = ("_allocators", "_name", "_program", "_short")

    def __init__(
        self, program: Program, name: str, short: CopiedCall, allocators: Sequence[Callable[[], torch.Tensor]]
    ) -> None:
        self._program, self._name, self._short, self._allocators = program, name, short, allocators

    def takes(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether arguments are of the form that it is called with so."""
        return self._short.takes(arguments)

    def __call__(self, addresses: Sequence[int]) -> list[torch.Tensor] | None:
        """The results for arguments of that form that begin at these addresses; None where it is to be called as any
        function is, and nothing has run."""
        if self._program.short_calls.get(self._name) is not self._short:
            return None
        results = [allocate() for allocate in self._allocators]
        return results if self._short.call_at(addresses, results) else None


def _form_of(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Makes a function that gives the form of a tensor alone."""
    return partial(_same, tensor.to("meta"))


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
