# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Describes what a captured program takes and gives, in the user's words.

A :class:`Signature` says how the arguments of a call map to the tensors of the captured graph and how the graph's
results map back to the values that the call returns. A manifest holds it as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from retrograd.contract.indices import IndexBound
from retrograd.contract.reading import (
    read_as,
    read_condition,
    read_each,
    read_fields,
    read_integer,
    read_optional,
    read_size,
    read_typed,
    to_json,
)
from retrograd.contract.sizes import Condition, DynamicSize, Size

_T = TypeVar("_T")

# What an output is: a fresh tensor, an argument itself, a view of an argument, of another output or of an intermediate
# tensor (a base), or what was a constant of the trace.
TENSOR = "tensor"
SAME_INPUT = "input"
VIEW_OF_INPUT = "view_of_input"
VIEW_OF_OUTPUT = "view_of_output"
VIEW_OF_BASE = "view_of_base"
CONSTANT = "constant"


@dataclass(frozen=True)
class TensorType:
    """Shape, dtype (torch's name without the prefix, such as ``float32``), strides in elements and device type of a
    tensor. Sizes that differ from call to call are expressions over their names."""

    shape: tuple[Size, ...]
    dtype: str
    stride: tuple[Size, ...]
    device: str
    requires_grad: bool

    @classmethod
    def from_dict(cls, data: Any, where: str) -> TensorType:
        """Read the JSON form.

        Raises:
            ManifestError: a field is missing, unknown or of another type.
        """
        found = read_fields(data, names_of(cls), where)
        return cls(
            read_each(found, "shape", where, read_size),
            read_typed(found, "dtype", str, where),
            read_each(found, "stride", where, read_size),
            read_typed(found, "device", str, where),
            read_typed(found, "requires_grad", bool, where),
        )


@dataclass(frozen=True)
class StateSpec:
    """A parameter or buffer: its qualified name in the module and its type."""

    name: str
    type: TensorType

    @classmethod
    def from_dict(cls, data: Any, where: str) -> StateSpec:
        """Read the JSON form; raises as for `TensorType`."""
        found = read_fields(data, names_of(cls), where)
        return cls(read_typed(found, "name", str, where), TensorType.from_dict(found["type"], f"{where}.type"))


@dataclass(frozen=True)
class Unwritten:
    """A constant that JSON cannot hold, as it was printed."""

    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class InputSpec:
    """A leaf of ``(args, kwargs)``: a tensor, or a constant that the captured graph was specialized on."""

    name: str
    type: TensorType | None
    constant: Any = None

    @classmethod
    def from_dict(cls, data: Any, where: str) -> InputSpec:
        """Read the JSON form; raises as for `TensorType`."""
        found = read_fields(data, names_of(cls), where)
        return cls(read_typed(found, "name", str, where), _read_type(found, where), _read_constant(found["constant"]))


@dataclass(frozen=True)
class OutputSpec:
    """A leaf of what the model returns.

    ``kind`` is ``tensor`` (a fresh tensor), ``input`` (argument ``base`` itself), ``view_of_input``, ``view_of_output``
    and ``view_of_base`` (a view of argument, tensor output or intermediate base number ``base``), or ``constant``.
    ``offset`` is the storage offset of a view, in elements, as a size.
    """

    name: str
    kind: str
    type: TensorType | None = None
    base: int | None = None
    offset: Size = 0
    constant: Any = None

    @classmethod
    def from_dict(cls, data: Any, where: str) -> OutputSpec:
        """Read the JSON form; raises as for `TensorType`."""
        found = read_fields(data, names_of(cls), where)
        return cls(
            read_typed(found, "name", str, where),
            read_typed(found, "kind", str, where),
            _read_type(found, where),
            read_optional(found, "base", int, where),
            read_size(found["offset"], f"{where}.offset"),
            _read_constant(found["constant"]),
        )


