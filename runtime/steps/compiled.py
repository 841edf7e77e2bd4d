# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A compiled backward, as the user holds it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch

from retrograd.contract.manifest import Manifest
from retrograd.contract.moves import Mover
from retrograd.contract.roles import BACKWARD, FORWARD, NEW, has_role
from retrograd.contract.tensors import FunctionSpec
from retrograd.runtime.arguments.calling import ArgumentError, CallingConvention, OtherProgramError
from retrograd.runtime.arguments.state import ModelState
from retrograd.runtime.artifact import ArtifactError, write_artifact
from retrograd.runtime.cuda.captured_calls import CapturedCall
from retrograd.runtime.programs.executor import Program
from retrograd.runtime.reports.peak import Half, measure_peak
from retrograd.runtime.reports.report import Report
from retrograd.runtime.steps.islands import IslandTimes
from retrograd.runtime.steps.surroundings import Mode, open_modes, refuse_modes, refuse_tangents, refuse_transforms

Call = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


# What `explain` says of this process, and not of the file.
_IN_PROCESS = (
    "backward_variants",
    "cuda_graphs",
    "islands",
    "offload",
    "shared_gradient_bytes",
    "specializations",
    "verification",
)


@dataclasses.dataclass(frozen=True)
class Portable:
    """Holds what a file is to have: the executable, and of functions that are in one piece there and in stages here
    what the file says of them."""

    vmfb: bytes
    functions: tuple[FunctionSpec, ...] | None = None
    report: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class DrawnArguments(Protocol):
    """Arguments that the program takes besides those of its caller, drawn at each call."""

    def draw(self) -> Mapping[str, Any]:
        """Draw them, by name."""

    def save(self) -> Callable[[], None]:
        """Give what puts the generators that they are drawn from back to what they are now."""


class OtherPrograms(Protocol):
    """Programs of the same model that were compiled for other Python values than the first, or for more gradients, or
    as it runs in eager, where ``parting`` says what of it the first does otherwise."""

    parting: str | None

    @property
    def texts(self) -> Sequence[str]:
        """Lists what each of them was compiled for."""

    def is_first(self) -> bool:
        """Whether Python's values are those of the first program."""

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any], refused: OtherProgramError | None = None) -> Any:
        """Call the one for the values and arguments as they are, which is compiled if there is none; ``refused`` is
        what the first program says of the arguments."""


class Verification(Protocol):
    """How the checks of first calls went."""

    def describe(self) -> list[str]:
        """Describe the outcome of first calls in words, for each function."""

    def find_wrong(self) -> str | None:
        """Says what was found to be wrong, if anything was."""


@dataclasses.dataclass(frozen=True)
class Unchecked:
    """Stands for first calls that check nothing; ``reason`` says why."""

    reason: str

    def describe(self) -> list[str]:
        """The reason."""
        return [self.reason]

    def find_wrong(self) -> str | None:
        """Nothing."""
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """Holds the parts that a :class:`CompiledBackward` is made of.

    ``call`` gives outputs for primals, on ``program``, in the order of ``convention``; ``state`` are parameters and
    buffers.
    ``portable`` gives the code that ``save`` writes, ``manifest`` what it writes beside; ``ir`` the IR at a stage.
    ``bisect``, given arguments, finds the first op at fault; ``None`` where the model is not known. ``times`` are those
    of what runs in torch. ``variants`` says what each backward that was compiled since does without, and may grow;
    ``None`` where there can be no others. ``verification`` says how first calls were checked; ``cut`` are the halves
    that are cut into stages, by name, and ``captured`` the functions that are replayed as CUDA graphs. ``answers`` are
    what the model was answered about the contents of its arguments, which is asked again before each call.
    """

    call: Call
    convention: CallingConvention
    state: ModelState
    program: Program
    portable: Callable[[], Portable]
    manifest: Manifest
    ir: Callable[[str], str]
    bisect: Callable[[Sequence[Any], Mapping[str, Any]], Any] | None = None
    times: IslandTimes = dataclasses.field(default_factory=lambda: IslandTimes(()))
    variants: Sequence[str] | None = None
    verification: Verification = dataclasses.field(default_factory=lambda: Unchecked("not verified"))
    cut: Mapping[str, Half] = dataclasses.field(default_factory=dict)
    captured: Sequence[tuple[str, CapturedCall]] = ()
    answers: Sequence[str] = ()
    mover: Mover[torch.Tensor] | None = None


