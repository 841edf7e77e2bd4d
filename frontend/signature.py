# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a captured program takes and gives, in the user's words.

A :class:`Signature` says how the arguments of a call map to the tensors of the captured graph and how the graph's
results map back to the values the call returns. It is plain data: ``to_dict()`` is what an artifact's manifest keeps.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

from retrograd.dialects.sizes import Size
from retrograd.frontend.dynamic_shapes import SizeSpec
from retrograd.frontend.index_bounds import IndexBound
from retrograd.frontend.size_expressions import to_size


@dataclass(frozen=True)
class TensorType:
    """Shape, dtype (torch's name without the prefix, such as ``float32``), strides in elements and device type of a
    tensor. Sizes that differ from call to call are expressions over their names (``dialects.sizes``)."""

    shape: tuple[Size, ...]
    dtype: str
    stride: tuple[Size, ...]
    device: str
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, names: Mapping[sympy.Symbol, str] | None = None) -> TensorType:
        return cls(
            tuple(to_size(n, names or {}) for n in tensor.shape),
            dtype_name(tensor.dtype),
            tuple(to_size(n, names or {}) for n in tensor.stride()),
            tensor.device.type,
            tensor.requires_grad,
        )


@dataclass(frozen=True)
class StateSpec:
    """A parameter or buffer: its qualified name in the module and its type."""

    name: str
    type: TensorType


@dataclass(frozen=True)
class InputSpec:
    """A leaf of ``(args, kwargs)``: a tensor, or a constant that the captured graph was specialized on."""

    name: str
    type: TensorType | None
    constant: Any = None


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


@dataclass(frozen=True)
class Signature:
    """Arguments and results of a captured program; tensors of the graph are params, then buffers, then tensor inputs.

    ``mutated`` are those that a step overwrites, by number, and ``partly_written`` those of them of which it may
    overwrite a part. ``autocast`` is what ``torch.autocast`` was set to: a dtype for each type of device that it was on
    for. ``training`` is the mode of each module by its path. ``sizes`` differ from call to call; ``conditions`` on them
    were taken for granted by the trace. ``indices`` say which arguments are indices, and of what.
    """

    params: tuple[StateSpec, ...]
    buffers: tuple[StateSpec, ...]
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    mutated: tuple[int, ...]
    autocast: dict[str, str]
    training: dict[str, bool]
    sizes: tuple[SizeSpec, ...] = ()
    conditions: tuple[Any, ...] = ()
    partly_written: tuple[int, ...] = ()
    indices: tuple[IndexBound, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON form; trees of types that torch cannot serialize become ``None``, constants that JSON cannot hold their
        repr."""
        data = {
            "params": [dataclasses.asdict(p) for p in self.params],
            "buffers": [dataclasses.asdict(b) for b in self.buffers],
            "inputs": [_leaf_dict(i) for i in self.inputs],
            "outputs": [_leaf_dict(o) for o in self.outputs],
            "in_tree": _dump_tree(self.in_spec),
            "out_tree": _dump_tree(self.out_spec),
            "mutated": list(self.mutated),
            "partly_written": list(self.partly_written),
            "autocast": self.autocast,
            "training": self.training,
            "sizes": [dataclasses.asdict(s) for s in self.sizes],
            "conditions": list(self.conditions),
            "indices": [dataclasses.asdict(i) for i in self.indices],
        }
        plain: dict[str, Any] = json.loads(json.dumps(data))
        return plain


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``float32``."""
    return str(dtype).removeprefix("torch.")


def _leaf_dict(leaf: InputSpec | OutputSpec) -> dict[str, Any]:
    # Without the constant, of which asdict would take a deep copy.
    data = dataclasses.asdict(dataclasses.replace(leaf, constant=None))
    plain = isinstance(leaf.constant, (bool, int, float, str, type(None)))
    return data | {"constant": leaf.constant if plain else {"repr": repr(leaf.constant)}}


def _dump_tree(spec: pytree.TreeSpec) -> str | None:
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, ValueError, TypeError):
        return None
