# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Steps of a program: in eager, in float64, with other rounding, and through what was compiled."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from corpus_case import Sample, generator
from judge import Run
from rounding import Rounded
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

Call = Callable[..., Any]


class StepTime(NamedTuple):
    """The seconds that a step takes: its forward with the loss, and its backward."""

    forward: float
    backward: float


class Widened(TorchDispatchMode):
    """Computes in float64 what a model asks to be computed in float32, as many do of their norms."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        widen = lambda value: torch.float64 if value is torch.float32 else value  # noqa: E731
        return func(*tree_map(widen, args), **tree_map(widen, kwargs or {}))


@contextmanager
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Widened():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(before)


class Steps:
    """Steps of a sample from the same parameters and buffers each time, at turns of other inputs.

    From one turn to the next parameters change too, as an optimizer would change them.
    """

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self._state = _state(sample.model)
        # On the CPU: some of PyTorch's kernels for a GPU are wrong in any precision.
        self._double = _without_grouped_products(copy.deepcopy(sample.model).cpu().double())
        self._double_state = _state(self._double)

    def run(self, call: Call, turn: int, around: Callable[[Callable[[], None]], None] = lambda step: step()) -> Run:
        """What a step through ``call`` gives; ``around`` runs the step."""
        model = self.sample.model
        self._set(model, self._state, turn)
        loss: list[Tensor] = []

        def step() -> None:
            loss.append(self.sample.loss(call(**self.sample.inputs(turn))))
            loss[0].backward()

        around(step)
        return _values(model, loss[0])

    def eager(self, turn: int) -> Run:
        """In eager."""
        return self.run(self.sample.model, turn)

    def precise(self, turn: int) -> Run:
        """In float64."""
        self._set(self._double, self._double_state, turn)
        # Not inside, where random numbers would be others.
        inputs = tree_map(_widen, self.sample.inputs(turn))
        with _double():
            loss = self.sample.loss(self._double(**inputs))
            loss.backward()
        return _values(self._double, loss)

    def shaken(self, turn: int, seed: int) -> Run:
        """In eager, with every op rounded another way."""

        def around(step: Callable[[], None]) -> None:
            with Rounded(seed):
                step()

        return self.run(self.sample.model, turn, around)

    def time(self, call: Call) -> StepTime:
        """The seconds that a step takes from gradients that there are not yet."""
        inputs = self.sample.inputs(0)
        self.sample.model.zero_grad()
        start = _time_when_idle()
        loss = self.sample.loss(call(**inputs))
        between = _time_when_idle()
        loss.backward()
        return StepTime(between - start, _time_when_idle() - between)

    def reset(self) -> None:
        """Parameters and buffers as they were."""
        self._set(self.sample.model, self._state, 0)

    @staticmethod
    def _set(model: nn.Module, state: Mapping[str, Tensor], turn: int) -> None:
        moved = generator(turn)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, tensor in _tensors(model).items():
                tensor.copy_(state[name])
                if turn and name in parameters and tensor.is_floating_point():
                    noise = torch.randn(tensor.shape, generator=moved, dtype=torch.float32).to(tensor.device)
                    tensor.add_(0.02 * turn * noise * (tensor.square().mean().sqrt() + 1e-3))
        model.zero_grad()


def _without_grouped_products(model: nn.Module) -> nn.Module:
    """A model whose experts, if it has any, are multiplied one by one: PyTorch has no grouped products in float64."""
    for module in model.modules():
        if hasattr(module, "config") and hasattr(module.config, "_experts_implementation"):
            module.config._experts_implementation = "eager"
    return model


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _time_when_idle() -> float:
    """The time in seconds when what was queued on a GPU in use, if there is one, has ended."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in _tensors(model).items()}


def _values(model: nn.Module, loss: Tensor) -> Run:
    values: dict[str, Tensor | None] = {"loss": _copy(loss)}
    values |= {f"buffer {name}": _copy(b) for name, b in model.named_buffers()}
    for name, parameter in model.named_parameters():
        values[f"gradient of {name}"] = None if parameter.grad is None else _copy(parameter.grad)
    return Run(values)


def _copy(tensor: Tensor) -> Tensor:
    """On the CPU."""
    return tensor.detach().to("cpu", copy=True)


def _widen(value: Any) -> Any:
    """On the CPU, and in float64 if it is a tensor of floating-point numbers."""
    if not isinstance(value, Tensor):
        return value
    return value.cpu().double() if value.is_floating_point() else value.cpu()
