# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The user's arguments to tensors and back, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


class ArgumentError(TypeError):
    """An argument that the compiled program does not take; the message names it and what was expected."""


@dataclass(frozen=True)
class ExpectedTensor:
    """What an argument must be. ``requires_grad`` is what it was compiled with: a gradient that was not compiled is not given."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool

    @classmethod
    def from_dict(cls, name: str, data: Mapping[str, Any]) -> ExpectedTensor:
        """Read one tensor of a manifest's signature."""
        return cls(name, tuple(data["shape"]), getattr(torch, data["dtype"]), data["device"], bool(data["requires_grad"]))

    def check(self, value: Any) -> None:
        """Raise :class:`ArgumentError` where ``value`` is not such a tensor."""
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(f"{self.name}: expected a tensor ({self}), found {type(value).__name__}")
        if value.shape != self.shape or value.dtype != self.dtype or value.device.type != self.device:
            found = f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
            raise ArgumentError(f"{self.name}: expected {self}, found {found}; compile again for other shapes, dtypes or devices")
        if value.requires_grad and not self.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(
                f"{self.name}: requires grad now, but did not when compiled, so that its gradient would be missing; "
                "detach() it, or compile again"
            )
        if value.layout is not torch.strided:
            raise ArgumentError(f"{self.name}: expected a dense tensor, found layout {value.layout}")

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape} on {self.device}"


class CallingConvention:
    """How a call's arguments become the tensors of the program, and its results what the call returns.

    Built from a manifest's signature; ``constants`` and the two trees are taken from the live objects where these are at hand, so
    that types which no manifest can hold still work in the process that compiled.
    """

    def __init__(
        self,
        signature: Mapping[str, Any],
        *,
        in_spec: pytree.TreeSpec | None = None,
        out_spec: pytree.TreeSpec | None = None,
        constants: Sequence[Any] | None = None,
        out_constants: Sequence[Any] | None = None,
    ) -> None:
        self.inputs = [_leaf(i) for i in signature["inputs"]]
        self.outputs = signature["outputs"]
        self.state = [ExpectedTensor.from_dict(s["name"], s["type"]) for s in (*signature["params"], *signature["buffers"])]
        self._constants = list(constants) if constants is not None else [i["constant"] for i in signature["inputs"]]
        self._out_constants = list(out_constants) if out_constants is not None else [o["constant"] for o in self.outputs]
        self._in_spec = in_spec or _load_tree(signature["in_tree"])
        self._out_spec = out_spec or _load_tree(signature["out_tree"])

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors among the arguments, in order.

        Raises:
            ArgumentError: other arguments than the program was compiled for; names the first.
        """
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if self._in_spec is not None and spec != self._in_spec:
            leaves = self._reorder(args, kwargs)
        if len(leaves) != len(self.inputs):
            raise ArgumentError(f"expected {len(self.inputs)} values in the arguments ({self._names()}), found {len(leaves)}")
        tensors = []
        for leaf, expected, constant in zip(leaves, self.inputs, self._constants, strict=True):
            if isinstance(expected, ExpectedTensor):
                expected.check(leaf)
                tensors.append(leaf)
            elif type(leaf) is not type(constant) or not _equal(leaf, constant):
                raise ArgumentError(f"{expected}: compiled for the constant {constant!r}, found {leaf!r}; compile again for it")
        return tensors

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the model returns, from its tensor outputs in order."""
        given = iter(tensors)
        leaves = [c if o["kind"] == "constant" else next(given) for o, c in zip(self.outputs, self._out_constants, strict=True)]
        if self._out_spec is None:
            return tuple(leaves)
        return pytree.tree_unflatten(leaves, self._out_spec)

    def check_state(self, tensors: Sequence[Any]) -> None:
        """Raise :class:`ArgumentError` where a parameter or buffer is not what the program was compiled for."""
        for expected, tensor in zip(self.state, tensors, strict=True):
            expected.check(tensor)

    def _reorder(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves where only the order of keyword arguments differs; else an error that shows both structures."""
        assert self._in_spec is not None
        expected_args, expected_kwargs = pytree.tree_unflatten(list(range(self._in_spec.num_leaves)), self._in_spec)
        if set(kwargs) == set(expected_kwargs):
            leaves, spec = pytree.tree_flatten((tuple(args), {name: kwargs[name] for name in expected_kwargs}))
            if spec == self._in_spec:
                return leaves
        missing = [f"kwargs[{name!r}]" for name in expected_kwargs if name not in kwargs]
        extra = [f"kwargs[{name!r}]" for name in kwargs if name not in expected_kwargs]
        counts = f"expected {len(expected_args)} positional arguments, found {len(args)}; " if len(args) != len(expected_args) else ""
        details = "".join([f"missing {', '.join(missing)}; " if missing else "", f"unexpected {', '.join(extra)}; " if extra else ""])
        raise ArgumentError(f"arguments differ in structure from those compiled for: {counts}{details}expected {self._names()}")

    def _names(self) -> str:
        return ", ".join(i.name if isinstance(i, ExpectedTensor) else i for i in self.inputs)


def _leaf(data: Mapping[str, Any]) -> ExpectedTensor | str:
    return str(data["name"]) if data["type"] is None else ExpectedTensor.from_dict(data["name"], data["type"])


def _equal(found: Any, constant: Any) -> bool:
    same = found == constant or (found != found and constant != constant)
    return same if isinstance(same, bool) else found is constant


def _load_tree(text: str | None) -> pytree.TreeSpec | None:
    return None if text is None else pytree.treespec_loads(text)