@dataclass(frozen=True)
class Signature:
    """Arguments and results of a captured program; tensors of the graph are params, then buffers, then tensor inputs.

    ``in_tree`` and ``out_tree`` are how arguments and results are put together, as torch writes it, or ``None`` for
    types that torch cannot write. ``mutated`` are the tensors that a step overwrites, by number, and ``partly_written``
    those of them of which it may overwrite a part. ``autocast`` is what ``torch.autocast`` was set to: a dtype for each
    type of device that it was on for. ``training`` is the mode of each module by its path. ``sizes`` differ from call
    to call; ``conditions`` on them were taken for granted by the trace. ``indices`` say which arguments are indices,
    and of what.
    """

    params: tuple[StateSpec, ...]
    buffers: tuple[StateSpec, ...]
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    in_tree: str | None = None
    out_tree: str | None = None
    mutated: tuple[int, ...] = ()
    autocast: Mapping[str, str] = field(default_factory=dict)
    training: Mapping[str, bool] = field(default_factory=dict)
    sizes: tuple[DynamicSize, ...] = ()
    conditions: tuple[Condition, ...] = ()
    partly_written: tuple[int, ...] = ()
    indices: tuple[IndexBound, ...] = ()

    @property
    def tensor_inputs(self) -> tuple[StateSpec, ...]:
        """The inputs that are tensors."""
        return tuple(StateSpec(i.name, i.type) for i in self.inputs if i.type is not None)

    @property
    def primals(self) -> tuple[StateSpec, ...]:
        """The tensors that the program takes, in its order."""
        return (*self.params, *self.buffers, *self.tensor_inputs)

    def to_dict(self) -> dict[str, Any]:
        """JSON form; constants that JSON cannot hold become their repr."""
        return {
            "params": [to_json(asdict(p)) for p in self.params],
            "buffers": [to_json(asdict(b)) for b in self.buffers],
            "inputs": [_leaf_dict(i) for i in self.inputs],
            "outputs": [_leaf_dict(o) for o in self.outputs],
            "in_tree": self.in_tree,
            "out_tree": self.out_tree,
            "mutated": list(self.mutated),
            "partly_written": list(self.partly_written),
            "autocast": dict(self.autocast),
            "training": dict(self.training),
            "sizes": [asdict(s) for s in self.sizes],
            "conditions": to_json(self.conditions),
            "indices": [to_json(asdict(i)) for i in self.indices],
        }

    @classmethod
    def from_dict(cls, data: Any, where: str = "signature") -> Signature:
        """Read what `to_dict` wrote.

        Raises:
            ManifestError: a field is missing, unknown or of another type.
        """
        found = read_fields(data, names_of(cls), where)
        return cls(
            params=read_each(found, "params", where, StateSpec.from_dict),
            buffers=read_each(found, "buffers", where, StateSpec.from_dict),
            inputs=read_each(found, "inputs", where, InputSpec.from_dict),
            outputs=read_each(found, "outputs", where, OutputSpec.from_dict),
            in_tree=read_optional(found, "in_tree", str, where),
            out_tree=read_optional(found, "out_tree", str, where),
            mutated=read_each(found, "mutated", where, read_integer),
            autocast=_read_named(found, "autocast", str, where),
            training=_read_named(found, "training", bool, where),
            sizes=read_each(found, "sizes", where, _read_dynamic_size),
            conditions=read_each(found, "conditions", where, read_condition),
            partly_written=read_each(found, "partly_written", where, read_integer),
            indices=read_each(found, "indices", where, IndexBound.from_dict),
        )


def names_of(cls: Any) -> frozenset[str]:
    """The names of a dataclass's fields."""
    return frozenset(f.name for f in fields(cls))


def _read_type(found: Mapping[str, Any], where: str) -> TensorType | None:
    return None if found["type"] is None else TensorType.from_dict(found["type"], f"{where}.type")


def _read_named(found: Mapping[str, Any], name: str, kind: type[_T], where: str) -> dict[str, _T]:
    values = read_typed(found, name, dict, where)
    return {key: read_as(value, kind, f"{where}.{name}.{key}") for key, value in values.items()}


def _read_dynamic_size(data: Any, where: str) -> DynamicSize:
    found = read_fields(data, names_of(DynamicSize), where)
    name, most = read_typed(found, "name", str, where), read_optional(found, "most", int, where)
    hint, least, argument, axis = (read_typed(found, key, int, where) for key in ("hint", "least", "argument", "axis"))
    return DynamicSize(name, hint, least, most, argument, axis)


def _leaf_dict(leaf: InputSpec | OutputSpec) -> dict[str, Any]:
    # Without the constant, of which asdict would take a deep copy.
    found = {f.name: getattr(leaf, f.name) for f in fields(leaf)}
    kind, constant = found["type"], found["constant"]
    # Of what was read from a file and JSON could not hold, the repr is the text.
    is_plain = isinstance(constant, (bool, int, float, str, type(None)))
    written = constant if is_plain else {"repr": repr(constant)}
    return {**to_json(found | {"type": None if kind is None else asdict(kind)}), "constant": written}


def _read_constant(data: Any) -> Any:
    return Unwritten(data["repr"]) if isinstance(data, dict) and set(data) == {"repr"} else data
