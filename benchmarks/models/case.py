# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a model of the registry is: something to differentiate, in two sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Size = Literal["test", "bench"]
SIZES: tuple[Size, ...] = ("test", "bench")


@dataclass(frozen=True)
class Case:
    """Something to differentiate: ``loss(model(*args))`` is a scalar, float32, that requires grad."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    loss: Callable[[Any], Tensor]

    def leaves(self) -> dict[str, Tensor]:
        """What gets a gradient: parameters by qualified name, arguments as ``args[...]``."""
        parameters = dict(self.model.named_parameters()) if isinstance(self.model, nn.Module) else {}
        keyed, _ = pytree.tree_flatten_with_path(self.args)
        arguments = {f"args{pytree.keystr(path)}": leaf for path, leaf in keyed if isinstance(leaf, Tensor)}
        return {name: tensor for name, tensor in (parameters | arguments).items() if tensor.requires_grad}


@dataclass(frozen=True)
class Entry:
    """A model of the registry: ``build`` makes it from the ``sizes`` of one of the names in ``SIZES``.

    ``test`` compiles in seconds; ``bench`` is of a size that people train, as far as a CPU can show it.
    """

    name: str
    build: Callable[..., Case]
    sizes: Mapping[Size, Mapping[str, int]]

    def make(self, size: Size) -> Case:
        """The same case each time: same parameters, same arguments. The caller's random state stays as it is."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build(**self.sizes[size])


def identity(loss: Tensor) -> Tensor:
    """The loss of a model that gives its own."""
    return loss
