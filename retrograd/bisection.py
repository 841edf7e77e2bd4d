# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which op of a program is at fault, where it does not compile or its values part from eager's.

The functions of the staged module are given what eager computed, each by itself. One that is at fault is cut down:
slices of it are lowered, compiled and run until the first op at fault and few of its neighbours are left.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import torch

from retrograd.contract.tensors import FunctionSpec
from retrograd.frontend.islands.eager_values import EagerValues
from retrograd.pipelines.devices.targets import Target
from retrograd.pipelines.infra.errors import CompileError
from retrograd.pipelines.stages.slicing import FoundOp, ModuleSlice, Slicer
from retrograd.pipelines.stages.staged import StagedModule
from retrograd.pipelines.toolchain.executable import Executable, compile_executable
from retrograd.pipelines.toolchain.lowering import lower_to_linalg
from retrograd.pipelines.toolchain.lowering_steps import lowering_pipeline
from retrograd.runtime.artifact import ArtifactError, read_artifact
from retrograd.runtime.programs.executor import Program
from retrograd.runtime.reports.reproducer import Reproducer
from retrograd.runtime.steps.bridge import run_function

VALUES = "values"


@dataclass(frozen=True)
class Bisection:
    """Holds the result of :func:`retrograd.bisect`; false where nothing is at fault.

    ``kind`` is ``values`` (they part from eager's), ``lower`` or ``iree-compile`` (the phase that fails), empty where
    nothing is at fault. ``function``, ``op``, ``location`` (in the user's source) and ``value`` (its name in the traced
    graph) say where, ``message`` how. ``ops`` is the size of the smallest slice that shows it, ``trials`` the number of
    slices that were compiled to find it.
    """

    kind: str = ""
    function: str = ""
    op: str = ""
    location: str = ""
    value: str = ""
    message: str = ""
    ops: int = 0
    trials: int = 0
    reproducer: Reproducer | None = field(default=None, repr=False)

    def __bool__(self) -> bool:
        return bool(self.kind)

    def __str__(self) -> str:
        if not self:
            return "every value agrees with eager's"
        if not self.op:
            return f"@{self.function}: {self.message}; no op of it shows that when compiled by itself"
        what = (
            "the first op whose value parts from eager's"
            if self.kind == VALUES
            else f"the first op with which the phase {self.kind} fails"
        )
        return (
            f"@{self.function}: {what} is {self.op}, at {self.location}\n"
            f"  {self.message}\n"
            f"  smallest slice that shows it: {self.ops} op{'s' * (self.ops != 1)}, after {self.trials} trials"
        )

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Write the reproducer: the slice as .mlir, its arguments and expected results as .npy (.bin for types that
        .npy does not have), and ``reproduce.sh``, whose path is returned; it exits with 0 once the fault is mended.

        Raises:
            ValueError: no op was found.
            OSError: a file cannot be written.
        """
        if self.reproducer is None:
            raise ValueError(f"there is no reproducer to write: {self}")
        return self.reproducer.write(Path(folder))


@dataclass(frozen=True)
class Trial:
    """How a slice went: ``kind`` as in Bisection, what was said, and the IR on linalg if it got so far."""

    kind: str = ""
    message: str = ""
    linalg: str | None = None
    flags: tuple[str, ...] = ()


class Laboratory:
    """Compiles slices as the program was compiled, and compares what they compute with eager's values."""

    def __init__(self, target: Target, values: EagerValues) -> None:
        self.target, self.values = target, values
        self.trials: dict[str, Trial] = {}

    def test(self, piece: ModuleSlice) -> Trial:
        """Lower, compile and run a slice; each one once."""
        if piece.text not in self.trials:
            self.trials[piece.text] = self._test(piece)
        return self.trials[piece.text]

    def find_difference(
        self, program: Program, function: FunctionSpec, operands: dict[str, tuple[str, ...]] | None = None
    ) -> str | None:
        """Run a function of a program on eager's values; what the first result that differs is, if one does."""
        results = run_function(program, function, [self.values.tensors[a.value] for a in function.arguments])
        return self.values.find_difference([r.value for r in function.results], results, operands or {})

    def _test(self, piece: ModuleSlice) -> Trial:
        linalg: str | None = None
        try:
            linalg = lower_to_linalg(piece.text.encode(), self.target)
            executable = compile_executable(linalg, self.target)
        except CompileError as error:
            return Trial(error.phase, error.message, linalg, self.target.ladder[-1])
        program = Program.load(executable.vmfb, driver=self.target.driver)
        difference = self.find_difference(program, piece.function, piece.operands)
        return Trial(VALUES if difference else "", difference or "", linalg, executable.flags)


