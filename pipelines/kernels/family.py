# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Defines families of kernels: each finds the ops that it is for, says why not, and writes them as dispatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from retrograd.contract.trials import CompiledKernel
from retrograd.dialects import ir
from retrograd.pipelines.kernels.kernel import Kernel
from retrograd.pipelines.kernels.questions import Question

CHOICES = "bwd.kernels"
"""The attribute of a module that says which op took which path, and why, a line each."""

Compiled = Mapping[Kernel, CompiledKernel]


@dataclass(frozen=True)
class Refusal:
    """Why an op stays with IREE's code generator."""

    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what}: IREE's code, {self.reason}"


class Plan(Protocol):
    """How an op is to be computed by kernels of ours."""

    def kernels(self) -> Mapping[Kernel, bool]:
        """The kernels that it takes, each with whether it updates an operand in place."""

    def questions(self) -> Sequence[Question]:
        """Which tiles it could have, with what to run to find out the best; none where there is one choice alone."""

    def apply(self, compiled: Compiled) -> None:
        """Put dispatches in the place of the op."""


class Family(Protocol):
    """Kernels for one kind of work."""

    @property
    def name(self) -> str:
        """The family's name in options and reports."""

    def plan(self, op: ir.Operation) -> Plan | Refusal | None:
        """A plan for ``op``, a reason why there is none, or ``None`` where it is no work of this kind."""
