# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Calls of Python from inside a backward: hooks, custom functions, and what eager does with their results.

In the graph only tensors go in and out of a call. The rest of it (which of this step's hooks to call, what a
``torch.autograd.Function`` saved, constants, tensors that come straight from the inputs) is a template, filled in at
each call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch._dynamo import compiled_autograd
from torch._prims_common import is_non_overlapping_and_dense_or_false

from retrograd.contract.errors import RetrogradError
from retrograd.contract.sizes import Size, evaluate_size
from retrograd.frontend.autograd.engine.hook_calls import call_user_hook
from retrograd.frontend.autograd.engine.late_hooks import LATE, TENSOR_HOOK
from retrograd.frontend.autograd.hooks.putting_hooks import find_putting
from retrograd.frontend.hooks.hook_marks import describe_hook

# Gives the node of the engine that runs: of a captured backward none does.
_ASKS_FOR_NODE = "_current_autograd_node"


class Absent(Protocol):
    """Knows which gradients are None at a step: see ``steps/absent_gradients.py``."""

    def is_there(self, name: str, place: tuple[int, ...] = ()) -> bool:
        """Whether a value of a node of the capture is there."""

    def note(self, name: str, present: tuple[bool, ...] | bool) -> None:
        """Take note of what a call gave."""

    def lost(self) -> list[str]:
        """The calls that gave None for what they gave when the capture was recorded."""


class Unforeseen(Exception):
    """A call of Python gave gradients that the compiled graph has no place for; ``rest`` is what the nodes of the
    capture that come after it compute with, besides the inputs."""

    def __init__(self, call: PythonCall, given: Any, rest: Sequence[Any]) -> None:
        super().__init__(call.label)
        self.call, self.given, self.rest = call, given, rest

    def lacking(self) -> list[int]:
        """The places of what was there, and is not now, or the other way round."""
        return [n for n in self.call.firm if (self.given[n] is not None) != self.call.present[n]]

    def describe(self, frame: Frame) -> str:
        """Say what was not as it was."""
        function = getattr(self.call.arguments[0](frame, ()), "_forward_cls", None)
        name = self.call.label if function is None else f"the backward of {function.__qualname__}"
        changes = [
            f"a gradient at {n} where it gave None" if self.given[n] is not None else f"None at {n}"
            for n in self.lacking()
        ]
        return f"{name}, since it was compiled, gave {' and '.join(changes)}"


class ZerosForNone(RetrogradError, RuntimeError):
    """Zeros in the place of a gradient of None came to something that is no number."""


@dataclass(slots=True)
class Frame:
    """The arguments of one backward, as compiled autograd gives them, and its sizes."""

    # A sequence of tensors; while a compiled backward runs, those that calls look at by their numbers.
    inputs: Any
    hooks: Sequence[Any]
    packed: Sequence[Any]
    # Numbers that C++ functions saved.
    scalars: Sequence[Any] = ()
    # What gives the numbers of the capture's structure, in its order.
    number_of: Callable[[int], Any] | None = None
    # Of the sizes that a graph leaves open, by name.
    sizes: Mapping[str, Any] = field(default_factory=dict)
    # What is known of gradients that are None, from where a call first gives None for one that it gave before.
    absent: Absent | None = None
    # Whether what is computed since is looked at, which was finite until then.
    is_checked: bool = False
    # What makes that.
    find_absent: Callable[[], Absent] | None = None
    # Whether calls of Python run in the order of the capture.
    is_in_order: bool = False
    # What failed while a compiled backward ran.
    failure: str | None = None


# A part of a call's arguments: built from this step's frame and the tensors that the graph computed.
Template = Callable[[Frame, Sequence[torch.Tensor]], Any]


def find_source(node: Any) -> tuple[str | None, int]:
    """Which element of which argument of the backward a node is."""
    if isinstance(node, torch.fx.Node) and node.target is operator.getitem:
        source, index = node.args
        if isinstance(source, torch.fx.Node) and source.op == "placeholder" and source.target != "sizes":
            return str(source.target), int(str(index))
    return None, 0


def from_input(index: int) -> Template:
    """The tensor as it was given, not a copy that travelled through the graph: a parameter stays the parameter."""
    return lambda frame, values: frame.inputs[index]


def from_hook(index: int) -> Template:
    """A hook, or the context of a custom function."""
    return lambda frame, values: frame.hooks[index]


def from_packed(index: int) -> Template:
    """Pass on what a pack hook returned."""
    return lambda frame, values: frame.packed[index]


def from_scalar(index: int) -> Template:
    """A number that a C++ function saved."""
    return lambda frame, values: frame.scalars[index]


def from_slot(index: int) -> Template:
    """A number that differs from step to step."""

    def read(frame: Frame, values: Sequence[torch.Tensor]) -> Any:
        assert frame.number_of is not None
        return frame.number_of(index)

    return read


def from_value(index: int) -> Template:
    """A tensor that the graph computed."""
    return lambda frame, values: values[index]


