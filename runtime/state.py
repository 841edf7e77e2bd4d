# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where a compiled program finds the parameters and buffers of the model it was compiled from, at each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from retrograd.runtime.calling import ArgumentError


class ModelState:
    """Parameters and buffers by name, looked up anew at each call, so that one that was replaced is seen."""

    def __init__(self, names: Sequence[str], model: torch.nn.Module | Mapping[str, torch.Tensor] | None) -> None:
        self._names = tuple(names)
        self._model = model
        self._modules: list[tuple[torch.nn.Module, bool]] = []
        self._places: list[tuple[Mapping[str, torch.Tensor | None], str]] = []
        if isinstance(model, torch.nn.Module):
            self._modules = [(m, m.training) for m in model.modules()]
            self._places = [_place(model, name) for name in self._names]
        elif model is not None:
            missing = [name for name in self._names if name not in model]
            if missing:
                raise ArgumentError(f"no tensor for parameter or buffer {missing[0]!r} in the mapping given as model")
            self._places = [(model, name) for name in self._names]

    def tensors(self) -> list[torch.Tensor | None]:
        """The tensors as they are now, in the program's order.

        Raises:
            ArgumentError: no model was given, or it has been switched between train() and eval() since.
        """
        if len(self._places) != len(self._names):
            raise ArgumentError(f"the program has {len(self._names)} parameters and buffers: load it with model=..., or bind(model)")
        for module, training in self._modules:
            if module.training is not training:
                mode = "train" if training else "eval"
                raise ArgumentError(f"compiled in {mode} mode, and {type(module).__name__} no longer is; call .{mode}() or compile again")
        return [place.get(name) for place, name in self._places]


def _place(model: torch.nn.Module, qualified: str) -> tuple[Mapping[str, torch.Tensor | None], str]:
    path, _, name = qualified.rpartition(".")
    try:
        owner = model.get_submodule(path)
    except AttributeError as error:
        raise ArgumentError(f"the model has no parameter or buffer {qualified!r}, which the program was compiled for") from error
    for table in (owner._parameters, owner._buffers):
        if name in table:
            return table, name
    raise ArgumentError(f"the model has no parameter or buffer {qualified!r}, which the program was compiled for")