class CompiledBackward:
    """Call it like the model it was compiled from; ``.backward()`` on what comes out runs the compiled backward.

    Arguments must have the shapes, dtypes and devices (and Python constants the values) that it was compiled for; sizes
    that were left open, any that fulfil its conditions.
    Where a Python value that the model reads, or its mode, is another one now, or a tensor requires grad that did not,
    it is compiled once more and both programs are kept: ``specializations`` has them, and is ``None`` for what was
    loaded.
    Parameters and buffers are those of the model, read at each call; buffers are updated as eager does, and attributes
    set to the tensors that the model sets them to.
    """

    def __init__(self, parts: Parts, modes: Sequence[Mode] | None = None) -> None:
        # Of a file none was open where it was compiled, whatever is here.
        self._modes = open_modes() if modes is None else tuple(modes)
        self._parts = parts
        self._has_run = False
        self._peak: int | None = None
        self.specializations: OtherPrograms | None = None
        self.draws: DrawnArguments | None = None

    @property
    def manifest(self) -> Manifest:
        """Holds what ``save`` writes beside the code, and ``explain`` says of it."""
        return self._parts.manifest

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the model returns.

        Raises:
            ArgumentError: an argument, parameter or buffer that the program was not compiled for; nothing has run then.
        """
        refuse_transforms()
        refuse_modes(self._modes)
        others = self.specializations
        if others is None:
            return self._run(args, kwargs)
        if not others.is_first():
            return others.call(args, kwargs)
        try:
            return self._run(args, kwargs)
        except OtherProgramError as error:
            return others.call(args, kwargs, error)

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.draws is None:
            return self._run_on(args, kwargs)
        undo = self.draws.save()
        try:
            return self._run_on(args, {**kwargs, **self.draws.draw()})
        except ArgumentError:
            # Nothing has run. Another program may draw the same.
            undo()
            raise

    def _run_on(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        parts = self._parts
        inputs = parts.convention.flatten(args, kwargs)
        state = parts.state.tensors()
        primals = [*parts.convention.check_state(state), *inputs]
        refuse_tangents(primals)
        parts.convention.check_memory(primals)
        parts.convention.check_indices(primals)
        parts.convention.set_requiring(primals)
        outputs = parts.call(primals)
        self._has_run = True
        result, kept = parts.convention.unflatten(outputs)
        if kept:
            parts.state.keep(kept)
        return result

    def bind(self, model: torch.nn.Module | Mapping[str, torch.Tensor]) -> CompiledBackward:
        """The same program on the parameters and buffers of ``model``: a module, or tensors by qualified name.

        Raises:
            ArgumentError: a parameter or buffer is missing or is not what the program was compiled for.
        """
        state = self._parts.state.of(model)
        self._parts.convention.check_state(state.tensors())
        bound = CompiledBackward(dataclasses.replace(self._parts, state=state, bisect=None), self._modes)
        bound.draws = self.draws
        return bound

    def to_device(self) -> CompiledBackward:
        """Keep the parameters and buffers on the device from now on, where it cannot work on torch's memory (Vulkan):
        they are copied now, and later when torch counts a write to them.

        Torch counts none through ``Tensor.data`` or a NumPy array of the same memory: call this again after such.
        Without this they are copied once per step. Returns the same object.

        Raises:
            ArgumentError: a parameter or buffer is not what the program was compiled for.
            DeviceError, OutOfDeviceMemory: the device is not there, or has no memory left.
        """
        self._parts.program.keep_on_device(self._parts.convention.check_state(self._parts.state.tensors()))
        return self

    @property
    def _has_collectives(self) -> bool:
        return any(half.plan is not None and half.plan.has_collectives for half in self._parts.cut.values())

    def _refuse_parting(self) -> None:
        """Raise :class:`ArtifactError` where what is compiled goes by more than a file can hold."""
        if left := [island.text for island in self._parts.times.islands if not island.is_library]:
            listed = "\n  ".join(left)
            raise ArtifactError(
                f"these ops are not compiled, and run in torch; take them, or the hooks that they call, out of what is "
                f"compiled (fallback='error' names other ops than hooks at once):\n  {listed}"
            )
        if self._has_collectives:
            raise ArtifactError(
                "the program works together with other processes, which no file does; take the collectives out of what "
                "is compiled"
            )
        if self._parts.mover is not None:
            raise ArtifactError(
                "the program keeps residuals on the host, which a file does not; compile without retrograd.offload to "
                "save one"
            )
        if self._parts.answers:
            listed = "\n  ".join(self._parts.answers)
            raise ArtifactError(
                f"the program is right for arguments of these contents alone, which a file cannot ask for; pass what "
                f"the model asks as a Python number:\n  {listed}"
            )
        if self._modes:
            names = ", ".join(mode.kind.__name__ for mode in self._modes)
            raise ArtifactError(
                f"the program was compiled where {names} was open, which a file cannot ask for; compile outside of it "
                "to save one"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file that ``retrograd.load`` and ``iree-run-module`` take. Parameters are not in it.

        Unless that was done already (``portable=True``), what it holds is compiled now, or taken from the cache; ops
        that a library of PyTorch's computes in this process are compiled there.

        Raises:
            ArtifactError: some ops run in torch, which no file holds; lists them. Or the code was found to be wrong.
            CompileError: iree-compile failed.
            OSError: the file cannot be written; nothing is left behind.
        """
        self._refuse_parting()
        if (wrong := self._parts.verification.find_wrong()) is not None:
            raise ArtifactError(
                f"the compiled code gives wrong values, and is not used here either; "
                f"take the op out of what is compiled: {wrong}"
            )
        if self.specializations is not None and self.specializations.parting is not None:
            raise ArtifactError(
                f"the file would have what the model computes while it is compiled; compile it by verify=False if that "
                f"is what you want: {self.specializations.parting}"
            )
        self._refuse_unwritten()
        portable = self._parts.portable()
        # Backwards without some of the outputs are programs of their own, which the file has not; who loads it does not
        # check it.
        report = {key: value for key, value in self.explain().to_dict().items() if key not in _IN_PROCESS}
        report |= {key: value for key, value in portable.report.items() if key in report}
        report["vmfb_bytes"] = len(portable.vmfb)
        functions = portable.functions or self.manifest.functions
        manifest = dataclasses.replace(self.manifest, functions=functions, report=report)
        write_artifact(path, portable.vmfb, manifest)

    def _refuse_unwritten(self) -> None:
        """Raise :class:`ArtifactError` where the program sets an attribute to what no file holds."""
        for output in self.manifest.signature.outputs:
            value = output.constant
            if has_role(NEW, output.name) and not isinstance(value, bool | int | float | str | None):
                raise ArtifactError(
                    f"the model sets {output.name.removeprefix(f'{NEW}.')!r} to {value!r}, which a file does not hold; "
                    "set it to numbers or texts"
                )

    def mlir(self, stage: str) -> str:
        """The IR at ``imported``, ``partitioned``, ``scheduled`` or ``linalg``.

        Raises:
            ValueError: no such stage, or a loaded artifact, which holds no IR.
        """
        return self._parts.ir(stage)

    def explain(self) -> Report:
        """Reports what was compiled, saved and recomputed. The first call after a step measures the peak of live bytes.
        That measurement repeats a step on zeros with IREE's counting allocator, on one thread."""
        report = {**self.manifest.report, "verification": self._parts.verification.describe()}
        if self._parts.variants is not None:
            report["backward_variants"] = list(self._parts.variants)
        if self.specializations is not None and self.specializations.texts:
            report["specializations"] = list(self.specializations.texts)
        if self._parts.captured:
            report["cuda_graphs"] = [f"@{name}: {call.describe()}" for name, call in self._parts.captured]
        if self._parts.mover is not None and self._has_run:
            report["offload"] = self._describe_moves(self._parts.mover)
        if self._has_collectives:
            # To measure repeats a step, which the other processes do not.
            return Report(report)
        if self._parts.times.islands:
            # IREE's allocator sees nothing of what torch allocates in between.
            return Report({**report, "islands": self._parts.times.describe()})
        if self._has_run and self._peak is None:
            forward, backward = (self._parts.cut.get(n) or Half(self.manifest.function(n)) for n in (FORWARD, BACKWARD))
            sizes = {s.name: s.hint for s in self.manifest.signature.sizes}
            self._peak = measure_peak(self._parts.program, forward, backward, sizes)
        measured = self._peak if self._peak is not None else self.manifest.report["peak_bytes_measured"]
        return Report({**report, "peak_bytes_measured": measured})

    def _describe_moves(self, mover: Mover[torch.Tensor]) -> list[str]:
        """Says how long the copies of a step take, on a link whose speed is measured once."""
        size = self.manifest.report["offloaded_bytes"]
        rates = mover.measure()
        ways = {"to the host": rates.out, "back": rates.back}
        return [f"{1e3 * size / rate:.2f} ms {way}, at {rate / 1e9:.1f} GB/s" for way, rate in ways.items()]

    def bisect(self, *args: Any, **kwargs: Any) -> Any:
        """The first op whose compiled value parts from eager's when the model is called so, as a ``Bisection``.

        Raises:
            ValueError: the program was loaded, or bound to another model.
        """
        if self._parts.bisect is None:
            raise ValueError("this program does not know its model: use retrograd.bisect(model, args, artifact=file)")
        return self._parts.bisect(args, kwargs if self.draws is None else {**kwargs, **self.draws.draw()})

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a CompiledBackward can be neither copied nor pickled: share it, or save() it to a file and load that"
        )

    def __repr__(self) -> str:
        report = self.manifest.report
        return f"CompiledBackward({report['name']}, target={report['target']}, partition={report['partition']})"
