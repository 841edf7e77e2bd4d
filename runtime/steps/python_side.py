# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The calls that a plan makes in Python, and the results of collectives that Python knows already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from retrograd.runtime.programs.errors import ExecutionError
from retrograd.runtime.steps import collectives


class PythonSide(Protocol):
    """The calls that a plan makes in Python. Tensors in, tensors out, in the order of the plan."""

    @property
    def collected(self) -> Mapping[str, torch.Tensor] | None:
        """The results of collectives, by the name of the value, where they are not to run; else None."""

    def call_hook(self, kind: str, hook: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Call hook number ``hook`` of its kind; returns what takes the values' place."""

    def call_backward(self, function: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Call the backward of custom function number ``function``."""

    def accumulate_grad(self, param: int, gradient: torch.Tensor, owned: bool) -> None:
        """Add to the gradient of parameter number ``param``; where ``owned``, the tensor is the callee's to keep."""

    def final_callbacks(self) -> None:
        """Call what was queued to be called when the backward is done."""


def known_results(python: PythonSide | None) -> Mapping[str, torch.Tensor] | None:
    """The results of collectives that are not to run; None where they are."""
    return None if python is None else python.collected


def wait_for(
    python: PythonSide | None, results: Sequence[str], started: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Wait for a collective's result: the known one, where it did not start."""
    known = known_results(python)
    if known is None:
        return collectives.wait(started)
    if results and results[0] not in known:
        raise ExecutionError(f"what the collective gave that '{results[0]}' is was not recorded")
    return [known[name].clone() for name in results]
