# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Runs custom functions' backwards, and adds up gradients between nodes, as PyTorch's engine does. Compiled autograd's
own helpers assume that every gradient is there and dense, and that the function has a ``backward``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.compiled_autograd import copy_slices_prologue
from torch._dynamo.external_utils import FakeBackwardCFunction
from torch.autograd import Function
from torch.autograd.graph import Node

from retrograd.frontend.autograd.engine.engine_order import name_of

# A gradient that is None to a custom function, in the arguments of its node.
ABSENT = ...
_SETTER = torch.autograd.function.FunctionCtx.set_materialize_grads.__name__
_OF_NON_DIFFERENTIABLE = "_materialize_non_diff_grads"


class _Context(FakeBackwardCFunction):
    """The context of a custom function, of whose saved tensors those that are pairs of an unpack hook and its argument
    are unpacked when they are asked for, each time, as in eager."""

    def __init__(self, real: Any, saved: Sequence[Any]) -> None:
        vars(self).update(real=real, _saved=saved)

    def let_go(self) -> None:
        """Forget what was saved: who keeps the context does not keep that."""
        vars(self)["_saved"] = None

    def __setattr__(self, name: str, value: Any) -> None:
        # What the backward leaves on its context is there for whoever holds the node, and at a second backward.
        setattr(self.real, name, value)

    @property
    def saved_tensors(self) -> Any:  # type: ignore[override]
        """The tensors, as the backward sees them; once it is over, what the node has by then."""
        if self._saved is None:
            return self.real.saved_tensors
        return tuple([leaf[0](leaf[1]) if isinstance(leaf, tuple) else leaf for leaf in self._saved])


# As eager's contexts are.
Node.register(_Context)


def unpack_when_asked(graph: torch.fx.Graph, is_unpacking: Callable[[torch.fx.Node], bool]) -> None:
    """Have custom functions unpack what they saved themselves: nodes that unpack it for one of them alone become a pair
    of the hook and its argument among what it is given."""
    for node in graph.find_nodes(op="call_function", target=call_custom_backward):
        ctx, saved, *gradients = node.args
        packed = {leaf for leaf in saved if isinstance(leaf, torch.fx.Node) and is_unpacking(leaf)}
        own = {leaf for leaf in packed if set(leaf.users) == {node} and not _uses(gradients, leaf)}
        node.args = (ctx, [leaf.args[:2] if leaf in own else leaf for leaf in saved], *gradients)
        for leaf in own:
            graph.erase_node(leaf)


def keep_absent(graph: torch.fx.Graph) -> None:
    """Mark the gradients that PyTorch hands to custom functions as None: of those that are to be zeros it made zeros
    when it captured them. What is None at a step alone, since another function gave None, it could not know."""
    for node in graph.find_nodes(op="call_function", target=call_custom_backward):
        ctx, saved, *gradients = node.args
        node.args = (ctx, saved, *(ABSENT if gradient is None else gradient for gradient in gradients))


def mark_writes(graph: torch.fx.Graph) -> None:
    """Mark the custom functions that wrote to a view: the engine does not call them where there is no gradient."""
    for node in graph.find_nodes(op="call_function", target=call_custom_backward):
        sources = [argument.args[0] for argument in node.args[2:] if isinstance(argument, torch.fx.Node)]
        if any(getattr(source, "target", None) is prepare_slices for source in sources):
            node.kwargs = {"wrote_to_view": True}


def _uses(arguments: Sequence[Any], node: torch.fx.Node) -> bool:
    return any(argument is node for argument in arguments)