def constant(value: Any) -> Template:
    """The same at each step."""
    return lambda frame, values: value


def sequence(parts: Sequence[Template]) -> Template:
    """A tuple: eager gives hooks their gradients in tuples."""
    return lambda frame, values: tuple([part(frame, values) for part in parts])


@dataclass(frozen=True)
class PythonCall:
    """One call: ``function`` on the filled-in ``arguments``, whose result has tensors where ``present`` says so.

    ``single``: the result is one tensor and not a sequence. ``node`` is its name in the capture, ``label`` names
    the call for messages. ``results`` are meta tensors for those present, ``shapes`` their shapes where sizes are open.
    ``sources`` are the values of the capture that it is given. Where the results at the places ``firm`` are not present
    as they were, the graph cannot go on: ``rest`` then makes the values that the capture goes on with after the call.
    ``lets_go`` are the inputs that no later call looks at, nor the capture where it might go on so.
    """

    kind: str
    number: int
    function: Callable[..., Any]
    arguments: tuple[Template, ...]
    present: tuple[bool, ...]
    single: bool
    node: str
    label: str
    results: tuple[torch.Tensor, ...] = field(repr=False)
    shapes: tuple[tuple[Size, ...], ...] | None = None
    sources: tuple[tuple[str, tuple[int, ...]], ...] = ()
    firm: tuple[int, ...] = ()
    rest: Template | None = None
    lets_go: tuple[int, ...] = ()

    def __call__(self, frame: Frame, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of the result.

        Raises:
            Unforeseen: a gradient where there was none when this was compiled, which the compiled graph has no place
                for.
            RuntimeError: sizes that do not follow from this step's as they did. Besides, whatever the user's code
                raises.
        """
        taken: Sequence[Any] = values
        if frame.absent is not None:
            is_there = frame.absent.is_there
            # Behind those that it looks at may be some that it only waits for.
            pairs = zip(values, self.sources, strict=False)
            taken = [value if is_there(*source) else None for value, source in pairs]
            for value in taken:
                check_number(value, frame)
        result = self.function(*[argument(frame, taken) for argument in self.arguments])
        if self.single and self.present[0] and result is not None and self.shapes is None:
            tensors = [result]
        else:
            tensors = self._completed(frame, result, values, taken)
        if self.lets_go and frame.is_in_order:
            for number in self.lets_go:
                del frame.inputs[number]
        return tensors

    def _completed(
        self, frame: Frame, result: Any, values: Sequence[torch.Tensor], taken: Sequence[Any]
    ) -> list[torch.Tensor]:
        """``taken`` are the values with None in the place of gradients that are None at this step."""
        given: Sequence[Any] = (result,) if self.single else result
        if self.rest is not None and any((given[n] is not None) != self.present[n] for n in self.firm):
            raise Unforeseen(self, result, self.rest(frame, taken))
        tensors: list[torch.Tensor] = []
        place = next((value.device for value in values), torch.device("cpu"))
        is_complete = True
        for present, tensor in zip(self.present, given, strict=True):
            # Any other is of an input that needs none: eager looks at it as little.
            if present:
                is_complete = is_complete and tensor is not None
                tensors.append(self._complete(frame, len(tensors), tensor, place))
        if not is_complete and frame.absent is None and frame.find_absent is not None:
            frame.absent = frame.find_absent()
            frame.is_checked = all(not value.is_floating_point() or bool(value.isfinite().all()) for value in values)
        if frame.absent is not None:
            there = tuple([tensor is not None for tensor in given])
            frame.absent.note(self.node, there[0] if self.single else there)
        return tensors

    def _complete(self, frame: Frame, number: int, tensor: torch.Tensor | None, place: torch.device) -> torch.Tensor:
        """A tensor of the result, of the size and type that the graph takes; a gradient of None is zeros. A gradient of
        another type is converted, and a larger one summed, as eager does with what custom functions give."""
        like = self.results[number]
        shape = like.shape
        if self.shapes is not None:
            shape = torch.Size([evaluate_size(size, frame.sizes) for size in self.shapes[number]])
        if tensor is None:
            return torch.zeros(shape, dtype=like.dtype, device=place)
        if tensor.shape != shape:
            tensor = self._sum_to(tensor, shape)
        return tensor if tensor.dtype == like.dtype else tensor.to(like.dtype)

    def _sum_to(self, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        try:
            return tensor.sum_to_size(shape)
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.label} returned a tensor of shape {list(tensor.shape)}, which at earlier steps would have been "
                f"{list(shape)}; have its shape follow from the backward's, or run outside of retrograd.enable()"
            ) from error


def check_number(value: torch.Tensor | None, frame: Frame) -> None:
    """Look at a gradient of a step at which others are None, which are zeros to what is compiled.

    Raises:
        ZerosForNone: it is no number, and may be one in eager, which computes nothing of what is None.
    """
    if frame.is_checked and value is not None and value.is_floating_point() and bool(value.isnan().any()):
        raise ZerosForNone(
            "a hook or a custom function gave None for a gradient that it gave when the backward was compiled; zeros "
            "in its place, times an infinity, are not a number. Set the gradients to None (optimizer.zero_grad()) and "
            "repeat the step, which from now on leaves out what is None"
        )


@dataclass(frozen=True)
class PythonCalls:
    """All calls of one backward by (kind, number), in the order of execution."""

    calls: dict[tuple[str, int], PythonCall] = field(default_factory=dict)

    def declarations(self) -> dict[tuple[str, int], Sequence[torch.Tensor]]:
        """Map each call to its results, for the tracer."""
        return {key: call.results for key, call in self.calls.items()}


def accumulate_into(
    variable: torch.Tensor,
    _captured_grad: Any,
    gradient: Any,
    has_post_hooks: bool | None = None,
    *,
    owned: bool = False,
) -> torch.Tensor | None:
    """Add ``gradient`` to ``variable.grad`` as it is now: what it was at capture may be out of date, where a nested
    backward (a reentrant checkpoint) has accumulated since.

    A gradient that is ``owned``, which nobody else has, becomes ``variable.grad`` itself, as in eager: a post hook,
    which is given it too, then sees what is written to it. Hooks that were put on the variable since the backward began
    are called.
    """
    if gradient is None:
        return variable.grad
    if LATE.is_changed and (late := LATE.of_leaf(variable)):
        return _accumulate_late(variable, gradient, late)
    if owned and variable.grad is None and _is_sparse_and_whole(gradient):
        # Eager's, a shallow copy: what the tensor is made of is not copied.
        parts = gradient._indices(), gradient._values()
        variable.grad = torch.sparse_coo_tensor(*parts, gradient.shape, device=gradient.device, check_invariants=False)
        return variable.grad
    if owned and variable.grad is None and obeys_layout(gradient, variable):
        variable.grad = gradient.detach() if has_post_hooks else gradient
        return variable.grad
    accumulate = compiled_autograd.ops.get("AccumulateGrad")
    (variable.grad,) = accumulate([gradient], variable, variable.grad, has_post_hooks)
    return variable.grad


def _accumulate_late(variable: torch.Tensor, gradient: torch.Tensor, late: Sequence[tuple[str, Any]]) -> Any:
    """Accumulate between the hooks that were put on a leaf late."""
    LATE.calls_late = True
    try:
        for kind, hook in late:
            if kind == TENSOR_HOOK:
                gradient = call_user_hook(hook, gradient, hook_type=kind)
        (variable.grad,) = compiled_autograd.ops.get("AccumulateGrad")([gradient], variable, variable.grad, True)
        for kind, hook in late:
            if kind != TENSOR_HOOK:
                call_user_hook(hook, variable, hook_type=kind)
    finally:
        LATE.calls_late = False
    return variable.grad


def _is_sparse_and_whole(gradient: torch.Tensor) -> bool:
    is_sparse = gradient.layout is torch.sparse_coo and not torch.is_grad_enabled()
    return is_sparse and gradient._indices().is_contiguous() and gradient._values().is_contiguous()


def obeys_layout(gradient: torch.Tensor, variable: torch.Tensor) -> bool:
    """Whether a gradient lies as its variable does, so that it need not be copied."""
    if gradient.layout is not torch.strided or torch.is_grad_enabled():
        return False
    if not is_non_overlapping_and_dense_or_false(variable):
        return gradient.is_contiguous()
    both = zip(gradient.shape, gradient.stride(), variable.stride(), strict=True)
    return all(mine == theirs if size != 1 else mine != 0 for size, mine, theirs in both)


def final_callbacks() -> None:
    """Do nothing: the engine in front of PyTorch's calls them when the backward has returned."""


def find_engine_only(graph: torch.fx.Graph, frame: Frame) -> str | None:
    """Why a backward has to run in PyTorch's engine; None where it need not."""
    for hook in frame.hooks:
        if _ASKS_FOR_NODE in _names_of(hook):
            return f"hook {describe_hook(hook)} asks for the node that runs ({_ASKS_FOR_NODE})"
    if (hook := find_putting(frame.hooks)) is not None:
        name = getattr(hook, "_forward_cls", None)
        what = f"hook {describe_hook(hook)}" if name is None else f"the backward of {name.__qualname__}"
        return f"{what} puts hooks on tensors, which is to take effect at once"
    for node in graph.find_nodes(op="call_function", target=accumulate_into):
        place, number = find_source(node.args[0])
        if place == "inputs" and (layout := frame.inputs[number].layout) is not torch.strided:
            return f"a leaf is of layout {layout}, which a gradient of another cannot be assigned to from Python"
    return None


def _names_of(hook: Any) -> tuple[str, ...]:
    """The names in a hook's code."""
    while isinstance(hook, partial):
        hook = hook.func
    called = hook if hasattr(hook, "__code__") else type(hook).__call__
    return tuple(called.__code__.co_names) if hasattr(called, "__code__") else ()
