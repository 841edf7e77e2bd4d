# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Describes what a captured program takes and gives, in the user's words.

A :class:`Signature` says how the arguments of a call map to the tensors of the captured graph and how the graph's
results map back to the values that the call returns. A manifest holds it as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from retrograd.contract.indices import IndexBound
from retrograd.contract.reading import read_plain, to_json
from retrograd.contract.sizes import Condition, DynamicSize, Size

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


@dataclass(frozen=True)
class StateSpec:
    """A parameter or buffer: its qualified name in the module and its type."""

    name: str
    type: TensorType


@dataclass(frozen=True)
class Unwritten:
    """A constant that JSON cannot hold, as it was printed."""

    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class _Leaf:
    """Anything with a constant, of which JSON has the repr where it cannot hold it."""

    @classmethod
    def from_dict(cls, data: Any, where: str) -> Self:
        """Read what `to_dict` wrote; raises as for `Signature`."""
        found: Any = read_plain(cls, data, where)
        constant = found.constant
        is_text = isinstance(constant, dict) and set(constant) == {"repr"}
        leaf: Self = replace(found, constant=Unwritten(constant["repr"])) if is_text else found
        return leaf

    def to_dict(self) -> dict[str, Any]:
        """JSON form; a constant that was read from a file and is its repr stays that."""
        leaf: Any = self
        is_plain = isinstance(leaf.constant, (bool, int, float, str, type(None)))
        written = leaf.constant if is_plain else {"repr": repr(leaf.constant)}
        return {**to_json(replace(leaf, constant=None)), "constant": written}


@dataclass(frozen=True)
class InputSpec(_Leaf):
    """A leaf of ``(args, kwargs)``: a tensor, or a constant that the captured graph was specialized on."""

    name: str
    type: TensorType | None
    constant: Any = None


@dataclass(frozen=True)
class OutputSpec(_Leaf):
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


@dataclass(frozen=True)
class KeptSpec:
    """Describes an attribute ``name`` of the module at the path ``module``, a buffer if ``is_buffer``, that a call sets
    to a tree of outputs, ``tree`` as torch writes it. ``taken`` is the tree of the tensors that the program takes from
    it, the last of its buffers; ``None`` where it takes none, or where it is a buffer, which is one of those by itself.
    """

    module: str
    name: str
    is_buffer: bool
    tree: str
    taken: str | None = None

    @property
    def qualified(self) -> str:
        """The path of the module, and the name."""
        return f"{self.module}.{self.name}" if self.module else self.name


@dataclass(frozen=True)
class Signature:
    """Arguments and results of a captured program; tensors of the graph are params, then buffers, then tensor inputs.

    ``in_tree`` and ``out_tree`` are how arguments and results are put together, as torch writes it, or ``None`` for
    types that torch cannot write. ``mutated`` are the tensors that a step overwrites, by number, and ``partly_written``
    those of them of which it may overwrite a part. ``autocast`` is what ``torch.autocast`` was set to: a dtype for each
    type of device that it was on for. ``training`` is the mode of each module by its path. ``sizes`` differ from call
    to call; ``conditions`` on them were taken for granted by the trace. ``indices`` say which arguments are indices,
    and of what. ``kept`` are attributes that a call sets, to the last of the outputs, and
    ``requiring`` the arguments, by number among all tensors, that the model itself has require grad.
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
    kept: tuple[KeptSpec, ...] = ()
    requiring: tuple[int, ...] = ()

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
        leaves = {"inputs": [i.to_dict() for i in self.inputs], "outputs": [o.to_dict() for o in self.outputs]}
        return {**to_json(replace(self, inputs=(), outputs=())), **leaves}

    @classmethod
    def from_dict(cls, data: Any, where: str = "signature") -> Signature:
        """Read what `to_dict` wrote.

        Raises:
            ManifestError: a field is missing, unknown or of another type.
        """
        return read_plain(cls, data, where)
