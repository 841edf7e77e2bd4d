# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compares what a model computes in eager with what was captured of it.

A trace says of itself that it compiles, and a model that asks may compute something else then. The first call of what
was compiled is compared with the traced graph, which computes it too; so the model itself is run once more, told that
it does not compile, on copies of all that it is given.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from retrograd.contract.signature import CONSTANT
from retrograd.frontend.doors.capture import CapturedGraph
from retrograd.frontend.doors.flat_module import compiling
from retrograd.frontend.hooks.pack_hooks import hidden_hooks
from retrograd.frontend.islands.island_choice import draws_numbers
from retrograd.frontend.layers.random_ops import find_seed
from retrograd.frontend.preparation.graph_memory import available_bytes, peak_bytes
from retrograd.frontend.python.generators import generators_kept
from retrograd.frontend.python.kept_attributes import contained
from retrograd.frontend.python.python_contents import is_plain
from retrograd.frontend.python.python_values import find_generators
from retrograd.frontend.python.side_effects import unchanged
from retrograd.frontend.python.source_locations import CaptureError, is_user_file
from retrograd.frontend.verification.first_comparison import forward_tolerance, run_eager, tolerance_of
from retrograd.frontend.verification.judgement import SHAKES, find_difference
from retrograd.frontend.verification.other_roundings import Rounded
from retrograd.frontend.verification.random_states import random_states, set_random_states
from retrograd.frontend.verification.reference_graph import SHARE, has_collectives

# Of what the model is given: one is kept, one is given to the model, one is what it writes.
_COPIES = 3


@dataclass(frozen=True)
class EagerRun:
    """The results of a run of the model: its outputs, then what it wrote to; gradients, where they were asked for, and
    the nodes of autograd that lead from the outputs to what requires grad, by name."""

    outputs: list[Tensor]
    written: list[Tensor]
    gradients: list[Tensor | None]
    structure: tuple[Any, ...]

    def values(self) -> list[Any]:
        """All that is compared."""
        return [*self.outputs, *self.written]


