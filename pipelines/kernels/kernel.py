# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A kernel as data: which function of ``source`` it is, and what that is compiled for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from retrograd.contract.errors import RetrogradError

ELEMENTS = {"f32": "fp32", "bf16": "bf16", "f16": "fp16", "i64": "i64", "i32": "i32", "i1": "i8"}
"""Triton's names of the types of elements, by MLIR's."""


class KernelError(RetrogradError):
    """A kernel that cannot be compiled here; says why, and what to do about it."""


@dataclass(frozen=True)
class Kernel:
    """One kernel for all sizes of its class.

    ``pointers`` are its buffers, operands first, each with the type of its elements; the last ``results`` of them are
    what it gives, an operand that it updates in place among them. ``numbers`` are its 32-bit arguments.
    ``aligned`` are those of both that are multiples of 16 (addresses in bytes). ``constants`` are what the function is
    specialized to, ``None`` for a buffer that it does without. A workgroup has ``warps`` warps, which load ``stages``
    steps ahead. ``text`` is the source of a function that is in none of ``source``: it was written for one op.
    """

    label: str
    source: str
    function: str
    pointers: tuple[tuple[str, str], ...]
    numbers: tuple[str, ...]
    aligned: tuple[str, ...]
    constants: tuple[tuple[str, int | None], ...]
    warps: int
    stages: int
    text: str = ""
    results: int = 1

    def to_dict(self) -> dict[str, Any]:
        """JSON values, which the compiling program reads."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Kernel:
        """A kernel from JSON, which has lists for tuples."""
        return cls(**{name: _freeze(value) for name, value in fields.items()})

    @property
    def key(self) -> str:
        """Text that is the same for the same kernel."""
        return json.dumps(self.to_dict(), sort_keys=True)


def _freeze(value: object) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list | tuple) else value
