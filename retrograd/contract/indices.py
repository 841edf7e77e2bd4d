# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Describes what arguments that are indices have to be."""

from __future__ import annotations

from dataclasses import dataclass

# An axis, a start, an end and a step.
Slice = tuple[int, int, int, int]


@dataclass(frozen=True)
class IndexBound:
    """The elements of argument number ``argument`` (of parameters, buffers and tensor inputs) are from ``least`` to
    ``most``, or ``exempt``; of those that ``slices`` leave, each of an axis, a start, an end and a step."""

    argument: int
    least: int
    most: int
    exempt: int | None = None
    slices: tuple[Slice, ...] = ()
