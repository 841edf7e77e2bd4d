# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Describes, as plain data, kernels to be run by themselves on a CUDA device: to be timed, or looked at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Buffer:
    """A buffer of elements, MLIR's name of them; integers are from zero to less than ``below``."""

    element: str
    shape: tuple[int, ...]
    below: int = 2


@dataclass(frozen=True)
class CompiledKernel:
    """PTX whose arguments are as IREE passes them: buffers, those of scratch memory last among them, then numbers.

    ``shared`` is the shared memory of a workgroup and ``scratch`` its own part of a scratch buffer, in bytes; the
    kernel takes no such buffer where that is 0.
    """

    ptx: str
    threads: int
    shared: int
    scratch: int


@dataclass(frozen=True)
class Call:
    """A launch of a kernel: its code and its name there, the grid, the numbers of its buffers, and its own numbers,
    which have 32 bits."""

    code: CompiledKernel
    entry: str
    grid: tuple[int, int, int]
    buffers: tuple[int, ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Ending:
    """The computation that follows the kernels, on the last buffer: its sum over the first axis, to which the buffer
    ``bias`` is added, rounded to ``element``."""

    element: str
    bias: int | None = None


@dataclass(frozen=True)
class Work:
    """Calls one after the other: buffers are ``inputs``, and behind them those that calls give, the last of which are
    results of the whole. ``updated`` is the input that they write to, if they do."""

    inputs: tuple[Buffer, ...]
    given: tuple[Buffer, ...]
    calls: tuple[Call, ...]
    results: tuple[int, ...]
    updated: int | None = None
    ending: Ending | None = None

    @property
    def element(self) -> str:
        """The type of its results' elements, the first of several."""
        buffers = (*self.inputs, *self.given)
        return self.ending.element if self.ending else buffers[self.results[0]].element
