# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Describes what arguments that are indices have to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from retrograd.contract.reading import read_as, read_each, read_fields, read_integer, read_optional, read_typed

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

    @classmethod
    def from_dict(cls, data: Any, where: str) -> IndexBound:
        """Read the JSON form.

        Raises:
            ManifestError: a field is missing, unknown or of another type.
        """
        fields = read_fields(data, {"argument", "least", "most", "exempt", "slices"}, where)
        return cls(
            read_typed(fields, "argument", int, where),
            read_typed(fields, "least", int, where),
            read_typed(fields, "most", int, where),
            read_optional(fields, "exempt", int, where),
            read_each(fields, "slices", where, _read_slice),
        )


def _read_slice(data: Any, where: str) -> Slice:
    axis, start, end, step = (read_integer(number, where) for number in read_as(data, list, where))
    return axis, start, end, step
