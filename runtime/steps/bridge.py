# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Autograd over a loaded artifact: forward and backward of the file as one differentiable function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from retrograd.contract.manifest import Manifest
from retrograd.contract.roles import (
    BACKWARD,
    BASE,
    FORWARD,
    GRAD,
    MUTATION,
    OUTPUT,
    SAVED,
    SEED,
    SIZE,
    TANGENT,
    has_role,
    name_in_role,
    name_without_role,
)
from retrograd.contract.seeds import BEHIND_MOST, LEAST, WORDS
from retrograd.contract.signature import (
    CONSTANT,
    SAME_INPUT,
    TENSOR,
    VIEW_OF_BASE,
    VIEW_OF_INPUT,
    VIEW_OF_OUTPUT,
    OutputSpec,
    TensorType,
)
from retrograd.contract.sizes import evaluate_shape, evaluate_size
from retrograd.contract.tensors import FunctionSpec
from retrograd.runtime.arguments.repeated_memory import write
from retrograd.runtime.artifact import ArtifactError
from retrograd.runtime.programs.errors import ExecutionError
from retrograd.runtime.programs.executor import Argument, Program
from retrograd.runtime.steps.bound_function import BoundFunction


def run_function(
    program: Program, function: FunctionSpec, arguments: Sequence[Argument], *, same_step: bool = False
) -> list[torch.Tensor]:
    """Call a function of the program on tensors, and numbers for its sizes, in its order; the results are new tensors
    that torch allocates.

    ``same_step`` is as for ``Program.invoke``: a backward finds on the device what its forward copied there.
    """
    return BoundFunction(program, function, same_step=same_step)(arguments)


def draw_seed() -> torch.Tensor:
    """A seed for the random ops of one step, int64 of shape (2,), from torch's default generator. Drawn as the process
    that compiled does, so that after the same ``torch.manual_seed`` both have the same numbers."""
    return torch.randint(LEAST, BEHIND_MOST, (WORDS,), dtype=torch.int64, device="cpu")