def call_custom_backward(
    ctx: Any, saved_tensors: Sequence[Any], *gradients: Any, wrote_to_view: bool = False
) -> tuple[Any, ...]:
    """Call the ``backward`` or ``vjp`` of a `torch.autograd.Function`; returns one gradient for each argument of its
    forward. It is given zeros for absent gradients, unless it said that it takes None; one that wrote to a view is not
    called without a gradient.

    Raises:
        RuntimeError: another number of gradients, or something that is none; as eager's. Besides, whatever the function
            raises.
    """
    if wrote_to_view and gradients[0] is None:
        return (None,) * len(ctx.needs_input_grad)
    if any(gradient is None for gradient in gradients) and _takes_zeros(ctx._forward_cls):
        gradients = tuple(_zeros(ctx, n) if g is None else g for n, g in enumerate(gradients))
    gradients = tuple(None if gradient is ABSENT else gradient for gradient in gradients)
    if getattr(ctx._forward_cls, "boxed_grads_call", False):
        gradients = (list(gradients),)
    context = _Context(ctx, saved_tensors)
    given = _backward_of(ctx._forward_cls)(context, *gradients)
    context.let_go()
    given = given if isinstance(given, tuple) else (given,)
    expected = len(ctx.needs_input_grad)
    while len(given) > expected and given[-1] is None:
        given = given[:-1]
    if len(given) != expected:
        raise RuntimeError(
            f"function {name_of(ctx)} returned an incorrect number of gradients (expected {expected}, got {len(given)})"
        )
    for gradient in given:
        if gradient is not None and not isinstance(gradient, torch.Tensor):
            raise RuntimeError(f"expected Variable or None (got {type(gradient).__name__})")
    return given


def _backward_of(function: Any) -> Callable[..., Any]:
    """The method that gives a function's gradients: ``backward`` or ``vjp``, whichever it defines."""
    own = own_backwards(function)
    if len(own) > 1:
        raise RuntimeError(
            f"Implementing both 'backward' and 'vjp' for a custom Function is not allowed: {function.__name__} has both"
        )
    backward: Callable[..., Any] = own[0] if own else function.backward
    return backward


def own_backwards(function: Any) -> list[Callable[..., Any]]:
    """The functions among ``backward`` and ``vjp`` that a custom function defines."""
    names = ("backward", "vjp")
    return [getattr(function, name) for name in names if getattr(function, name) is not getattr(Function, name)]


def _takes_zeros(function: Any) -> bool:
    """Whether absent gradients are zeros to a function. PyTorch keeps what ``set_materialize_grads`` was told to
    itself; a function that calls it has asked for None."""
    return not _names(function, _SETTER)


def _names(function: Any, attribute: str) -> bool:
    """Whether a function's forward names an attribute of its context."""
    codes = [getattr(getattr(function, name, None), "__code__", None) for name in ("forward", "setup_context")]
    return any(code is not None and attribute in code.co_names for code in codes)


def _zeros(ctx: Any, number: int) -> torch.Tensor | None:
    """The gradient of a result that has none; PyTorch keeps nothing of results that are not differentiable, whose
    function may have asked for None."""
    like = ctx._input_metadata[number]
    is_unknown = not like.shape and like.dtype is torch.get_default_dtype() and like.device.type == "cpu"
    if is_unknown and _names(ctx._forward_cls, _OF_NON_DIFFERENTIABLE):
        return None
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


def sum_gradients(first: Any, second: Any) -> Any:
    """The sum of two gradients for one output of a node, as the engine's buffers add them up: either may be None, or
    sparse."""
    if first is None or second is None:
        return second if first is None else first
    if first.layout is not torch.strided and second.layout is torch.strided:
        return torch.add(second, first)
    return torch.add(first, second)


def prepare_slices(gradients: Sequence[Any], *places: Any) -> list[Any]:
    """Begin the backward of a write to a view: return the gradient of its base, without the part that was written, and
    that part; None where there is no gradient."""
    if gradients[0] is None:
        return [None, None, None]
    return list(copy_slices_prologue(gradients, *places))


def finish_slices(needed: Sequence[bool], result: Any, given: Sequence[Any], part: Any) -> list[Any]:
    """The gradients of a write to a view: of the base, and of what was written."""
    found: list[Any] = [None] * len(needed)
    for number, is_needed in enumerate(needed):
        if is_needed and result is not None and given[number] is not None:
            if number == 0:
                part.copy_(given[number])
            found[number] = given[number] if number else result
    return found
