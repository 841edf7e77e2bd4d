# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The peak of live bytes of one step, measured; what it is compared with was predicted when the step was compiled."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from retrograd.runtime.bridge import INTO
from retrograd.runtime.executor import Program, allocate_results
from retrograd.runtime.manifest import FunctionSpec, TensorSpec
from retrograd.runtime.memory import track_peak


def measure_peak(program: Program, forward: FunctionSpec, backward: FunctionSpec) -> int:
    """Run a step on zeros and count: storage of the tensors held, and what IREE's allocator had out at its highest."""
    with track_peak(program) as scratch:
        results = _run(program, forward, _zeros(program, forward.arguments))
    during_forward = _storage(results) + scratch.peak_bytes - scratch.resident_bytes
    # Updated buffers are copied to their place and freed before the backward.
    kept = {r.name: t for t, r in zip(results, forward.results, strict=True) if r.role != "mutation"}
    arguments = [kept[a.name] if a.name in kept else _zeros(program, [a])[0] for a in backward.arguments]
    with track_peak(program) as scratch:
        gradients = _run(program, backward, arguments)
    during_backward = _storage([*kept.values(), *gradients]) + scratch.peak_bytes - scratch.resident_bytes
    return max(during_forward, during_backward)


def _storage(tensors: Iterable[torch.Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _zeros(program: Program, specs: Iterable[TensorSpec]) -> list[torch.Tensor]:
    return [t.zero_() for t in allocate_results(list(specs), program.torch_device)]


def _run(program: Program, function: FunctionSpec, arguments: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results, residuals among them, in torch's memory: the halves run on devices of their own."""
    results = allocate_results(function.results, program.torch_device)
    program.invoke(function.name + INTO, arguments, results)
    return results
