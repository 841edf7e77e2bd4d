# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a program of the corpus is: a model as its library or its user writes it, inputs, and a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

SEED = 0


@dataclass(frozen=True)
class Sample:
    """A model with its parameters, what it is called with, and the loss of what it gives.

    ``inputs(turn)`` are the arguments by name: of the same shapes at every turn, with other numbers. ``random`` says
    that the model draws random numbers, so that no two steps are alike.
    """

    model: nn.Module
    inputs: Callable[[int], dict[str, Any]]
    loss: Callable[[Any], Tensor]
    random: bool = False


@dataclass(frozen=True)
class Program:
    """A program of the corpus; ``build`` makes it, and ``family`` is the package that it is written with."""

    name: str
    family: str
    build: Callable[[], Sample] = field(repr=False)

    def make(self) -> Sample:
        """The same sample each time: same parameters, same inputs. The caller's random state stays as it is."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return self.build()


def on_device(program: Program, device: str) -> Program:
    """The program with its parameters and arguments on a device. The loss is computed on the CPU, where its labels
    are."""

    def build() -> Sample:
        sample = program.build()

        def inputs(turn: int) -> dict[str, Any]:
            given: dict[str, Any] = tree_map(partial(_move, device=device), sample.inputs(turn))
            return given

        def loss(output: Any) -> Tensor:
            return sample.loss(tree_map(partial(_move, device="cpu"), output))

        return replace(sample, model=sample.model.to(device), inputs=inputs, loss=loss)

    return replace(program, build=build)


def _move(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def with_one_layer(program: Program) -> Program:
    """The program with the first of layers that follow one another and are alike: half of the kernels to compile."""

    def build() -> Sample:
        sample = program.build()
        for module in [*sample.model.modules()]:
            for name, layers in [*module.named_children()]:
                if isinstance(layers, nn.ModuleList | nn.Sequential) and len({*map(_describe, layers)}) == 1:
                    setattr(module, name, layers[:1])
        return sample

    return replace(program, build=build)


def _describe(layer: nn.Module) -> tuple[Any, ...]:
    """The classes of a layer and of its parts, and the shapes of its parameters."""
    return (*map(type, layer.modules()), *(p.shape for p in layer.parameters()))


def generator(turn: int) -> torch.Generator:
    """Random numbers for the inputs of a turn."""
    return torch.Generator().manual_seed(1000 + turn)


def loss_of(output: Any) -> Tensor:
    """What a model that was given labels calls its loss."""
    loss = output["loss"] if isinstance(output, Mapping) else output.loss
    if not isinstance(loss, Tensor):
        raise TypeError(f"the loss is {loss!r}")
    return loss


def mean_square(output: Any) -> Tensor:
    """A loss of a model that has none: of its first tensor of floating-point numbers, each term with a weight of its
    own, so that nothing cancels."""
    tensor = first_tensor(output)
    weights = torch.linspace(0.5, 1.5, tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
    return (tensor * weights).square().mean() + (tensor * weights).mean()


def first_tensor(output: Any) -> Tensor:
    """The first tensor of floating-point numbers of an output."""
    values = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else [output]
    )
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise TypeError(f"no tensor in an output of type {type(output).__name__}")


def cross_entropy(labels: Tensor) -> Callable[[Any], Tensor]:
    """The loss of a classifier."""
    return lambda output: nn.functional.cross_entropy(first_tensor(output), labels)
