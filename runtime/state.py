# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where a compiled program finds the parameters and buffers of the model it was compiled from, at each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized

import torch

from retrograd.runtime.calling import ArgumentError


class ModelState:
    """Parameters and buffers by name, looked up anew at each call, so that one that was replaced is seen.

    ``training`` is the mode that each module was compiled in, by its path. ``constants`` are tensors that the program
    holds copies of, as they were when this was made.
    """

    def __init__(
        self,
        names: Sequence[str],
        model: torch.nn.Module | Mapping[str, torch.Tensor] | None,
        training: Mapping[str, bool],
        constants: Sequence[torch.Tensor] = (),
    ) -> None:
        self._names = tuple(names)
        self._training = training
        # Inference tensors count no versions.
        self._constants = [(t, t._version) for t in constants if not t.is_inference()]
        self._attributes: list[tuple[Mapping[str, object], str, torch.Tensor]] = []
        self._hooks: list[Sized] = []
        self._modules: list[tuple[torch.nn.Module, bool]] = []
        self._children: list[tuple[Mapping[str, torch.nn.Module | None], str, torch.nn.Module | None]] = []
        self._places: list[tuple[Mapping[str, torch.Tensor | None], str]] = []
        if isinstance(model, torch.nn.Module):
            self._modules = [(m, training.get(path, m.training)) for path, m in model.named_modules()]
            self._hooks = [table for m in model.modules() for table in _hook_tables(m)]
            self._children = [(m._modules, name, child) for m in model.modules() for name, child in m._modules.items()]
            self._places = [_place(model, name) for name in self._names]
            self._attributes = _find_attributes(model, constants)
        elif model is not None:
            missing = [name for name in self._names if name not in model]
            if missing:
                raise ArgumentError(f"no tensor for parameter or buffer {missing[0]!r} in the mapping given as model")
            self._places = [(model, name) for name in self._names]
        self._hook_count = sum(map(len, self._hooks))

    def of(self, model: torch.nn.Module | Mapping[str, torch.Tensor]) -> ModelState:
        """The same, of another model.

        Raises:
            ArgumentError: a parameter or buffer is missing.
        """
        state = ModelState(self._names, model, self._training)
        state._constants = self._constants
        return state

    def tensors(self) -> list[torch.Tensor | None]:
        """The tensors as they are now, in the program's order.

        Raises:
            ArgumentError: no model was given, or it has changed in what the program was compiled for: its mode, its
                modules, their hooks, or a tensor that is part of the program.
        """
        if len(self._places) != len(self._names):
            raise ArgumentError(
                f"the program has {len(self._names)} parameters and buffers: load it with model=..., or bind(model)"
            )
        for siblings, name, child in self._children:
            if siblings.get(name) is not child:
                raise ArgumentError(f"the module {name!r}, a {type(child).__name__}, was replaced; compile again")
        for module, training in self._modules:
            if module.training is not training:
                mode = "train" if training else "eval"
                raise ArgumentError(
                    f"compiled in {mode} mode, and {type(module).__name__} no longer is; "
                    f"call .{mode}() or compile again"
                )
        if sum(map(len, self._hooks)) != self._hook_count:
            raise ArgumentError("hooks were added to the model's modules, or removed; compile again")
        for attributes, name, constant in self._attributes:
            if attributes.get(name) is not constant:
                raise ArgumentError(
                    f"the tensor {name!r}, an attribute that the model reads, was replaced; "
                    "register it as a buffer, or compile again"
                )
        for tensor, version in self._constants:
            if tensor._version != version:
                raise ArgumentError(
                    f"a tensor of shape {tuple(tensor.shape)} that the model reads, but that is neither parameter, "
                    "buffer nor argument, was written to; make it one of these, or compile again"
                )
        return [place.get(name) for place, name in self._places]


def _find_attributes(
    model: torch.nn.Module, constants: Sequence[torch.Tensor]
) -> list[tuple[Mapping[str, object], str, torch.Tensor]]:
    """Where modules hold tensors of ``constants`` as plain attributes."""
    known = {id(t) for t in constants}
    return [
        (vars(module), name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and id(value) in known
    ]


def _hook_tables(module: torch.nn.Module) -> tuple[Sized, ...]:
    return module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks


def _place(model: torch.nn.Module, qualified: str) -> tuple[Mapping[str, torch.Tensor | None], str]:
    path, _, name = qualified.rpartition(".")
    try:
        owner = model.get_submodule(path)
    except AttributeError as error:
        raise ArgumentError(
            f"the model has no parameter or buffer {qualified!r}, which the program was compiled for"
        ) from error
    for table in (owner._parameters, owner._buffers):
        if name in table:
            return table, name
    raise ArgumentError(f"the model has no parameter or buffer {qualified!r}, which the program was compiled for")
