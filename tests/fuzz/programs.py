# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Random programs of tensor ops: what they are, as source text that can be read, run and pasted into a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from rounding import move
from torch import Tensor

LAYOUTS = ("contiguous", "transposed", "strided", "expanded", "offset")


@dataclass(frozen=True)
class Input:
    """An argument of a program: floating point, of a ``layout`` in memory; or ``indices``, int64 zeros and ones."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str = "contiguous"
    requires_grad: bool = False
    indices: bool = False

    def make(self, generator: torch.Generator, dtype: torch.dtype | None = None, device: str = "cpu") -> Tensor:
        """The tensor; the same values for the same generator, whatever ``dtype`` takes the place of its own."""
        if self.indices:
            return torch.randint(2, self.shape, generator=generator).to(device)
        own: torch.dtype = getattr(torch, self.dtype)
        # Through the program's own dtype, so that a reference of higher precision starts from the same numbers.
        values = torch.randn(self.shape, generator=generator, dtype=torch.float64).to(own).to(device, dtype or own)
        return self._lay_out(values).requires_grad_(self.requires_grad)

    def _lay_out(self, values: Tensor) -> Tensor:
        match self.layout:
            case "transposed":
                return values.transpose(0, -1).contiguous().transpose(0, -1)
            case "strided":
                return torch.stack((values, values + 1), dim=-1)[..., 0]
            case "expanded":
                return values[:1].clone().expand(self.shape)
            case "offset":
                return torch.cat((values[:1], values))[1:]
        return values


@dataclass(frozen=True)
class Program:
    """A function of tensors. ``outputs`` are what it returns; the loss is a sum over those of ``differentiated``.

    ``origin`` names the model whose graph it is a slice of, if it is.
    """

    inputs: tuple[Input, ...]
    statements: tuple[str, ...]
    outputs: tuple[str, ...]
    differentiated: tuple[bool, ...]
    seed: int
    partition: str = "min-cut"
    origin: str = ""

    def source(self) -> str:
        """The program as a Python function ``model``."""
        arguments = ", ".join(i.name for i in self.inputs)
        lines = [f"def model({arguments}):", *(f"    {s}" for s in self.statements)]
        return "\n".join([*lines, f"    return {', '.join(self.outputs)},"]) + "\n"

    def function(self, *, precise: bool = False) -> Callable[..., tuple[Tensor, ...]]:
        """The function itself; where it is to be ``precise``, it casts to no dtype below f64."""
        source = self.source()
        if precise:
            source = source.replace("torch.bfloat16", "torch.float64").replace("torch.float32", "torch.float64")
            # PyTorch's gradient of it has a sixth in f32, whatever the dtype.
            source = source.replace("F.hardsigmoid(", "hardsigmoid(")
        scope: dict[str, Any] = {"torch": torch, "F": F, "hardsigmoid": _hardsigmoid}
        exec(compile(source, "<fuzz>", "exec"), scope)
        function: Callable[..., tuple[Tensor, ...]] = scope["model"]
        return function

    def arguments(self, *, precise: bool = False, device: str = "cpu") -> list[Tensor]:
        """New arguments, the same each time, on ``device``."""
        generator = torch.Generator().manual_seed(self.seed)
        return [i.make(generator, torch.float64 if precise else None, device) for i in self.inputs]

    def shaken(self, times: int, device: str = "cpu") -> list[Tensor]:
        """Arguments, each number of them off by what rounding is, otherwise for each of ``times``."""
        generator, arguments = torch.Generator().manual_seed(self.seed + times), self.arguments()
        for argument in arguments:
            memory = argument.detach().as_strided((argument.untyped_storage().nbytes() // argument.itemsize,), (1,), 0)
            if memory.is_floating_point():
                memory.copy_(move(memory, generator))
        return [a.detach().to(device).requires_grad_(a.requires_grad) for a in arguments]

    def describe(self) -> str:
        """All that a report needs to run it again."""
        rows = "\n".join(f"# {i}" for i in self.inputs)
        options = f"differentiated={self.differentiated} seed={self.seed} partition={self.partition}"
        options += f" slice of {self.origin}" * bool(self.origin)
        return f"{rows}\n# {options}\n{self.source()}"


def _hardsigmoid(x: Tensor) -> Tensor:
    return (x + 3).clamp(0, 6) / 6


def turned(program: Program) -> Program:
    """The program of the same values, of which the first axis of each argument and result is the last one in memory:
    what holds for one holds for the other."""
    inputs, before = [], []
    for spec in program.inputs:
        if spec.indices or len(spec.shape) < 2 or spec.layout != "contiguous":
            inputs.append(spec)
            continue
        shape = (spec.shape[-1], *spec.shape[1:-1], spec.shape[0])
        inputs.append(replace(spec, shape=shape))
        before.append(f"{spec.name} = {spec.name}.transpose(0, -1)")
    after = [f"{name}_turned = {name}.transpose(0, -1) if {name}.dim() > 1 else {name} * 1" for name in program.outputs]
    outputs = tuple(f"{name}_turned" for name in program.outputs)
    return replace(program, inputs=tuple(inputs), statements=(*before, *program.statements, *after), outputs=outputs)


def without_statement(program: Program, index: int) -> Program:
    """The program less one statement; whether it still runs is another question."""
    statements = (*program.statements[:index], *program.statements[index + 1 :])
    return replace(program, statements=statements)


def with_outputs(program: Program, kept: Sequence[int]) -> Program:
    """The program with some of its outputs only."""
    outputs, used = zip(*((program.outputs[i], program.differentiated[i]) for i in kept), strict=True)
    return replace(program, outputs=outputs, differentiated=used)