def find_fault(
    staged: StagedModule,
    target: Target,
    values: EagerValues,
    executable: Executable | None,
    functions: Collection[str] | None = None,
) -> Bisection:
    """The first op at fault in a staged module, or in these of its functions; ``executable`` is what it was compiled
    to, ``None`` where that failed.

    Raises:
        ExecutionError: the executable cannot be loaded or does not run.
        ValueError: values are saved in narrower types, so that they are not eager's.
    """
    if staged.narrowed:
        name = next(iter(staged.narrowed))
        raise ValueError(
            f"{name} is saved in a narrower type, where eager has no such value: leave saved_dtype and hooks out"
        )
    # Slices are compiled with the flags that made the executable, or else the plainest, with which it failed too.
    flags = target.ladder[-1] if executable is None else executable.flags
    laboratory = Laboratory(target.only(flags), values)
    program = None if executable is None else Program.load(executable.vmfb, driver=target.driver)
    for function in staged.stages:
        if functions is not None and function.name not in functions:
            continue
        difference = None
        slicer = Slicer(staged.source, function.name, values.tensors)
        if program is not None:
            operands = slicer.operands([r.value for r in function.results])
            difference = laboratory.find_difference(program, function, operands)
            if difference is None:
                continue
        found = _search(laboratory, slicer)
        if found:
            return found
        if difference is not None:
            return Bisection(VALUES, function.name, message=difference, trials=len(laboratory.trials))
    return Bisection(trials=len(laboratory.trials))


def saved_executable(path: str | os.PathLike[str], staged: StagedModule) -> Executable:
    """The executable in an artifact, which must have been compiled from a module with the functions of this one.

    Raises:
        ArtifactError: no artifact, or one of another model.
    """
    artifact = read_artifact(path)
    for function in staged.functions:
        spec = artifact.manifest.function(function.name)
        ours, theirs = ([p.name for p in (*f.arguments, *f.results)] for f in (function, spec))
        if ours != theirs:
            raise ArtifactError(
                f"{os.fspath(path)}: @{function.name} was not compiled from this model with this partition: "
                f"it has {', '.join(theirs)}, and the model {', '.join(ours)}"
            )
    return Executable(artifact.vmfb, tuple(artifact.manifest.report["flags"]), {}, 0.0)


def _search(laboratory: Laboratory, slicer: Slicer) -> Bisection:
    kinds: list[str] = []

    def is_faulty(piece: ModuleSlice) -> bool:
        kind = laboratory.test(piece).kind
        # The whole function comes first; a slice that goes wrong in another way is another fault.
        kinds.append(kind)
        return bool(kind) and kind == kinds[0]

    found = slicer.find(is_faulty)
    if found is None:
        return Bisection()
    trial = laboratory.test(found.slice)
    return Bisection(
        trial.kind,
        found.slice.function.name,
        found.name,
        found.location,
        found.value,
        trial.message,
        found.slice.ops,
        len(laboratory.trials),
        _reproducer(laboratory, found, trial),
    )


def _reproducer(laboratory: Laboratory, found: FoundOp, trial: Trial) -> Reproducer:
    target, function = laboratory.target, found.slice.function
    tensors = laboratory.values.tensors
    texts = {"slice.mlir": found.slice.text}
    lower = ["retrograd-opt", "slice.mlir", "--allow-unregistered-dialect", "--mlir-print-debuginfo"]
    commands = [shlex.join([*lower, "-o", "linalg.mlir", f"--pass-pipeline={lowering_pipeline(target)}"])]
    if trial.linalg is not None:
        texts["linalg.mlir"] = trial.linalg
        commands.append(shlex.join(["iree-compile", "linalg.mlir", "-o", "slice.vmfb", *target.flags, *trial.flags]))
    run = ["iree-run-module", f"--device={target.driver}", "--module=slice.vmfb", f"--function={function.name}"]
    expected: dict[str, torch.Tensor] = {}
    if trial.kind == VALUES:
        expected = {r.value: tensors[r.value] for r in function.results}
    return Reproducer(
        texts,
        commands,
        shlex.join(run),
        {a.value: tensors[a.value] for a in function.arguments},
        expected,
        max((laboratory.values.tolerances[name] for name in expected), default=0.0),
    )