class BesideEager:
    """Runs a captured model in eager, from primals (parameters, buffers, tensor arguments) as they were before a call,
    of which copies are taken, and from the random numbers as they were."""

    def __init__(self, captured: CapturedGraph) -> None:
        signature = captured.signature
        self.is_random = find_seed(captured.graph_module.graph) is not None or draws_numbers(captured.graph_module)
        self.has_collectives = has_collectives(captured.graph_module)
        self._captured, self._peak = captured, peak_bytes(captured.graph_module)
        self._allowed = forward_tolerance(captured)
        self._mutated = signature.mutated
        self.primals = [state.name for state in (*signature.params, *signature.buffers)]
        self.primals += [i.name for i in signature.inputs if i.type is not None]
        self._outputs = [o.name for o in signature.outputs if o.kind != CONSTANT]

    @property
    def is_as_in_eager(self) -> bool:
        """Whether the trace did not say of itself that it compiles."""
        return not self._captured.module.says_compiling

    def find_shortage(self, primals: Sequence[Tensor], device: torch.device) -> str | None:
        """Why memory does not suffice for a run in eager beside a step, if it does not."""
        available = available_bytes(device)
        needed = self._peak + _COPIES * sum(t.numel() * t.element_size() for t in primals)
        if available is None or needed <= SHARE * available:
            return None
        return f"it would take {needed >> 20} MiB beside the step, and {available >> 20} MiB are free"

    def start(self, primals: Sequence[Tensor]) -> Comparison:
        """Take copies, before a call."""
        return Comparison(self, [t.detach().clone() for t in primals], [t.requires_grad for t in primals])

    def names(self) -> list[str]:
        """The names of what is compared, in the user's words."""
        return [*self._outputs, *(f"{self.primals[i]}, which it writes to," for i in self._mutated)]

    def run(self, given: Sequence[Tensor], wanted: Sequence[bool], says_compiling: bool, gradients: bool) -> EagerRun:
        """Run the model on copies of ``given``, which require grad where ``wanted`` says so. What it does to its
        modules, and to generators of random numbers that are not torch's, is undone."""
        module = self._captured.module
        with torch.inference_mode(False):
            copies = [t.clone().requires_grad_(w) for t, w in zip(given, wanted, strict=True)]
        modules = {} if module.model is None else dict(module.model.named_modules())
        outputs: list[Tensor] = []
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            hidden_hooks(),
            compiling(says_compiling),
            generators_kept(find_generators(module.called, modules)),
            # A tensor that the model keeps in eager is taken out again, and is no output.
            contextlib.suppress(CaptureError),
            unchanged(module.constants),
            contained(module.model, lambda _: ""),
        ):
            outputs.extend(run_eager(self._captured, copies))
        grads = _gradients(outputs, [c for c, w in zip(copies, wanted, strict=True) if w]) if gradients else []
        written = [copies[i].detach() for i in self._mutated]
        return EagerRun([o.detach() for o in outputs], written, grads, _structure(outputs, copies))

    def written(self, primals: Sequence[Tensor]) -> list[Tensor]:
        """The tensors among these that the compiled model writes to."""
        return [primals[i].detach() for i in self._mutated]

    def restore(self, primals: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """Write ``given`` back to where the compiled model has written."""
        with torch.no_grad():
            for i in self._mutated:
                primals[i].copy_(given[i])

    def allowed(self, values: Sequence[Any]) -> list[float]:
        """The relative error that rounding explains of each of the values."""
        own = [tolerance_of(v.dtype) if isinstance(v, Tensor) else 0.0 for v in values]
        return [max(o, self._allowed) if o else o for o in own]


@dataclass
class Comparison:
    """A call beside the model in eager: what it was given, and the random numbers as they were before it."""

    beside: BesideEager
    given: list[Tensor]
    wanted: list[bool]

    def __post_init__(self) -> None:
        self.before = random_states(self.given)

    def find_parting(self, outputs: Sequence[Any], primals: Sequence[Tensor]) -> str | None:
        """How ``outputs``, what the compiled model gave and wrote to these primals, differ from what the model gives in
        eager by more than rounding, in words that name the first that does, by how much and where; ``None`` where they
        do not. Of models that draw random numbers two runs in eager are compared, the one told that it compiles.

        Raises:
            Exception: the model does not run on copies, told that it compiles.
        """
        after = random_states(self.given)
        try:
            # The compiled model was told nothing, or what fails here is not the model: on copies it may not run at all.
            told = None if self.beside.is_as_in_eager else self._run(says_compiling=True)
            try:
                eager = self._run(says_compiling=False)
            except Exception as error:  # noqa: BLE001  (an error of the user's own)
                return f"in eager it raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            found = [*(o.detach() for o in outputs), *self.beside.written(primals)]
            if self.beside.is_random:
                found = eager.values() if told is None else told.values()
            parting = self._judge(found, eager)
            if parting is None and told is not None and told.structure != eager.structure:
                parting = self._find_other_gradients()
            return parting
        finally:
            set_random_states(after)

    def undo(self, primals: Sequence[Tensor]) -> None:
        """Undo a call: put back what it wrote to, and the random numbers that it drew."""
        self.beside.restore(primals, self.given)
        set_random_states(self.before)

    def _run(self, *, says_compiling: bool, gradients: bool = False) -> EagerRun:
        set_random_states(self.before)
        return self.beside.run(self.given, self.wanted, says_compiling, gradients)

    def _judge(self, found: Sequence[Any], eager: EagerRun) -> str | None:
        names, expected = self.beside.names(), eager.values()
        if len(found) != len(expected):
            return f"it returns {len(eager.outputs)} tensors in eager, not {len(found) - len(eager.written)}"
        difference = find_difference(
            found, expected, self.beside.allowed(expected), lambda: self._shaken(gradients=False)
        )
        return None if difference is None else f"{names[difference.place]} differs{_by(difference.error)}{self._line()}"

    def _find_other_gradients(self) -> str | None:
        """Find where the gradients differ as :meth:`find_parting` does: the gradients of two runs in eager, of which
        autograd has recorded other ops."""
        found, expected = (self._run(says_compiling=says, gradients=True).gradients for says in (True, False))
        names = [n for n, w in zip(self.beside.primals, self.wanted, strict=True) if w]
        absent = next((n for n, a, b in zip(names, found, expected, strict=True) if (a is None) != (b is None)), None)
        if absent is not None:
            return f"{absent} has a gradient in one of the two only{self._line()}"
        difference = find_difference(
            found, expected, self.beside.allowed(expected), lambda: self._shaken(gradients=True), gradients=True
        )
        if difference is None:
            return None
        return f"the gradient of {names[difference.place]} differs{_by(difference.error)}{self._line()}"

    def _shaken(self, *, gradients: bool) -> Iterator[list[Any] | None]:
        """Runs eager with other rounding; in no float64, in which not every model runs."""
        yield None
        for seed in range(SHAKES):
            with Rounded(seed):
                run = self._run(says_compiling=False, gradients=gradients)
            yield list(run.gradients) if gradients else run.values()

    def _line(self) -> str:
        """The line where the model goes on otherwise, as a part of a sentence."""
        trails = []
        for says_compiling in (True, False):
            with _Trail() as trail:
                self._run(says_compiling=says_compiling)
            trails.append(trail.steps)
        place = find_fork(*trails)
        return f"; it goes another way at {place}" if place else ""


def find_fork(compiling_steps: Sequence[tuple[Any, ...]], eager_steps: Sequence[tuple[Any, ...]]) -> str | None:
    """The line of the first step of the run in eager that the other has not, or of what the other goes on with; a step
    ends with its line."""
    for a, b in zip(compiling_steps, eager_steps, strict=False):
        if a != b:
            return str(b[-1])
    longer = max(compiling_steps, eager_steps, key=len)
    shorter = min(len(compiling_steps), len(eager_steps))
    return str(longer[shorter][-1]) if len(longer) > shorter else None


class _Trail(TorchFunctionMode):
    """Notes which functions of torch are called with which numbers and texts, and the lines that call them."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs or {}))
        name = getattr(func, "__name__", str(func))
        self.steps.append((name, *(repr(leaf) for leaf in leaves if is_plain(leaf)), _calling_line()))
        return func(*args, **(kwargs or {}))


def _calling_line() -> str:
    """The innermost line that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _by(error: float) -> str:
    return " in shape, dtype or where it is no number" if error == float("inf") else f" by {error:.1e} (relative norm)"


def _gradients(outputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients for the same tangents each time."""
    differentiable = [o for o in outputs if o.requires_grad]
    if not differentiable or not wanted:
        return [None for _ in wanted]
    tangents = [_tangent(o, seed) for seed, o in enumerate(differentiable)]
    return list(torch.autograd.grad(differentiable, wanted, tangents, allow_unused=True))


def _tangent(output: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(output.shape, generator=generator, dtype=torch.float32, device="cpu")
    return drawn.to(output.device, output.dtype)


def _structure(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> tuple[Any, ...]:
    """The nodes of autograd that outputs lead to, each with its name and those behind it by number, or the number of
    the leaf that it is of: equal where gradients are computed by the same ops."""
    numbers = {id(leaf): i for i, leaf in enumerate(leaves)}
    places: dict[Any, int] = {}
    waiting = [o.grad_fn for o in outputs if o.grad_fn is not None]
    found: list[Any] = [tuple(-1 if o.grad_fn is None else 0 for o in outputs)]
    while waiting:
        node = waiting.pop()
        if node in places:
            continue
        places[node] = len(places)
        behind = [n for n, _ in node.next_functions if n is not None]
        waiting.extend(behind)
        variable = getattr(node, "variable", None)
        found.append((node.name(), len(behind), None if variable is None else numbers.get(id(variable))))
    return tuple(found)
