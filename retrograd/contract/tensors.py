# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Functions that can be called, and the tensors that they take and give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from retrograd.contract.reading import ManifestError, read_plain, to_json
from retrograd.contract.roles import ARGUMENT_ROLES, RESULT_ROLES, SIZE
from retrograd.contract.sizes import Size, evaluate_shape, is_fixed

DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8E4M3FN": "float8_e4m3fn",
    "f8E5M2": "float8_e5m2",
    "si64": "int64",
    "si32": "int32",
    "si16": "int16",
    "si8": "int8",
    "ui8": "uint8",
    "i1": "bool",
    # Compiled code reads and writes them as pairs, but for those of f16, which only islands take and give.
    "complex<f16>": "complex32",
    "complex<f32>": "complex64",
    "complex<f64>": "complex128",
}
"""torch's names of element types by MLIR's."""


@dataclass(frozen=True)
class TensorSpec:
    """One argument or result of a function: its name and role to the user, its shape and its dtype.

    ``shape`` is in elements; a size that differs from call to call is an expression over the arguments with the role
    ``size``, which are numbers and no tensors. ``dtype`` is torch's name without its prefix ("float32", "bool",
    "bfloat16", ...). Until a program is compiled, ``value`` names the captured value that this stands for, and
    ``example`` is the shape that was traced with; a manifest has neither.
    """

    name: str
    role: str
    shape: tuple[Size, ...]
    dtype: str
    value: str = ""
    example: tuple[int, ...] = ()

    def at(self, sizes: Mapping[str, int]) -> TensorSpec:
        """The same for a call with these sizes.

        Raises:
            KeyError: a size is missing.
        """
        return self if is_fixed(self.shape) else replace(self, shape=evaluate_shape(self.shape, sizes))

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of this tensor."""
        return {"name": self.name, "role": self.role, "shape": to_json(self.shape), "dtype": self.dtype}

    @classmethod
    def from_dict(cls, data: Any, where: str = "tensor") -> TensorSpec:
        """Read what `to_dict` wrote; `where` names the place in error messages.

        Raises:
            ManifestError: a field is missing, unknown or of another type.
        """
        return read_plain(cls, data, where, ("value", "example"))


@dataclass(frozen=True)
class FunctionSpec:
    """A function that can be called: its name, its tensors in calling order, and the bytes of scratch memory that a
    call allocates, which are 0 until it is compiled."""

    name: str
    arguments: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]
    transient_bytes: int = 0

    @cached_property
    def is_dynamic(self) -> bool:
        """Whether a shape differs from call to call."""
        return not all(is_fixed(tensor.shape) for tensor in (*self.arguments, *self.results))

    def results_at(self, arguments: Sequence[Any]) -> Sequence[TensorSpec]:
        """The results of a call with these arguments, whose sizes among them are numbers."""
        if not self.is_dynamic:
            return self.results
        sizes = {a.name: int(given) for a, given in zip(self.arguments, arguments, strict=True) if a.role == SIZE}
        return [result.at(sizes) for result in self.results]

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of this function."""
        return {
            "name": self.name,
            "arguments": [tensor.to_dict() for tensor in self.arguments],
            "results": [tensor.to_dict() for tensor in self.results],
            "transient_bytes": self.transient_bytes,
        }

    @classmethod
    def from_dict(cls, data: Any, where: str = "function") -> FunctionSpec:
        """Read what `to_dict` wrote; `where` names the place in error messages.

        Raises:
            ManifestError: a field is missing, unknown or of another type, or a role does not fit its side.
        """
        spec = read_plain(cls, data, where)
        _check_roles(spec.arguments, ARGUMENT_ROLES, f"{where}.arguments")
        _check_roles(spec.results, RESULT_ROLES, f"{where}.results")
        return spec


def _check_roles(tensors: tuple[TensorSpec, ...], allowed: Sequence[str], where: str) -> None:
    for index, tensor in enumerate(tensors):
        if tensor.role not in allowed:
            raise ManifestError(f"{where}[{index}].role is {tensor.role!r}; it must be one of {sorted(allowed)}")
