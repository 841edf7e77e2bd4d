# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The peak of live bytes of one step, measured; what it is compared with was predicted when the step was compiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from retrograd.contract.roles import INTO, MUTATION, SIZE
from retrograd.contract.tensors import FunctionSpec, TensorSpec
from retrograd.runtime.executor import Argument, Program, allocate_results
from retrograd.runtime.memory import track_peak


def measure_peak(
    program: Program, forward: FunctionSpec, backward: FunctionSpec, sizes: Mapping[str, int] | None = None
) -> int:
    """Run a step on zeros and count: storage of the tensors held, and what IREE's allocator had out at its highest.

    ``sizes`` are those to run it with, where they differ from call to call.
    """
    given = _Zeros(program, sizes or {})
    with track_peak(program) as scratch:
        results = _run(program, forward, [given.make(a) for a in forward.arguments])
    during_forward = _storage(results) + scratch.peak_bytes - scratch.resident_bytes
    # Updated buffers are copied to their place and freed before the backward.
    kept = {r.name: t for t, r in zip(results, forward.results, strict=True) if r.role != MUTATION}
    arguments = [kept[a.name] if a.name in kept else given.make(a) for a in backward.arguments]
    with track_peak(program) as scratch:
        gradients = _run(program, backward, arguments)
    during_backward = _storage([*kept.values(), *gradients]) + scratch.peak_bytes - scratch.resident_bytes
    return max(during_forward, during_backward)


def _storage(tensors: Iterable[torch.Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@dataclass(frozen=True)
class _Zeros:
    """Makes arguments for a program."""

    program: Program
    sizes: Mapping[str, int]

    def make(self, spec: TensorSpec) -> Argument:
        """A tensor of zeros, or the number that a size is."""
        if spec.role == SIZE:
            return self.sizes[spec.name]
        return allocate_results([spec.at(self.sizes)], self.program.torch_device)[0].zero_()


def _run(program: Program, function: FunctionSpec, arguments: list[Argument]) -> list[torch.Tensor]:
    """The results, residuals among them, in torch's memory: the halves run on devices of their own."""
    results = allocate_results(function.results_at(arguments), program.torch_device)
    program.invoke(function.name + INTO, arguments, results)
    return results
