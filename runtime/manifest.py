# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What an artifact says of itself: its functions, their tensors, what made it.

Reading is strict. A manifest with a field too many, too few or of another type is refused by name, so that a program
never runs on a signature that was understood by half.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from retrograd.contract.errors import RetrogradError
from retrograd.contract.roles import ARGUMENT_ROLES, RESULT_ROLES, SIZE
from retrograd.runtime.sizes import Expression, evaluate_shape, find_problem, is_fixed

FORMAT_VERSION = 2
"""The only manifest format that this release writes and reads."""

VERSION_KEYS = frozenset({"retrograd", "torch", "torch-mlir", "iree-compiler"})

_T = TypeVar("_T")


class ManifestError(RetrogradError, ValueError):
    """A manifest that is not JSON, or whose fields are not the ones of this format."""


@dataclass(frozen=True)
class TensorSpec:
    """One argument or result of an exported function.

    `shape` is in elements; a size that differs from call to call is an expression over the arguments with the role
    `size` (see `runtime.sizes`), which are numbers and no tensors. `dtype` is torch's name without its prefix
    ("float32", "bool", "bfloat16", ...).
    """

    name: str
    role: str
    shape: tuple[Expression, ...]
    dtype: str

    def at(self, sizes: Mapping[str, int]) -> "TensorSpec":
        """The same for a call with these sizes.

        Raises:
            KeyError: a size is missing.
        """
        return self if is_fixed(self.shape) else replace(self, shape=evaluate_shape(self.shape, sizes))

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of this tensor."""
        return {"name": self.name, "role": self.role, "shape": _as_list(self.shape), "dtype": self.dtype}

    @classmethod
    def from_dict(cls, data: Any, where: str = "tensor") -> "TensorSpec":
        """Read what `to_dict` wrote; `where` names the place in error messages.

        Raises:
            ManifestError: a field is missing, unknown or of another type.
        """
        fields = _fields(data, {"name", "role", "shape", "dtype"}, where)
        return cls(
            name=_typed(fields, "name", str, where),
            role=_typed(fields, "role", str, where),
            shape=_each(fields, "shape", where, _as_size),
            dtype=_typed(fields, "dtype", str, where),
        )


@dataclass(frozen=True)
class FunctionSpec:
    """One exported function: its tensors in calling order and the bytes of scratch memory that a call allocates."""

    name: str
    arguments: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]
    transient_bytes: int

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
    def from_dict(cls, data: Any, where: str = "function") -> "FunctionSpec":
        """Read what `to_dict` wrote; `where` names the place in error messages.

        Raises:
            ManifestError: a field is missing, unknown or of another type, or a role does not fit its side.
        """
        fields = _fields(data, {"name", "arguments", "results", "transient_bytes"}, where)
        spec = cls(
            name=_typed(fields, "name", str, where),
            arguments=_each(fields, "arguments", where, TensorSpec.from_dict),
            results=_each(fields, "results", where, TensorSpec.from_dict),
            transient_bytes=_typed(fields, "transient_bytes", int, where),
        )
        _check_roles(spec.arguments, ARGUMENT_ROLES, f"{where}.arguments")
        _check_roles(spec.results, RESULT_ROLES, f"{where}.results")
        return spec


@dataclass(frozen=True)
class Manifest:
    """All that a loader must know before it gives an executable to IREE.

    `targets` are the devices compiled for, `partition` the policy that chose what is saved, `versions` the packages
    that made the executable (keys `VERSION_KEYS`). `signature` and `report` are JSON objects that this module carries
    and does not read.
    """

    format_version: int
    functions: tuple[FunctionSpec, ...]
    targets: tuple[str, ...]
    partition: str
    versions: dict[str, str]
    signature: dict[str, Any]
    report: dict[str, Any]

    def function(self, name: str) -> FunctionSpec:
        """The function exported as `name`.

        Raises:
            KeyError: there is none; the message lists those there are.
        """
        for spec in self.functions:
            if spec.name == name:
                return spec
        raise KeyError(f"no function {name!r} in the manifest; it has {[spec.name for spec in self.functions]}")

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of this manifest."""
        return {
            "format_version": self.format_version,
            "functions": [function.to_dict() for function in self.functions],
            "targets": list(self.targets),
            "partition": self.partition,
            "versions": dict(self.versions),
            "signature": self.signature,
            "report": self.report,
        }

    @classmethod
    def from_dict(cls, data: Any) -> "Manifest":
        """Read what `to_dict` wrote.

        Raises:
            ManifestError: the format version is another, or a field is missing, unknown or of another type.
        """
        where = "manifest"
        version = read_format_version(data)
        if version != FORMAT_VERSION:
            raise ManifestError(f"{where} has format_version {version}; this release reads {FORMAT_VERSION}")
        fields = _fields(
            data,
            {"format_version", "functions", "targets", "partition", "versions", "signature", "report"},
            where,
        )
        versions = _typed(fields, "versions", dict, where)
        _fields(versions, VERSION_KEYS, f"{where}.versions")
        return cls(
            format_version=version,
            functions=_each(fields, "functions", where, FunctionSpec.from_dict),
            targets=_each(fields, "targets", where, _as_text),
            partition=_typed(fields, "partition", str, where),
            versions={key: _typed(versions, key, str, f"{where}.versions") for key in sorted(versions)},
            signature=_typed(fields, "signature", dict, where),
            report=_typed(fields, "report", dict, where),
        )

    def to_json(self) -> bytes:
        """The manifest as UTF-8 JSON, the same bytes for the same content.

        Raises:
            ManifestError: `signature` or `report` holds something that JSON cannot carry unchanged.
        """
        try:
            text = json.dumps(self.to_dict(), sort_keys=True, indent=1, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ManifestError(f"the manifest cannot be written as JSON: {error}") from error
        # A tuple or an integer key would be written without complaint and come back as something else.
        if json.loads(text) != self.to_dict():
            raise ManifestError(
                "the manifest holds values that JSON changes; use lists, strings as keys, plain numbers"
            )
        return text.encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Manifest":
        """Read what `to_json` wrote.

        Raises:
            ManifestError: not JSON, or not a manifest of this format.
        """
        return cls.from_dict(parse_json(data))


def parse_json(data: bytes) -> Any:
    """The JSON value in `data`.

    Raises:
        ManifestError: it is not UTF-8 JSON.
    """
    try:
        return json.loads(data)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ManifestError(f"the manifest is not JSON: {error}") from error


def read_format_version(data: Any) -> int:
    """The format version of a parsed manifest, whatever its other fields are.

    Raises:
        ManifestError: `data` is no object, or its `format_version` is no integer.
    """
    if not isinstance(data, dict):
        raise ManifestError(f"manifest must be a JSON object, not {type(data).__name__}")
    if "format_version" not in data:
        raise ManifestError("manifest lacks the field 'format_version'")
    return _typed(data, "format_version", int, "manifest")


def _fields(data: Any, names: set[str] | frozenset[str], where: str) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise ManifestError(f"{where} must be a JSON object, not {type(data).__name__}")
    missing = sorted(names - data.keys())
    if missing:
        raise ManifestError(f"{where} lacks the field {missing[0]!r}")
    unknown = sorted(data.keys() - names)
    if unknown:
        raise ManifestError(f"{where} has the unknown field {unknown[0]!r}")
    return data


def _typed(fields: Mapping[str, Any], name: str, kind: type[_T], where: str) -> _T:
    value = fields[name]
    # bool is a subclass of int, and `true` is no size.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ManifestError(f"{where}.{name} must be {kind.__name__}, not {type(value).__name__}")
    return value


def _each(fields: Mapping[str, Any], name: str, where: str, read: Callable[[Any, str], _T]) -> tuple[_T, ...]:
    values = _typed(fields, name, list, where)
    return tuple(read(value, f"{where}.{name}[{index}]") for index, value in enumerate(values))


def _as_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ManifestError(f"{where} must be str, not {type(value).__name__}")
    return value


def _as_size(value: Any, where: str) -> Expression:
    problem = find_problem(value)
    if problem is not None:
        raise ManifestError(f"{where} must be a size: {problem}")
    return value if isinstance(value, (int, str)) else _as_tuple(value)


def _as_tuple(expression: Expression) -> Expression:
    return tuple(map(_as_tuple, expression)) if isinstance(expression, list) else expression


def _as_list(expression: Expression) -> Expression:
    return [_as_list(part) for part in expression] if isinstance(expression, tuple) else expression


def _check_roles(tensors: tuple[TensorSpec, ...], allowed: Collection[str], where: str) -> None:
    for index, tensor in enumerate(tensors):
        if tensor.role not in allowed:
            raise ManifestError(f"{where}[{index}].role is {tensor.role!r}; it must be one of {sorted(allowed)}")