class Bridge:
    """Runs a loaded artifact from the primals (params, buffers, tensor inputs, in the order of its signature).

    Raises:
        ArtifactError: the model writes to an argument that requires grad, which only the process that compiled it can
            run.
    """

    def __init__(self, program: Program, manifest: Manifest) -> None:
        self.program = program
        self.forward = manifest.function(FORWARD)
        self.backward = manifest.function(BACKWARD)
        signature = manifest.signature
        primals = signature.primals
        self.names = [p.name for p in primals]
        self.outputs = [(o, o.type) for o in signature.outputs if o.kind != CONSTANT and o.type is not None]
        # Results of the forward that leave the step, by keys; a mutation's differs from its argument's name.
        self.given = [r for r in self.forward.results if r.role != SAVED]
        self.keys = [name_in_role(MUTATION, r.name) if r.role == MUTATION else r.name for r in self.given]
        self.mutated = {i: name_in_role(MUTATION, self.names[i]) for i in signature.mutated}
        if any(primals[i].type.requires_grad for i in signature.mutated):
            raise ArtifactError(
                "the model writes to an argument that requires grad: compile it in this process instead of loading it"
            )
        self.sizes = signature.sizes
        self.first_input = len(signature.params) + len(signature.buffers)
        self.requires_grad = {o.name: type_.requires_grad for o, type_ in self.outputs}

    def __call__(self, primals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The model's tensor outputs, in order."""
        given = _Step.apply(self, *primals)  # type: ignore[no-untyped-call]
        results = dict(zip(self.keys, given, strict=True))
        with torch.no_grad():
            for i, key in self.mutated.items():
                write(primals[i], results[key])
        sizes = self.read_sizes(primals)
        return [self._output(spec, type_, primals, results, sizes) for spec, type_ in self.outputs]

    def read_sizes(self, primals: Sequence[torch.Tensor]) -> dict[str, int]:
        """The sizes that differ from call to call, by name."""
        return {s.name: primals[self.first_input + s.argument].shape[s.axis] for s in self.sizes}

    def _output(
        self,
        spec: OutputSpec,
        type_: TensorType,
        primals: Sequence[torch.Tensor],
        results: dict[str, torch.Tensor],
        sizes: dict[str, int],
    ) -> torch.Tensor:
        if spec.kind == TENSOR:
            return _restride(results[spec.name], evaluate_shape(type_.stride, sizes))
        assert spec.base is not None
        if spec.kind == SAME_INPUT:
            return primals[spec.base]
        sources: dict[str, Sequence[torch.Tensor]] = {
            VIEW_OF_INPUT: primals,
            VIEW_OF_OUTPUT: [results[o.name] for o, _ in self.outputs] if spec.kind == VIEW_OF_OUTPUT else [],
            VIEW_OF_BASE: [t for name, t in results.items() if has_role(BASE, name)],
        }
        base = sources[spec.kind][spec.base]
        base = base if type_.requires_grad else base.detach()
        shape, stride = (evaluate_shape(numbers, sizes) for numbers in (type_.shape, type_.stride))
        return base.as_strided(shape, stride, evaluate_size(spec.offset, sizes))


class _Step(torch.autograd.Function):
    """One step of the program. Gradients of gradients are refused: the file holds no second backward."""

    @staticmethod
    def forward(ctx: Any, bridge: Bridge, *primals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = bridge.read_sizes(primals)
        by_name: dict[str, Argument] = {**dict(zip(bridge.names, primals, strict=True)), **sizes}
        place = bridge.program.torch_device
        by_name |= {a.name: draw_seed().to(place) for a in bridge.forward.arguments if a.role == SEED}
        results = run_function(bridge.program, bridge.forward, [by_name[a.name] for a in bridge.forward.arguments])
        saved = {r.name: t for r, t in zip(bridge.forward.results, results, strict=True) if r.role != MUTATION}
        kept = [a.name for a in bridge.backward.arguments if a.role not in (TANGENT, SIZE)]
        ctx.save_for_backward(*[saved[name] if name in saved else by_name[name] for name in kept])
        ctx.kept, ctx.bridge, ctx.sizes = kept, bridge, sizes
        given = [(r, t) for r, t in zip(bridge.forward.results, results, strict=True) if r.role != SAVED]
        ctx.given = [r.name for r, _ in given]
        ctx.mark_non_differentiable(*[t for r, t in given if not _is_differentiable(r, bridge)])
        return tuple(t for _, t in given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        names = [*ctx.kept, *[name_in_role(TANGENT, name) for name in ctx.given]]
        return (None, *_Gradients.apply(ctx.bridge, names, ctx.sizes, *ctx.saved_tensors, *gradients))  # type: ignore[no-untyped-call]


class _Gradients(torch.autograd.Function):
    """The gradients, as a function of what was saved and the tangents. ``once_differentiable`` would leave them without
    a connection to the primals, so that asking for their gradients could give ``None`` instead of an error."""

    @staticmethod
    def forward(
        ctx: Any, bridge: Bridge, names: Sequence[str], sizes: dict[str, int], *tensors: torch.Tensor
    ) -> tuple[Any, ...]:
        values: dict[str, Argument] = {**dict(zip(names, tensors, strict=True)), **sizes}
        function = bridge.backward
        results = run_function(bridge.program, function, [values[a.name] for a in function.arguments], same_step=True)
        by_name = {name_without_role(GRAD, r.name): t for r, t in zip(function.results, results, strict=True)}
        return tuple(by_name.get(name) for name in bridge.names)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> NoReturn:
        raise ExecutionError(
            "gradients of gradients were not compiled; compute them in eager mode, on the model itself"
        )


def _is_differentiable(result: Any, bridge: Bridge) -> bool:
    if result.role != OUTPUT:
        return False
    return bool(has_role(BASE, result.name) or bridge.requires_grad[result.name])


def _restride(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """``tensor`` with the strides that eager gives."""
    if tensor.stride() == tuple(stride) or tensor.numel() <= 1:
        return tensor
    # An expanded axis holds each element once.
    once = tensor[tuple(slice(None) if step else slice(1) for step in stride)]
    copy = torch.empty_strided(once.shape, stride, dtype=once.dtype, device=once.device).copy_(once)
    return copy.expand(tensor.shape)
