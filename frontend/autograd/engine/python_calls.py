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
from typing import Any

import torch
from torch._dynamo import compiled_autograd
from torch._prims_common import is_non_overlapping_and_dense_or_false

from retrograd.contract.sizes import Size, evaluate_size
from retrograd.frontend.hooks.hook_marks import describe_hook

# Gives the node of the engine that runs: of a captured backward none does.
_ASKS_FOR_NODE = "_current_autograd_node"


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

    def __call__(self, frame: Frame, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of the result.

        Raises:
            RuntimeError: a gradient where there was none when this was compiled, which the compiled graph has no place
                for; or sizes that do not follow from this step's as they did. Besides, whatever the user's code raises.
        """
        result = self.function(*[argument(frame, values) for argument in self.arguments])
        if self.single and self.present[0] and result is not None and self.shapes is None:
            return [result]
        return self._completed(frame, (result,) if self.single else result, values)

    def _completed(self, frame: Frame, given: Sequence[Any], values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        place = next((value.device for value in values), torch.device("cpu"))
        for index, (present, tensor) in enumerate(zip(self.present, given, strict=True)):
            if present:
                tensors.append(self._complete(frame, len(tensors), tensor, place))
            elif tensor is not None:
                raise RuntimeError(
                    f"{self.label} returned a gradient as result {index}, where it returned None when this backward "
                    "was compiled; return zeros instead of None, or run this backward outside of retrograd.enable()"
                )
        return tensors

    def _complete(self, frame: Frame, number: int, tensor: torch.Tensor | None, place: torch.device) -> torch.Tensor:
        """A tensor of the result, of the size that the graph takes; a gradient of None is a gradient of zeros."""
        like = self.results[number]
        if self.shapes is None:
            return torch.zeros_like(like, device=place) if tensor is None else tensor
        shape = tuple([evaluate_size(size, frame.sizes) for size in self.shapes[number]])
        if tensor is None:
            return torch.zeros(shape, dtype=like.dtype, device=place)
        if tuple(tensor.shape) != shape:
            raise RuntimeError(
                f"{self.label} returned a tensor of shape {list(tensor.shape)}, which at earlier steps would have been "
                f"{list(shape)}; have its shape follow from the backward's, or run outside of retrograd.enable()"
            )
        return tensor


@dataclass(frozen=True)
class PythonCalls:
    """All calls of one backward by (kind, number), in the order of execution."""

    calls: dict[tuple[str, int], PythonCall] = field(default_factory=dict)

    def declarations(self) -> dict[tuple[str, int], Sequence[torch.Tensor]]:
        """Map each call to its results, for the tracer."""
        return {key: call.results for key, call in self.calls.items()}


# -- What is called -------------------------------------------------------------------------------------------------


def call_user_hook(hook: Callable[..., Any], *args: Any, hook_type: str) -> Any:
    """Call a hook as eager does: gradients in tuples, ``None`` for no change, a result of the same type and size.

    After torch/csrc/autograd/python_hook.cpp, whose errors these are.

    Raises:
        RuntimeError, TypeError: a result of another type, size, or number.
    """
    return HOOK_CALLS[hook_type](hook, *args)


def _call_unpack_hook(hook: Callable[..., Any], packed: Any) -> Any:
    return hook(packed)


def _call_post_accumulate_hook(hook: Callable[..., Any], parameter: Any) -> Any:
    if hook(parameter) is not None:
        raise RuntimeError("Tensor post accumulate grad hooks should return None.")
    return parameter


def _call_tensor_hook(hook: Callable[..., Any], gradient: Any) -> Any:
    result = hook(gradient)
    return gradient if result is None else _checked(gradient, result, hook)


def _call_node_hook(hook: Callable[..., Any], *args: Any) -> Any:
    values = tuple(args[0])
    result = hook(*[tuple(a) for a in args])
    if result is None:
        return values
    if not isinstance(result, tuple):
        result = (result,)
    if len(result) != len(values):
        raise RuntimeError(
            f"hook '{_name(hook)}' has returned an incorrect number of values (got {len(result)}, but expected "
            f"{len(values)})"
        )
    return tuple(None if r is None else _checked(v, r, hook) for v, r in zip(values, result, strict=True))


# By what compiled autograd calls the kinds.
HOOK_CALLS: Mapping[str, Callable[..., Any]] = {
    "tensor_pre_hook": _call_tensor_hook,
    "pre_hook": _call_node_hook,
    "post_hook": _call_node_hook,
    "post_acc_grad_hook": _call_post_accumulate_hook,
    "unpack_hook": _call_unpack_hook,
}


def _checked(original: Any, result: Any, hook: Callable[..., Any]) -> Any:
    if original is None:
        raise RuntimeError("can't replace a None gradient with a non-None value")
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"expected Variable, but hook returned '{type(result).__name__}'")
    if (result.dtype, result.device.type, result.layout) != (original.dtype, original.device.type, original.layout):
        raise RuntimeError(
            f"hook '{_name(hook)}' has changed the type of value (was {original.type()} got {result.type()})"
        )
    if result.size() != original.size():
        raise RuntimeError(f"hook '{_name(hook)}' has changed the size of value")
    return result


def _name(hook: Callable[..., Any]) -> str:
    return getattr(hook, "__name__", "<unknown>")


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
    which is given it too, then sees what is written to it.
    """
    if gradient is None:
        return variable.grad
    if owned and variable.grad is None and _is_sparse_and_whole(gradient):
        # Eager's, a shallow copy: what the tensor is made of is not copied.
        parts = gradient._indices(), gradient._values()
        variable.grad = torch.sparse_coo_tensor(*parts, gradient.shape, check_invariants=False)
        return variable.grad
    if owned and variable.grad is None and obeys_layout(gradient, variable):
        variable.grad = gradient.detach() if has_post_hooks else gradient
        return variable.grad
    accumulate = compiled_autograd.ops.get("AccumulateGrad")
    (variable.grad,) = accumulate([gradient], variable, variable.grad, has_post_hooks)
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
    """Nothing: the engine that stands before PyTorch's calls them when the backward has returned."""


def find_engine_only(graph: torch.fx.Graph, frame: Frame) -> str | None:
    """Why a backward has to run in PyTorch's engine; None where it need not."""
    for hook in frame.hooks:
        if _ASKS_FOR_NODE in _names_of(hook):
            return f"hook {describe_hook(hook)} asks for the node that runs ({_ASKS_FOR_NODE})"
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
